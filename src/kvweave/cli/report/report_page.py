"""The report of a run: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kvweave.cache.contents import CacheContents, Owner
from kvweave.cli.format import count, format_blocks, format_kept, format_reach, format_size
from kvweave.cli.report.html import Tile, data, details, document, figure, section, table, tiles
from kvweave.cli.report.run_picture import drawings
from kvweave.cli.report.tree_drawing import pages_words
from kvweave.cli.run.format_outcomes import format_seconds, format_speedup, saved_words, speed_words
from kvweave.cli.run.outcome import RequestOutcome
from kvweave.cli.run.run_request import RunResult
from kvweave.cli.svg.draw import NARROW, WIDE

_KINDS = {"faster": "good", "saved": "good", "slower": "bad", "lost": "bad"}
MOST_ROWS = 500
"""Super-pages that are listed; all are drawn."""


def report_html(result: RunResult) -> str:
    """The page, self-contained."""
    body = [_head(result), tiles(_said(result)), *_sections(result), data("run", result.to_dict())]
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


def _said(result: RunResult) -> Iterator[Tile]:
    outcomes = result.outcomes
    share = outcomes.reused_share
    yield f"{share:.1%}", f"of {outcomes.prompt_tokens:,} prompt tokens reused", "good" if share else ""
    if result.store is not None:
        yield f"{outcomes.stored_tokens:,}", "tokens of them from the store", "good" if outcomes.stored_tokens else ""
    yield (
        format_seconds(outcomes.first_token_seconds / max(1, len(outcomes.each))),
        "to the first token, on average",
        "",
    )
    if outcomes.faster is None or outcomes.saved_seconds is None:
        return
    for number, way in (speed_words(outcomes.faster), saved_words(outcomes.saved_seconds)):
        until = "first" if number.endswith("x") else "last"
        yield number, f"{way} until the {until} token, over all requests", _KINDS.get(way, "")
    if outcomes.unequal:
        yield f"{len(outcomes.unequal)} differ", "answers, with and without reuse", "bad"
    else:
        yield "all equal", f"{outcomes.new_tokens:,} generated tokens, with and without reuse", "good"


def _sections(result: RunResult) -> list[str]:
    drawn = {sheet: drawings(sheet, result) for sheet in (WIDE, NARROW)}

    def picture(name: str) -> str:
        return figure(lambda sheet: drawn[sheet][name])

    return [
        section(
            "Hits",
            "Each row is a request, in order. Only the orange part of a prompt was computed; the rest was found in"
            " pages that an earlier prompt or answer had left.",
            picture("requests") + details("All numbers", _requests(result)),
        ),
        section("Time", "Everything together, until the last token of each request.", picture("time")),
        section(
            "Tree",
            "What is kept for the next request. Tokens run from left to right; each end is a resume point of one"
            " branch, and dark runs were found often.",
            picture("tree") + details("Every run and its pages", _runs(result.snapshot)),
        ),
        section(
            "Map",
            "Every super-page of the pools when all requests were done. A super-page belongs to one group at a time,"
            " which cuts it into its own pages; what is free may go to any group.",
            picture("map") + details("Every super-page in use", _superpages(result.snapshot)),
        ),
        section("Plan", "What the layers keep, and how memory is cut for it.", _plan(result) + picture("plan")),
    ]


def _runs(snapshot: CacheContents) -> str:
    runs = sorted(snapshot.tree, key=lambda branch: (branch.start, branch.id))
    rows = [(f"{b.start:,} to {b.end:,}", f"{b.found:,}", f"{b.branches:,}", pages_words(b)) for b in runs]
    return table(("tokens", "times found", "ends below it", "pages"), rows)


def _superpages(snapshot: CacheContents) -> str:
    used = [(pool.name, s) for pool in snapshot.pools for s in pool.superpages if s.tag is not None]
    rows = [
        (f"{name} {s.number}", s.tag or "", *(f"{s.count(owner):,}" for owner in Owner)) for name, s in used[:MOST_ROWS]
    ]
    more = f"<p>{len(used) - MOST_ROWS:,} more are not listed.</p>" if len(used) > MOST_ROWS else ""
    return table(("super-page", "group", *(f"{owner} pages" for owner in Owner)), rows) + more


def _plan(result: RunResult) -> str:
    plan = result.answer.plan
    rows = [
        (
            group.tag,
            f"{len(group.layers)}",
            format_reach(group.cache.reach, result.answer.spec.max_tokens),
            format_kept(group),
            format_blocks(group),
            format_size(group.payload_bytes),
            f"{plan.num_pages(group.tag):,}",
        )
        for group in plan.groups
        if group.layers
    ]
    heads = ("group", "layers", "reach", "what a layer keeps", "block tokens", "page", "pages, up to")
    return table(heads, rows)


def _requests(result: RunResult) -> str:
    stored = result.store is not None
    heads = ["request", "prompt tokens", "reused", *(["of these stored"] if stored else []), "computed", "new tokens"]
    heads += ["first token, s", "total, s"]
    heads += ["without: first token, s", "without: total, s", "speedup", "equal"] if result.outcomes.compared else []
    return table(heads, (_numbers(outcome, stored) for outcome in result.outcomes.each))


def _numbers(outcome: RequestOutcome, stored: bool) -> list[str]:
    found = (outcome.reused_tokens, *([outcome.stored_tokens] if stored else []))
    tokens = (outcome.prompt_tokens, *found, outcome.computed_tokens, outcome.new_tokens)
    times = [outcome.first_token_seconds, outcome.seconds]
    times += [outcome.plain.first_token_seconds, outcome.plain.seconds] if outcome.plain else []
    cells = [outcome.who, *map(str, tokens), *(f"{seconds:.4f}" for seconds in times)]
    return [*cells, format_speedup(outcome.faster), "yes" if outcome.is_equal else "NO"] if outcome.plain else cells
