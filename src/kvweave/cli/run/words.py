"""Outcomes in words and tables."""

from __future__ import annotations

from rich.table import Table

from kvweave.cli.run.outcome import Outcome, Outcomes
from kvweave.cli.table import plain_table


def seconds_words(seconds: float) -> str:
    """`2.31 s`, `87 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.0f} ms"


def faster_words(faster: float | None) -> str:
    return "-" if faster is None else f"{faster:.1f}x"


def reuse_words(outcome: Outcome) -> str:
    """One request in a line."""
    words = (
        f"{outcome.reused_tokens:,} of {outcome.prompt_tokens:,} prompt tokens reused, first token after"
        f" {seconds_words(outcome.first_token_seconds)}, all {outcome.new_tokens} after"
        f" {seconds_words(outcome.seconds)}"
    )
    if outcome.plain is None:
        return words
    equal = "all tokens equal" if outcome.is_equal else "TOKENS DIFFER"
    return f"{words}; without reuse {seconds_words(outcome.plain.first_token_seconds)}, {equal}"


def requests_table(outcomes: Outcomes) -> Table:
    """A line a request, and their sum."""
    table = plain_table()
    table.add_column("\nrequest", style="bold cyan", no_wrap=True)
    heads = ["prompt\ntokens", "\nreused", "\ncomputed", "first\ntoken", "\ntotal"]
    heads += ["without reuse\nfirst token", "\ntotal", "\nfaster", "all tokens\nequal"] if outcomes.compared else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for outcome in outcomes.each:
        table.add_row(outcome.who, *_cells(outcome))
    return table


def _cells(outcome: Outcome) -> list[str]:
    cells = [f"{number:,}" for number in (outcome.prompt_tokens, outcome.reused_tokens, outcome.computed_tokens)]
    cells += [seconds_words(outcome.first_token_seconds), seconds_words(outcome.seconds)]
    if outcome.plain is None:
        return cells
    plain = outcome.plain
    equal = "yes" if outcome.is_equal else f"NO, from {plain.differs_at}"
    return [
        *cells,
        seconds_words(plain.first_token_seconds),
        seconds_words(plain.seconds),
        faster_words(outcome.faster),
        equal,
    ]


def sum_words(outcomes: Outcomes) -> list[str]:
    """What it came to, a sentence a line."""
    count = max(1, len(outcomes.each))
    lines = [
        f"{outcomes.reused_tokens:,} of {outcomes.prompt_tokens:,} prompt tokens were reused"
        f" ({outcomes.reused_share:.1%}); {outcomes.prompt_tokens - outcomes.reused_tokens:,} were computed."
    ]
    mean = seconds_words(outcomes.first_token_seconds / count)
    if outcomes.faster is None or outcomes.saved_seconds is None:
        return [*lines, f"The first token came after {mean} on average."]
    plain = seconds_words(outcomes.plain_first_token_seconds / count)
    lines.append(
        f"The first token came after {mean} on average, {plain} without reuse: {faster_words(outcomes.faster)} as fast."
        f" {seconds_words(outcomes.saved_seconds)} saved in all."
    )
    if not outcomes.unequal:
        lines.append(
            f"All {outcomes.new_tokens:,} generated tokens are equal (logits within {outcomes.logit_difference:.1g})."
        )
    return lines


def unequal_words(outcomes: Outcomes, dtype: str) -> str:
    """The line of a failed comparison."""
    first = outcomes.unequal[0]
    at = first.plain.differs_at if first.plain else None
    hint = "" if dtype == "float32" else f"; in {dtype} near ties may fall either way: try --dtype float32"
    return (
        f"{len(outcomes.unequal)} of {len(outcomes.each)} answers differ from those without reuse, the first in"
        f" '{first.who}' at new token {at}{hint}"
    )
