"""HOW ids become memory: arenas, views of layers, rows in and out, backends, host caches. Needs torch."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.tensor", "torch"):
    from kvweave.tensor.arena import Arena, ArenaStats, PoolMemory
    from kvweave.tensor.backend import AttentionBackend, LayerRequest, assemble, not_hosted
    from kvweave.tensor.backends import DSA, GQA, MLA, NoCache, Opaque, Recurrent
    from kvweave.tensor.host import HostMirror, MirrorStats
    from kvweave.tensor.layer import LayerView, RoleView
    from kvweave.tensor.memory import Memory
    from kvweave.tensor.names import tensor_name
    from kvweave.tensor.page_copies import carry_out, copy_pages, zero_pages
    from kvweave.tensor.quant import Quantiser, pack, unpack
    from kvweave.tensor.rows import gather_rows, read_rows, row_slots, write_rows
    from kvweave.tensor.tokens import gather_tokens, write_tokens
    from kvweave.tensor.upload import upload

__all__ = [
    "DSA",
    "GQA",
    "MLA",
    "Arena",
    "ArenaStats",
    "AttentionBackend",
    "HostMirror",
    "LayerRequest",
    "LayerView",
    "Memory",
    "MirrorStats",
    "NoCache",
    "Opaque",
    "PoolMemory",
    "Quantiser",
    "Recurrent",
    "RoleView",
    "assemble",
    "carry_out",
    "copy_pages",
    "gather_rows",
    "gather_tokens",
    "not_hosted",
    "pack",
    "read_rows",
    "row_slots",
    "tensor_name",
    "unpack",
    "upload",
    "write_rows",
    "write_tokens",
    "zero_pages",
]
