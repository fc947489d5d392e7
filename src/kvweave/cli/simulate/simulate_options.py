"""The options of `kvweave simulate`, as typer takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvweave.policy import POLICIES
from kvweave.sim import FORMATS
from kvweave.sim.tiers import BANDWIDTHS
from kvweave.sim.traces.block_ids import WAYS

_trace, _cache, _tiers, _output = (
    partial(typer.Option, rich_help_panel=title) for title in ("The trace", "The cache", "Tiers and time", "Output")
)

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE",
        help="Traces to replay, each apart: a file (also .gz), a .tar.gz, or a folder whose files are one trace.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    _cache(
        metavar="CONFIG",
        help="A config.json, a directory with one, or an example (`kvweave examples`). Traces of `kvweave run --record`"
        " need none: they contain the plan and the retention.",
    ),
]
Memory = Annotated[
    list[str] | None,
    _cache(
        metavar="SIZE",
        help="Memory of the cache on each rank; may be repeated, for a curve.",
        show_default="20GiB, 80GiB, 320GiB",
    ),
]
PolicyNames = Annotated[
    list[str] | None,
    _cache(
        "--policy",
        metavar="NAME|FILE.py:NAME",
        help=f"Which resume point is evicted first: {', '.join(POLICIES)}, or a function or class of your own; may be"
        " repeated.",
        show_default="adaptive",
    ),
]
Every = Annotated[
    int | None,
    _cache(
        metavar="TOKENS",
        help="Keep a resume point every TOKENS of a prompt; 0: none.",
        show_default="by the bytes of a point",
    ),
]
DecodeEvery = Annotated[int, _cache(metavar="TOKENS", help="Keep a state every TOKENS generated.")]
PromptEnds = Annotated[bool, _cache("--prompt-ends/--no-prompt-ends", help="Keep resume points at ends of prompts.")]
Branches = Annotated[bool, _cache("--branches/--no-branches", help="Keep resume points where prompts part.")]
BlockTokens = Annotated[int, _cache(metavar="N", help="Tokens in a block.")]
Dtype = Annotated[str, _cache(metavar="NAME", help="Dtype of keys and values.")]
Tp = Annotated[int, _cache(metavar="N", help="Tensor-parallel ranks; --memory is that of one.")]
StepTokens = Annotated[int, _cache(metavar="N", help="Most tokens in a prefill step.")]
Tiers = Annotated[
    list[str] | None,
    _tiers(
        "--tier",
        metavar="NAME=SIZE[@BYTES/s]",
        help="A slower tier, larger than the memory: host=256GB, disk=2TB@5GB/s; may be repeated, from fast to slow."
        f" The bandwidth may be left out for {', '.join(BANDWIDTHS)}.",
    ),
]
PrefillSpeed = Annotated[float, _tiers(metavar="TOKENS/S", help="Speed at which prompts are computed.")]
FormatName = Annotated[
    str, _trace("--format", metavar="NAME", help=f"Format of the traces: auto, {', '.join(FORMATS)}.")
]
Read = Annotated[
    str,
    _trace(
        "--read",
        metavar="WAY",
        help=f"How to read traces of block ids: {' or '.join(WAYS)}. cont: reconstruct tails of prompts and answers"
        " where later prompts show them; blocks: whole blocks of prompts only.",
    ),
]
TokenizerPath = Annotated[
    str | None,
    _trace(
        "--tokenizer",
        metavar="DIR",
        help="The tokenizer for traces of text; needs the extra transformers.",
        show_default="4 bytes are a token",
    ),
]
Sample = Annotated[float, _trace(metavar="SHARE", help="Replay this share of the sessions, each whole.")]
Seed = Annotated[int, _trace(metavar="N", help="Seed of --sample.")]
LoadOnly = Annotated[bool, _output("--load", help="Show lengths and rates of the traces; replay nothing.")]
Oracles = Annotated[
    bool, _output("--oracles/--no-oracles", help="Also compute what caches with perfect foresight would hit.")
]
Json = Annotated[bool, _output("--json", help="A line with a JSON object for each policy and memory.")]
Csv = Annotated[
    Path | None, _output(metavar="FILE", help="Write a row for each request, policy and memory.", dir_okay=False)
]
Report = Annotated[
    Path | None,
    _output(
        metavar="FILE", help="Write an HTML page: hits over memory, over time, and reasons of misses.", dir_okay=False
    ),
]
