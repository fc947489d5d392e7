"""The options of `kvweave plan`, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.gpu import BITS, RESERVE_SHARE, STEP_TOKENS
from kvweave.plan.planner import POOLS
from kvweave.plan.pool import Layout
from kvweave.spec.layer_caches import FLOATS, QUANTS

MODEL, MEMORY, PARALLEL, DRAFTS, OUTPUT = "Model", "Memory", "Parallel", "Draft models", "Output"

Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A config.json, a directory with one, or an example (`kvweave examples`)."),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"What keys and values are kept in: auto (the model's), {', '.join([*FLOATS, *QUANTS])}.",
        rich_help_panel=MODEL,
    ),
]
BlockTokens = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N|TAG=N",
        help="Tokens a block, for all groups or for one; may be repeated.",
        show_default="16",
        rich_help_panel=MODEL,
    ),
]
KernelTokens = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N|TAG=N",
        help="Tokens that a kernel indexes at once, for all groups or for one; may be repeated.",
        show_default="the block",
        rich_help_panel=MODEL,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the cache alone, weights apart: 80GiB, 512MiB, 64GB or bytes.",
        show_default="80GiB",
        rich_help_panel=MEMORY,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a whole GPU instead: weights, activations and a reserve are subtracted, and shown.",
        rich_help_panel=MEMORY,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|DTYPE",
        help=f"With --gpu: all weights in bytes (140GiB), or their dtype ({', '.join(BITS)}).",
        show_default="the safetensors beside CONFIG, else parameters counted from it in its dtype",
        rich_help_panel=MEMORY,
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With --gpu: what a step needs beside weights and cache.",
        show_default=f"an estimate for {STEP_TOKENS:,} tokens",
        rich_help_panel=MEMORY,
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Bytes to leave alone.",
        show_default=f"0, or {RESERVE_SHARE:.0%} with --gpu",
        rich_help_panel=MEMORY,
    ),
]
Pools = Annotated[
    str,
    typer.Option(metavar="KIND", help=f"How groups share memory: {', '.join(POOLS)}.", rich_help_panel=MEMORY),
]
OwnPools = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        metavar="TAG=SIZE",
        help="A pool of its own for a group: TAG=PAGES, TAG=30% (of the memory), TAG=PAGES@host or @pinned;"
        " may be repeated.",
        rich_help_panel=MEMORY,
    ),
]
LayoutName = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        help=f"{' or '.join(Layout)}.",
        show_default="page_major if groups share a pool",
        rich_help_panel=MEMORY,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="A length in tokens that must fit at least once, and is counted too.",
        rich_help_panel=MEMORY,
    ),
]
Tp = Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.", rich_help_panel=PARALLEL)]
Cp = Annotated[int, typer.Option(metavar="N", help="Context-parallel ranks.", rich_help_panel=PARALLEL)]
Pp = Annotated[int, typer.Option(metavar="N", help="Pipeline stages.", rich_help_panel=PARALLEL)]
PpRank = Annotated[int, typer.Option(metavar="R", help="The pipeline stage to plan, from 0.", rich_help_panel=PARALLEL)]
Draft = Annotated[
    str | None,
    typer.Option(metavar="CONFIG", help="A draft model whose layers join the groups.", rich_help_panel=DRAFTS),
]
DraftOwnGroups = Annotated[
    bool, typer.Option("--draft-own-groups", help="Give the draft groups of its own.", rich_help_panel=DRAFTS)
]
Mtp = Annotated[
    bool, typer.Option("--mtp", help="Add the draft (MTP) layers of the checkpoint itself.", rich_help_panel=DRAFTS)
]
Explain = Annotated[bool, typer.Option("--explain", help="Say why each page has its size.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.", rich_help_panel=OUTPUT)]
Svg = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the memory as an SVG picture.", dir_okay=False, rich_help_panel=OUTPUT),
]
