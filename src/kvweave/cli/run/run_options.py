"""The options of `kvweave run`, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.run.workload import WORKLOADS

WHAT, WORKLOAD, MODEL, OUTPUT = "What to run", "Size of a workload", "Model and memory", "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A local model directory; or an example (`kvweave examples`) or config.json, to run a small model of its"
        " shape with random weights.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="Continue a text; may be repeated, and then shares.", rich_help_panel=WHAT
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="A conversation: lines of stdin, until its end or /quit.", rich_help_panel=WHAT)
]
Workload = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Play {', '.join(WORKLOADS)}: agents that use tools, conversations, questions over documents.",
        show_default="agents",
        rich_help_panel=WHAT,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of an answer, at most.", rich_help_panel=WHAT)]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Ask everything again without reuse, and check that every token is equal; exit code 1 if not.",
        rich_help_panel=WHAT,
    ),
]
Parties = Annotated[
    int, typer.Option(metavar="N", help="Agents, conversations or documents.", rich_help_panel=WORKLOAD)
]
Turns = Annotated[
    int, typer.Option(metavar="N", help="Turns of each, or questions a document.", rich_help_panel=WORKLOAD)
]
SharedTokens = Annotated[
    int,
    typer.Option(metavar="N", help="Tokens of the system prompt, or of each document.", rich_help_panel=WORKLOAD),
]
TurnTokens = Annotated[
    int,
    typer.Option(
        metavar="N", help="Tokens that each turn adds: a tool's result, a question.", rich_help_panel=WORKLOAD
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Of the workload's text, and of random weights.", rich_help_panel=WORKLOAD)
]
Size = Annotated[
    str,
    typer.Option(
        "--size",
        metavar="COUNT",
        help="Parameters of a random model, at most: 8M, 100M. Widths are divided until it fits, the layer pattern is"
        " kept.",
        rich_help_panel=MODEL,
    ),
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory for the pages: 2GiB, 512MiB or bytes.", rich_help_panel=MODEL)
]
BlockTokens = Annotated[
    int, typer.Option(metavar="N", help="Tokens a block: how finely prefixes are found.", rich_help_panel=MODEL)
]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="DIR_OR_URL",
        help="Keep prefixes there, and look for them there: the next run starts warm, and other processes share them."
        " DIR or DIR:SIZE (of one process at a time; 20 GiB if no size is given); the socket of `kvweave serve` (many"
        " processes); redis://, s3://, gs://, az:// or file://.",
        rich_help_panel=MODEL,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What weights these are, for the store: prefixes of others are never used. Without it they are hashed.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16, float16; auto is float32 on a CPU, else the model's own.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.", rich_help_panel=MODEL)]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write one HTML page: requests, time saved, the tree, a map of all pages, the plan.",
        dir_okay=False,
        rich_help_panel=OUTPUT,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the requests as a trace for `kvweave simulate`: hashes of tokens, nothing of their text.",
        dir_okay=False,
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.", rich_help_panel=OUTPUT)]
