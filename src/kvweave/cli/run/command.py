"""`kvweave run`: a model generates on pages, and what that saved is shown."""

from __future__ import annotations

import json as json_format
import os
import sys

import typer
from rich.progress import TimeElapsedColumn

from kvweave.cli.progress import progress_bar
from kvweave.cli.read_config import written
from kvweave.cli.report import report_html
from kvweave.cli.run import run_options as option
from kvweave.cli.run.format_outcomes import format_mismatches, format_store, format_total, requests_table
from kvweave.cli.run.run_request import DEFAULT_SIZE, RunRequest, RunResult
from kvweave.cli.run.workload import WorkloadSize
from kvweave.cli.table import console, print_table
from kvweave.errors import ConfigError, MissingExtra

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Set before torch is loaded, unless the user set them: no network, and waiting OpenMP threads sleep (spinning ones
make a busy machine ten times slower)."""


def run_command(
    model: option.Model,
    *,
    prompt: option.Prompts = None,
    chat: option.Chat = False,
    workload: option.Workload = None,
    max_new_tokens: option.MaxNewTokens = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    top_k: option.TopK = None,
    min_p: option.MinP = None,
    repetition_penalty: option.Penalty = None,
    compare: option.Compare = False,
    parties: option.Parties = DEFAULT_SIZE.parties,
    turns: option.Turns = DEFAULT_SIZE.turns,
    shared_tokens: option.SharedTokens = DEFAULT_SIZE.shared_tokens,
    turn_tokens: option.TurnTokens = DEFAULT_SIZE.turn_tokens,
    seed: option.Seed = 0,
    size: option.Size = "24M",
    memory: option.Memory = "1GiB",
    block_tokens: option.BlockTokens = 16,
    store: option.Store = None,
    weights: option.Weights = None,
    dtype: option.Dtype = "auto",
    device: option.Device = "cpu",
    report: option.Report = None,
    record: option.Record = None,
    json: option.Json = False,
) -> None:
    """Run a model with prefix reuse: what a prompt shares with earlier prompts and answers is not computed again.

    Shows for each request how many prompt tokens were reused, and when its first token came. Uses no network; needs the
    extra "transformers".

    [bold]Examples[/bold]

      kvweave run qwen3-next-80b --compare
      kvweave run gemma-3-27b --workload rag --parties 4 --report rag.html
      kvweave run ./my-model --prompt "Once upon a time" --prompt "Once upon a hill"
      kvweave run ./my-model --chat --memory 4GiB --device cuda
      kvweave run gemma-3-27b --store /var/tmp/kv     (twice: the second run loads KV of the first)
    """
    if chat and json:
        raise ConfigError("--chat and --json both write to stdout: give one of them")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    sampling["repetition_penalty"] = repetition_penalty
    result = run_with_progress(
        RunRequest(
            source=model,
            prompts=tuple(prompt or ()),
            chat=chat,
            workload=workload,
            size=WorkloadSize(parties, turns, shared_tokens, turn_tokens),
            memory=memory,
            compare=compare,
            max_new_tokens=max_new_tokens,
            sampling={name: value for name, value in sampling.items() if value is not None},
            block_tokens=block_tokens,
            store=store,
            weights=weights,
            seed=seed,
            device=device,
            dtype=dtype,
            parameters=size,
            record=record,
        )
    )
    if json:
        typer.echo(json_format.dumps(result.to_dict(), indent=2))
    else:
        print_result(result)
    if report is not None:
        print(f"wrote {written(report, report_html(result))}", file=sys.stderr)
    if record is not None:
        print(f"wrote {record}", file=sys.stderr)
    if result.outcomes.unequal:
        print("kvweave:", format_mismatches(result.outcomes, result.answer.dtype), file=sys.stderr)
        raise typer.Exit(1)


def run_with_progress(request: RunRequest) -> RunResult:
    """Run it; on a terminal, a bar shows how far it is, of a chat until it is loaded."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with MissingExtra.on_import("kvweave run", "transformers"):
        from kvweave.cli.run.runner import run  # noqa: PLC0415  (torch and transformers: an extra, and seconds to load)
    with progress_bar(TimeElapsedColumn()) as progress:
        task = progress.add_task(f"{request.source}: loading", total=request.num_requests)

        def on_request(who: str) -> None:
            if request.chat:
                progress.stop()
            progress.update(task, advance=bool(who), description=f"{request.source}: {who or 'running'}")

        return run(request, on_request, lambda words: print(f"[{words}]"))


def print_result(result: RunResult) -> None:
    out = console()
    if not result.request.chat:  # which began with them
        out.print(format_heading(result), style="bold")
        for line in result.about:
            out.print(line)
    for number, said in enumerate(result.said, 1):
        out.print()
        out.print(f"answer {number}: {said!r}", soft_wrap=True)
    out.print()
    if result.outcomes.each:
        print_table(out, requests_table(result.outcomes, with_store=result.store is not None))
        out.print()
    for line in [*format_total(result.outcomes), *format_store(result)]:
        out.print(line)


def format_heading(result: RunResult) -> str:
    plan = result.answer.plan
    groups = ", ".join(f"{group.tag} ({len(group.layers)})" for group in plan.groups)
    return f"{result.name}: {result.num_parameters / 1e6:,.1f}M parameters, {result.answer.dtype}, layers {groups}"
