"""`kvweave simulate`: what a cache would have saved on a trace."""

from __future__ import annotations

import json as json_format
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count

import typer
from rich.progress import TimeRemainingColumn

from kvweave.cli.progress import progress_bar
from kvweave.cli.read_config import written
from kvweave.cli.simulate import simulate_options as option
from kvweave.cli.simulate.csv_rows import requests_csv
from kvweave.cli.simulate.model_request import ModelRequest, Recorded, Subject
from kvweave.cli.simulate.simulation_page import simulation_html
from kvweave.cli.simulate.simulation_table import print_load, print_simulation
from kvweave.prefix import Retention
from kvweave.sim import (
    Options,
    Reading,
    SimulatedTier,
    Simulation,
    Trace,
    load_of,
    load_policy,
    load_tokenizer,
    read_trace,
    simulate,
)
from kvweave.sim.replay import STEP_TOKENS
from kvweave.sim.tiers import PREFILL_SPEED

AT_ONCE = 64
"""Requests after which the bar moves."""


def simulate_command(
    traces: option.Traces,
    *,
    model: option.Model = None,
    memory: option.Memory = None,
    policy: option.PolicyNames = None,
    every: option.Every = None,
    decode_every: option.DecodeEvery = 256,
    prompt_ends: option.PromptEnds = True,
    branches: option.Branches = True,
    block_tokens: option.BlockTokens = 16,
    dtype: option.Dtype = "auto",
    tp: option.Tp = 1,
    step_tokens: option.StepTokens = STEP_TOKENS,
    tier: option.Tiers = None,
    prefill_speed: option.PrefillSpeed = PREFILL_SPEED,
    format: option.FormatName = "auto",
    read: option.Read = "cont",
    tokenizer: option.TokenizerPath = None,
    sample: option.Sample = 1.0,
    seed: option.Seed = 0,
    load: option.LoadOnly = False,
    oracles: option.Oracles = True,
    json: option.Json = False,
    csv: option.Csv = None,
    report: option.Report = None,
) -> None:
    """Replay a trace through the cache: how many prompt tokens it hits, and how many with more memory, another policy
    or perfect foresight.

    Needs neither weights nor a GPU, only a trace and a model's config.json. Traces that have only lengths (Azure,
    BurstGPT) cannot show reuse; --load shows their lengths and rates.

    [bold]Examples[/bold]

      kvweave simulate trace.jsonl --model qwen3-next-80b
      kvweave simulate chats.jsonl --model llama-3.1-8b --report saved.html
      kvweave simulate t.jsonl --model gpt-oss-20b --memory 64GB --tier host=256GB
      kvweave simulate t.jsonl --model gemma-3-27b --policy mine.py:Policy
      kvweave run qwen3-next-80b --record t.jsonl; kvweave simulate t.jsonl
      kvweave simulate azure.csv --load
    """
    reading = Reading(way=read, tokenize=load_tokenizer(tokenizer) if tokenizer else None)
    found = [read_trace(path, format=format, reading=reading).sample(sample, seed) for path in traces]
    if load:
        _print_load(found, json)
        return
    for trace in found:
        trace.check_content()
    asked = ModelRequest(model, tuple(memory or ()), dtype, block_tokens, tp)
    policies = {name: load_policy(name) for name in policy or ["adaptive"]}
    retention = Retention(prompt_ends, branches, every, decode_every)
    tiers = [SimulatedTier.parse(text) for text in tier or []]

    def options(subject: Subject) -> Options:
        how = Recorded(retention, step_tokens)
        if subject.recorded and how == Recorded(Retention(), STEP_TOKENS):
            how = subject.recorded
        whole_outputs = subject.recorded is None
        return Options(
            subject.memories, policies, how.retention, tiers, prefill_speed, how.step_tokens, whole_outputs, oracles
        )

    subjects = [asked.subject(trace) for trace in found]
    with _warnings_in_a_line():
        answers = [_simulate(trace, subject, options(subject)) for trace, subject in zip(found, subjects, strict=True)]
    for one in answers:
        _print(one, json)
    if csv is not None:
        print(f"wrote {written(csv, requests_csv(answers))}", file=sys.stderr)
    if report is not None:
        print(f"wrote {written(report, simulation_html(answers))}", file=sys.stderr)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings, of a policy that failed, once each and without where in kvweave they were raised."""
    with warnings.catch_warnings(record=True) as told:
        yield
    for line in dict.fromkeys(" ".join(str(warning.message).split()) for warning in told):
        print(f"kvweave: warning: {line}", file=sys.stderr)


def _simulate(trace: Trace, subject: Subject, options: Options) -> Simulation:
    """Simulate it; on a terminal, a bar shows how far it is."""
    with progress_bar(TimeRemainingColumn()) as progress:
        task = progress.add_task(trace.name, total=options.num_replays * len(trace.requests))
        told = count(1)

        def advance() -> None:
            if next(told) % AT_ONCE == 0:  # the bar would take longer than the replay
                progress.advance(task, AT_ONCE)

        return simulate(trace, subject.plan_of, options, model=subject.model, on_request=advance)


def _print(simulation: Simulation, json: bool) -> None:
    if not json:
        print_simulation(simulation)
        return
    about = {
        "model": simulation.model,
        "recorded_hits": simulation.trace.recorded_hits,
        "advice": simulation.advice,
        "invented": list(simulation.trace.invented),
        "assumptions": list(simulation.assumptions),
    }
    for cell in simulation.cells:
        typer.echo(json_format.dumps({**cell.to_dict(), **about}))


def _print_load(traces: list[Trace], json: bool) -> None:
    for trace in traces:
        if json:
            typer.echo(json_format.dumps({"trace": trace.name, "format": trace.format, **asdict(load_of(trace))}))
        else:
            print_load(trace, load_of(trace))
