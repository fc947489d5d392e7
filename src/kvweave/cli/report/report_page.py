"""The report of a run: one HTML page that needs nothing else."""

from __future__ import annotations

import re
from html import escape

from kvweave.cli.format import count, format_blocks, format_kept, format_reach, format_size
from kvweave.cli.report.html import Tile, data, document, figure, section, table, tiles
from kvweave.cli.report.run_picture import drawings, svg
from kvweave.cli.run.format_outcomes import format_seconds, format_speedup
from kvweave.cli.run.outcome import RequestOutcome
from kvweave.cli.run.run_request import RunResult
from kvweave.cli.svg import plan_svg


def report_html(result: RunResult) -> str:
    """The page, self-contained."""
    body = [_head(result), _tiles(result), *_sections(result), data("run", result.to_dict())]
    return document(f"kvweave run, {result.title}", body)


def _head(result: RunResult) -> str:
    plan = result.answer.plan
    facts = (
        f"{result.num_parameters / 1e6:,.1f}M parameters, {count(plan.num_layers, 'layer')}, {result.answer.dtype} on"
        f" {result.request.device}; {format_size(plan.num_bytes)} of pages,"
        f" {result.request.block_tokens} tokens a block"
    )
    about = "".join(f"<p>{escape(line)}</p>" for line in result.about)
    return f"<h1>{escape(result.title)}</h1>\n<p>{escape(facts)}</p>\n{about}"


def _tiles(result: RunResult) -> str:
    outcomes = result.outcomes
    shown: list[Tile] = [
        (f"{outcomes.reused_share:.1%}", f"of {outcomes.prompt_tokens:,} prompt tokens reused", "good"),
        (
            format_seconds(outcomes.first_token_seconds / max(1, len(outcomes.each))),
            "to the first token, on average",
            "",
        ),
    ]
    if result.store is not None:
        shown.insert(1, (f"{outcomes.stored_tokens:,}", "tokens of them from the store", "good"))
    if outcomes.compared and outcomes.saved_seconds is not None:
        equal = ("all equal", f"{outcomes.new_tokens:,} generated tokens, with and without reuse", "good")
        unequal = (f"{len(outcomes.unequal)} differ", "answers, with and without reuse", "bad")
        shown += [
            (format_speedup(outcomes.faster), "faster to the first token, over all requests", "good"),
            (format_seconds(outcomes.saved_seconds), "saved", ""),
            unequal if outcomes.unequal else equal,
        ]
    return tiles(shown)


def _sections(result: RunResult) -> list[str]:
    drawn = drawings(result)
    return [
        section(
            "Hits",
            "Each row is a request, in order. Only the orange part of a prompt was computed; the rest was found in"
            " pages that an earlier prompt or answer had left.",
            figure(svg(drawn["requests"])),
        ),
        section("Time", "Everything together, until the last token of each request.", figure(svg(drawn["time"]))),
        section(
            "Tree",
            "What is kept for the next request. Tokens run from left to right; each end is a resume point of one"
            " branch, and dark runs were found often. Point at a run to see its pages.",
            figure(svg(drawn["tree"])),
        ),
        section(
            "Map",
            "Every super-page of the pools when all requests were done. A super-page belongs to one group at a time,"
            " which cuts it into its own pages; what is free may go to any group. Point at one to see whose it is.",
            figure(svg(drawn["map"])),
        ),
        section("Plan", "What the layers keep, and how memory is cut for it.", _plan(result)),
        section("Numbers", "", f"<details><summary>All requests</summary>{_requests(result)}</details>"),
    ]


def _plan(result: RunResult) -> str:
    plan = result.answer.plan
    rows = [
        (
            group.tag,
            f"{len(group.layers)}",
            format_reach(group.cache.reach),
            format_kept(group),
            format_blocks(group),
            format_size(group.payload_bytes),
            f"{plan.num_pages(group.tag):,}",
        )
        for group in plan.groups
        if group.layers
    ]
    heads = ("group", "layers", "reach", "what a layer keeps", "block tokens", "page", "pages, up to")
    inline = re.sub(
        r'<svg xmlns="[^"]*" (viewBox="[^"]*") width="\d+" height="\d+"', r"<svg \1", plan_svg(result.answer)
    )
    return table(heads, rows) + figure(inline)


def _requests(result: RunResult) -> str:
    stored = result.store is not None
    heads = ["request", "prompt tokens", "reused", *(["of these stored"] if stored else []), "computed", "new tokens"]
    heads += ["first token, s", "total, s"]
    heads += ["without: first token, s", "total, s", "faster", "equal"] if result.outcomes.compared else []
    return table(heads, (_numbers(outcome, stored) for outcome in result.outcomes.each))


def _numbers(outcome: RequestOutcome, stored: bool) -> list[str]:
    found = (outcome.reused_tokens, *([outcome.stored_tokens] if stored else []))
    tokens = (outcome.prompt_tokens, *found, outcome.computed_tokens, outcome.new_tokens)
    times = [outcome.first_token_seconds, outcome.seconds]
    times += [outcome.plain.first_token_seconds, outcome.plain.seconds] if outcome.plain else []
    cells = [outcome.who, *map(str, tokens), *(f"{seconds:.4f}" for seconds in times)]
    return [*cells, format_speedup(outcome.faster), "yes" if outcome.is_equal else "NO"] if outcome.plain else cells
