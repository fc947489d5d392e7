"""WHAT a layer keeps: roles, reaches, layer caches, models; JSON in and out."""

from kvweave.spec.dtypes import DType
from kvweave.spec.layer_spec import Layer, LayerCache, Read
from kvweave.spec.model import ModelSpec
from kvweave.spec.reach import Chunk, Full, Reach, SinkWindow, State, Window, register_reach
from kvweave.spec.role import Part, Role, Segment

__all__ = [
    "Chunk",
    "DType",
    "Full",
    "Layer",
    "LayerCache",
    "ModelSpec",
    "Part",
    "Reach",
    "Read",
    "Role",
    "Segment",
    "SinkWindow",
    "State",
    "Window",
    "register_reach",
]
