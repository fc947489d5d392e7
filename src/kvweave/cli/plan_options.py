"""The options of `kvweave plan`, as typer takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.gpu import BITS, RESERVE_SHARE, STEP_TOKENS
from kvweave.plan.planner import POOLS
from kvweave.plan.pool import Layout
from kvweave.spec.layer_caches import FLOATS, QUANTS

_model, _memory, _parallel, _drafts, _output = (
    partial(typer.Option, rich_help_panel=title) for title in ("Model", "Memory", "Parallel", "Draft models", "Output")
)

Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A config.json, a directory with one, or an example (`kvweave examples`)."),
]
Dtype = Annotated[
    str, _model(metavar="NAME", help=f"Dtype of keys and values: auto (the model's), {', '.join([*FLOATS, *QUANTS])}.")
]
BlockTokens = Annotated[
    list[str] | None,
    _model(metavar="N|TAG=N", help="Tokens in a block, for all groups or for one; may be repeated.", show_default="16"),
]
KernelTokens = Annotated[
    list[str] | None,
    _model(
        metavar="N|TAG=N",
        help="Tokens in a block of the attention kernel, for all groups or for one; may be repeated.",
        show_default="the block",
    ),
]
Memory = Annotated[
    str | None,
    _memory(
        metavar="SIZE",
        help="Memory for the cache alone, without weights: 80GiB, 512MiB, 64GB or bytes.",
        show_default="80GiB",
    ),
]
Gpu = Annotated[
    str | None,
    _memory(
        metavar="SIZE",
        help="Memory of a whole GPU instead; weights, activations and a reserve are subtracted and shown.",
    ),
]
Weights = Annotated[
    str | None,
    _memory(
        metavar="SIZE|DTYPE",
        help=f"With --gpu: all weights in bytes (140GiB), or their dtype ({', '.join(BITS)}).",
        show_default="the safetensors beside CONFIG, else parameters counted from it in its dtype",
    ),
]
Activations = Annotated[
    str | None,
    _memory(
        metavar="SIZE",
        help="With --gpu: memory that a step needs beside weights and cache.",
        show_default=f"an estimate for {STEP_TOKENS:,} tokens",
    ),
]
Reserve = Annotated[
    str | None,
    _memory(
        metavar="SIZE",
        help="Memory that the cache leaves unused.",
        show_default=f"0, or {RESERVE_SHARE:.0%} with --gpu",
    ),
]
Pools = Annotated[str, _memory(metavar="KIND", help=f"How groups share memory: {', '.join(POOLS)}.")]
OwnPools = Annotated[
    list[str] | None,
    _memory(
        "--pool",
        metavar="TAG=SIZE",
        help="Give a group its own pool: TAG=PAGES, TAG=30% (of the memory), TAG=PAGES@host or @pinned;"
        " may be repeated.",
    ),
]
LayoutName = Annotated[
    str | None,
    _memory(
        "--layout",
        metavar="NAME",
        help=f"Order of bytes in memory: {' or '.join(Layout)}.",
        show_default="page_major if groups share a pool",
    ),
]
Context = Annotated[int | None, _memory(metavar="TOKENS", help="A sequence of this length must fit; says how many do.")]
Tp = Annotated[int, _parallel(metavar="N", help="Tensor-parallel ranks.")]
Cp = Annotated[int, _parallel(metavar="N", help="Context-parallel ranks.")]
Pp = Annotated[int, _parallel(metavar="N", help="Pipeline stages.")]
PpRank = Annotated[int, _parallel(metavar="R", help="The pipeline stage to plan, from 0.")]
Draft = Annotated[
    str | None, _drafts(metavar="CONFIG", help="A draft model, whose layers share the groups of the model.")
]
DraftOwnGroups = Annotated[bool, _drafts("--draft-own-groups", help="Give the draft model its own groups.")]
Mtp = Annotated[bool, _drafts("--mtp", help="Add the draft (MTP) layers of the checkpoint itself.")]
Explain = Annotated[bool, _output("--explain", help="Say why each page has its size.")]
Json = Annotated[bool, _output("--json", help="One JSON object on stdout, nothing else.")]
Svg = Annotated[Path | None, _output(metavar="FILE", help="Draw the memory as an SVG picture.", dir_okay=False)]
