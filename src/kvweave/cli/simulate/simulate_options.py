"""The options of `kvweave simulate`, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.prefix import POLICIES
from kvweave.sim import FORMATS
from kvweave.sim.tiers import BANDWIDTHS
from kvweave.sim.traces.block_ids import WAYS

TRACE, CACHE, TIERS, OUTPUT = "The trace", "The cache", "Tiers and time", "Output"

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE",
        help="Traces, each on its own: a file (.gz too), a .tar.gz, or a folder whose files are one trace.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="A config.json, a directory with one, or an example (`kvweave examples`). What `--record` wrote needs"
        " none: it carries its plan, and its retention unless one is given.",
        rich_help_panel=CACHE,
    ),
]
Memory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the cache, on each rank; may be repeated, for a curve.",
        show_default="20GiB, 80GiB, 320GiB",
        rich_help_panel=CACHE,
    ),
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME|FILE.py:NAME",
        help=f"What is evicted first: {', '.join(POLICIES)}, or a function or class of your own; may be repeated.",
        show_default="adaptive",
        rich_help_panel=CACHE,
    ),
]
Every = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="A resume point every so many tokens of a prompt; 0: none.",
        show_default="by what a point costs",
        rich_help_panel=CACHE,
    ),
]
DecodeEvery = Annotated[
    int, typer.Option(metavar="TOKENS", help="A state every so many generated tokens.", rich_help_panel=CACHE)
]
PromptEnds = Annotated[
    bool, typer.Option("--prompt-ends/--no-prompt-ends", help="Points at ends of prompts.", rich_help_panel=CACHE)
]
Branches = Annotated[
    bool, typer.Option("--branches/--no-branches", help="Points where prompts part.", rich_help_panel=CACHE)
]
BlockTokens = Annotated[int, typer.Option(metavar="N", help="Tokens a block.", rich_help_panel=CACHE)]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="What keys and values are kept in.", rich_help_panel=CACHE)]
Tp = Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks; memory is a rank's.", rich_help_panel=CACHE)]
StepTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of a prefill step.", rich_help_panel=CACHE)]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME=SIZE[@BYTES/s]",
        help="A tier below the memory, larger than it: host=256GB, disk=2TB@5GB/s; may be repeated, from fast to slow."
        f" Bandwidths are known for {', '.join(BANDWIDTHS)}.",
        rich_help_panel=TIERS,
    ),
]
PrefillSpeed = Annotated[
    float, typer.Option(metavar="TOKENS/S", help="How fast prompts are computed.", rich_help_panel=TIERS)
]
FormatName = Annotated[
    str,
    typer.Option("--format", metavar="NAME", help=f"auto, {', '.join(FORMATS)}.", rich_help_panel=TRACE),
]
Read = Annotated[
    str,
    typer.Option(
        "--read",
        metavar="WAY",
        help=f"What to make of tails and outputs of traces of block ids: {' or '.join(WAYS)}."
        " cont: as much as can be reconstructed; blocks: whole blocks of prompts, nothing else.",
        rich_help_panel=TRACE,
    ),
]
TokenizerPath = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="Of traces of text; needs the extra transformers.",
        show_default="4 bytes are a token",
        rich_help_panel=TRACE,
    ),
]
Sample = Annotated[
    float, typer.Option(metavar="SHARE", help="Only so many of the sessions, whole ones.", rich_help_panel=TRACE)
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the sample.", rich_help_panel=TRACE)]
LoadOnly = Annotated[
    bool,
    typer.Option("--load", help="Lengths and rates of the traces; nothing is replayed.", rich_help_panel=OUTPUT),
]
Oracles = Annotated[
    bool,
    typer.Option("--oracles/--no-oracles", help="What perfect foresight would have hit.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool, typer.Option("--json", help="A JSON object a policy and memory, a line each.", rich_help_panel=OUTPUT)
]
Csv = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A row a request, policy and memory.", dir_okay=False, rich_help_panel=OUTPUT),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="One HTML page: the curve over memory, the timeline, where misses came from.",
        dir_okay=False,
        rich_help_panel=OUTPUT,
    ),
]
