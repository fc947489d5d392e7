"""`kvweave demo`: agents with one system prompt on two hybrid models, with reuse and without; then from disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvweave.cli.demo_plan import plan_demo
from kvweave.cli.read_config import written
from kvweave.cli.report import report_html, run_svg
from kvweave.cli.run.command import format_heading, run_with_progress
from kvweave.cli.run.format_outcomes import format_mismatches, format_seconds, format_speedup
from kvweave.cli.run.outcome import RunOutcomes
from kvweave.cli.run.run_request import RunRequest, RunResult
from kvweave.cli.run.workload import WorkloadSize
from kvweave.cli.table import console, plain_table, print_table

if TYPE_CHECKING:
    from kvweave.cli.demo_at_once import AtOnceOutcome

FOLDER = Path("kvweave-demo")
STORE = FOLDER / "store"
WORKLOAD = WorkloadSize(parties=3, turns=3, shared_tokens=1536, turn_tokens=128)
AT_ONCE = WorkloadSize(parties=8, turns=1, shared_tokens=512, turn_tokens=64)
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model of the demo: an example, how large, and what is special about it."""

    example: str
    parameters: str
    memory: str
    mixes: str


MODELS = (
    DemoModel("gemma-3-27b", "48M", "128MiB", "windows + full attention"),
    DemoModel("qwen3-next-80b", "48M", "192MiB", "states + full attention"),
)


def demo_command(
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan eight models for 80 GiB instead; needs no torch, takes a second.")
    ] = False,
) -> None:
    """Run agents that share a system prompt on two small hybrid models, with and without reuse, and compare all tokens.
    Then ask for many answers at once, and repeat a request in a new process, which has only the KV that the first one
    stored on disk.

    Takes about two minutes on two cores. The models have random weights and the layer patterns of gemma-3-27b and
    qwen3-next-80b. Reports and the store are written to ./kvweave-demo.
    """
    FOLDER.mkdir(exist_ok=True)
    if plan:
        plan_demo(FOLDER)
        return
    shutil.rmtree(STORE, ignore_errors=True)
    out = console()
    out.print(
        f"{WORKLOAD.parties} agents, {WORKLOAD.turns} turns each, one system prompt of {WORKLOAD.shared_tokens:,}"
        " tokens; every request is also made without reuse.",
        style="bold",
    )
    results = [_shown(out, model) for model in MODELS]
    out.print()
    print_table(out, _table(results))
    out.print()
    out.print(
        f"Now {AT_ONCE.parties} agents at once, {AT_ONCE.shared_tokens} tokens shared: by the engine, and by"
        " transformers as one batch.",
        style="bold",
    )
    at_once = [_at_once(model) for model in MODELS]
    out.print()
    print_table(out, _at_once_table(at_once))
    out.print()
    out.print(
        "Now a new process for each model, with empty memory, gets the first agent's request again.", style="bold"
    )
    again = [_restarted(model) for model in MODELS]
    out.print()
    print_table(out, _restart_table(results, again))
    out.print()
    for model in MODELS:
        out.print(f"Report: {_path(model, 'html').resolve()}", soft_wrap=True)
    out.print(f"Go on with:  kvweave run {MODELS[0].example} --workload rag --compare --store {STORE}")
    equal = [not result.outcomes.unequal for result in results]
    if not all([*equal, *(run["all_tokens_equal"] for run in again), *(outcome.are_equal for outcome in at_once)]):
        raise typer.Exit(1)


def _shown(out: Console, model: DemoModel) -> RunResult:
    """Run one model, write its report and its picture, and say what it was."""
    result = run_with_progress(
        RunRequest(
            model.example,
            workload="agents",
            size=WORKLOAD,
            memory=model.memory,
            compare=True,
            max_new_tokens=NEW_TOKENS,
            parameters=model.parameters,
            store=str(STORE),
        )
    )
    written(_path(model, "html"), report_html(result))
    written(_path(model, "svg"), run_svg(result))
    out.print(format_heading(result))
    if result.outcomes.unequal:
        out.print(format_mismatches(result.outcomes, result.answer.dtype), style="bold red")
    return result


def _at_once(model: DemoModel) -> AtOnceOutcome:
    from kvweave.cli.demo_at_once import ask_at_once  # noqa: PLC0415 - torch: an extra, and seconds to load

    return ask_at_once(model.example, model.parameters, model.memory, AT_ONCE, NEW_TOKENS)


def _restarted(model: DemoModel) -> dict[str, Any]:
    """`kvweave run --json` in a process of its own, over the same store: the first request of the workload."""
    size = {"parties": 1, "turns": 1, "shared-tokens": WORKLOAD.shared_tokens, "turn-tokens": WORKLOAD.turn_tokens}
    options = {**size, "size": model.parameters, "memory": model.memory, "store": STORE, "max-new-tokens": NEW_TOKENS}
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    main = "import sys; from kvweave.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", main, "run", model.example, *named, "--compare", "--json"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not run.stdout:
        raise typer.Exit(run.returncode)  # it has said why
    said: dict[str, Any] = json.loads(run.stdout)
    return said


def _path(model: DemoModel, kind: str) -> Path:
    return FOLDER / f"{model.example}.{kind}"


def _table(results: Sequence[RunResult]) -> Table:
    heads = (">prompt tokens\nreused", ">first token\nwithout", ">\nwith reuse", ">\nspeedup", ">all tokens\nequal")
    table = plain_table("\nmodel", "~\nits layers mix", *heads)
    for model, result in zip(MODELS, results, strict=True):
        table.add_row(result.name, model.mixes, *_cells(result.outcomes))
    return table


def _cells(outcomes: RunOutcomes) -> list[str]:
    count = len(outcomes.each)
    return [
        f"{outcomes.reused_tokens:,} ({outcomes.reused_share:.0%})",
        format_seconds(outcomes.plain_first_token_seconds / count),
        format_seconds(outcomes.first_token_seconds / count),
        format_speedup(outcomes.faster),
        "NO" if outcomes.unequal else "yes",
    ]


def _at_once_table(outcomes: Sequence[AtOnceOutcome]) -> Table:
    heads = (
        ">\nrequests",
        ">prompt tokens\nreused",
        ">all answers after\nas a batch",
        ">\nby the engine",
        ">\nspeedup",
    )
    table = plain_table("\nmodel", *heads, ">all tokens\nequal")
    for outcome in outcomes:
        times = [outcome.batch_seconds, outcome.engine_seconds]
        shown = [*map(format_seconds, times), format_speedup(times[0] / times[1])]
        reused = f"{outcome.cached_share:.0%}"
        table.add_row(outcome.name, str(outcome.requests), reused, *shown, "yes" if outcome.are_equal else "NO")
    return table


def _restart_table(results: Sequence[RunResult], again: Sequence[dict[str, Any]]) -> Table:
    heads = (">prompt\ntokens", ">reused\nfrom disk", ">first token\ncold", ">\nafter restart", ">\nspeedup")
    table = plain_table("\nmodel", *heads, ">all tokens\nequal")
    for result, run in zip(results, again, strict=True):
        (request,) = run["requests"]
        cold, warm = result.outcomes.each[0].first_token_seconds, request["first_token_seconds"]
        tokens = [f"{request[name]:,}" for name in ("prompt_tokens", "stored_tokens")]
        times = [format_seconds(cold), format_seconds(warm), format_speedup(cold / warm)]
        table.add_row(result.name, *tokens, *times, "yes" if run["all_tokens_equal"] else "NO")
    return table
