"""MOVING pages: flat chunks, copy plans, copiers for CPU and CUDA that run the same plans. Needs torch."""

from kvweave.transfer.check import check_layout
from kvweave.transfer.copier import Buffer, Copier, Job, Mark, Step, Way
from kvweave.transfer.copies import CopyPlan, Move, join, make_move, needed, whole_chunks
from kvweave.transfer.cpu import CPUCopier
from kvweave.transfer.layout import ChunkGroup, ChunkLayout, LayerGroup
from kvweave.transfer.mover import Mover, MoverStats
from kvweave.transfer.reference import ReferenceCopier
from kvweave.transfer.transfer import State, Transfer

__all__ = [
    "Buffer",
    "CPUCopier",
    "ChunkGroup",
    "ChunkLayout",
    "Copier",
    "CopyPlan",
    "Job",
    "LayerGroup",
    "Mark",
    "Move",
    "Mover",
    "MoverStats",
    "ReferenceCopier",
    "State",
    "Step",
    "Transfer",
    "Way",
    "check_layout",
    "join",
    "make_move",
    "needed",
    "whole_chunks",
]
