"""MOVING pages: flat chunks, copy plans, and copiers for CPU and CUDA that run the same plans. Needs torch."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.transfer", "torch"):
    from kvweave.transfer.check import check_layout
    from kvweave.transfer.copier import ChunkBuffer, Completion, Copier, CopyJob, CopyStep, Direction
    from kvweave.transfer.copy_plan import CopyPlan, Move, join, make_move, needed, whole_chunks
    from kvweave.transfer.cpu_copier import CPUCopier
    from kvweave.transfer.layout import ChunkGroup, ChunkLayout, LayerGroup
    from kvweave.transfer.mover import Mover, MoverStats
    from kvweave.transfer.reference_copier import ReferenceCopier
    from kvweave.transfer.transfer import Transfer

__all__ = [
    "CPUCopier",
    "ChunkBuffer",
    "ChunkGroup",
    "ChunkLayout",
    "Completion",
    "Copier",
    "CopyJob",
    "CopyPlan",
    "CopyStep",
    "Direction",
    "LayerGroup",
    "Move",
    "Mover",
    "MoverStats",
    "ReferenceCopier",
    "Transfer",
    "check_layout",
    "join",
    "make_move",
    "needed",
    "whole_chunks",
]
