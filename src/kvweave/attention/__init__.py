"""COMPUTING on pages: attention that reads pages in place through block tables, and writes of new rows. Needs torch."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.attention", "torch"):
    from kvweave.attention.base import Attention
    from kvweave.attention.choose import open_attention
    from kvweave.attention.options import AttentionOptions
    from kvweave.attention.states import read_states, write_states
    from kvweave.attention.step import Step, make_step
    from kvweave.attention.step_buffers import UNKNOWN_ID, FixedStep, StepBuffers, StepSize

__all__ = [
    "UNKNOWN_ID",
    "Attention",
    "AttentionOptions",
    "FixedStep",
    "Step",
    "StepBuffers",
    "StepSize",
    "make_step",
    "open_attention",
    "read_states",
    "write_states",
]
