"""The options of `kvweave run`, as typer takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.run.run_request import NEW_TOKENS
from kvweave.cli.run.workload import WORKLOADS

_what, _sampling, _workload, _model, _output = (
    partial(typer.Option, rich_help_panel=title)
    for title in ("What to run", "Sampling", "Size of a workload", "Model and memory", "Output")
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A local model directory. For an example (`kvweave examples`) or a config.json, a small model of that"
        " architecture with random weights is made.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    _what(
        "--prompt",
        metavar="TEXT",
        help="A text to continue; may be repeated: each prompt reuses the prefix that it shares with earlier ones.",
    ),
]
Chat = Annotated[
    bool,
    _what("--chat", help="A conversation: reads lines from stdin, until its end or /quit. Ctrl-C stops an answer."),
]
Workload = Annotated[
    str | None,
    _what(
        metavar="NAME",
        help=f"Make requests of one kind: {', '.join(WORKLOADS)} (agents that use tools, conversations, questions on"
        " documents).",
        show_default="agents",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    _what(
        metavar="N",
        help="The longest answer, in tokens.",
        show_default=", ".join(f"{count} ({what})" for what, count in NEW_TOKENS.items()),
    ),
]
Temperature = Annotated[float | None, _sampling(metavar="T", help="Sample at this temperature.", show_default="greedy")]
TopP = Annotated[
    float | None, _sampling(metavar="P", help="Sample among the likeliest tokens whose probabilities sum to P.")
]
TopK = Annotated[int | None, _sampling(metavar="K", help="Sample among the K likeliest tokens.")]
MinP = Annotated[
    float | None, _sampling(metavar="P", help="Sample among tokens at least P times as likely as the likeliest one.")
]
Penalty = Annotated[
    float | None,
    _sampling("--repetition-penalty", metavar="X", help="Above 1: tokens that occurred before become less likely."),
]
Compare = Annotated[
    bool,
    _what(
        "--compare", help="Repeat each request without reuse and check that all tokens are equal; exit code 1 if not."
    ),
]
Parties = Annotated[int, _workload(metavar="N", help="Number of agents, conversations or documents.")]
Turns = Annotated[int, _workload(metavar="N", help="Turns of each, or questions on each document.")]
SharedTokens = Annotated[int, _workload(metavar="N", help="Tokens of the system prompt, or of each document.")]
TurnTokens = Annotated[int, _workload(metavar="N", help="Tokens that each turn adds: a tool's result or a question.")]
Seed = Annotated[int, _model(metavar="N", help="Seed of random weights, of the workload's text, and of sampling.")]
Size = Annotated[
    str,
    _model(
        "--size",
        metavar="COUNT",
        help="The largest number of parameters of a random model: 8M, 100M. Widths are divided until it fits; the layer"
        " pattern stays.",
    ),
]
Memory = Annotated[str, _model(metavar="SIZE", help="Memory for the pages: 2GiB, 512MiB or bytes.")]
BlockTokens = Annotated[int, _model(metavar="N", help="Tokens in a block; prefixes are reused in whole blocks.")]
Store = Annotated[
    str | None,
    _model(
        metavar="DIR_OR_URL",
        help="Save KV there and load it from there, so that the next run and other processes need not compute it again."
        " DIR or DIR:SIZE (one process at a time; default 20GiB), the socket of `kvweave serve` (many processes), or"
        " redis://, s3://, gs://, az://, file://. Whole chunks of 256 tokens are stored.",
    ),
]
Weights = Annotated[
    str | None,
    _model(
        metavar="NAME",
        help="With --store: a name for these weights; KV of other names is never used. Default: a hash of the weights.",
    ),
]
Dtype = Annotated[
    str,
    _model(metavar="NAME", help="float32, bfloat16 or float16; auto is float32 on a CPU, else the model's own dtype."),
]
Device = Annotated[str, _model(metavar="NAME", help="cpu or cuda.")]
Report = Annotated[
    Path | None,
    _output(
        metavar="FILE",
        help="Write an HTML page: requests, time saved, the prefix tree, all pages of the memory, the plan.",
        dir_okay=False,
    ),
]
Record = Annotated[
    Path | None,
    _output(
        metavar="FILE",
        help="Write the requests as a trace for `kvweave simulate`; it has hashes of tokens and no text.",
        dir_okay=False,
    ),
]
Json = Annotated[bool, _output("--json", help="One JSON object on stdout, nothing else.")]
