"""Requests as bars: what of each prompt was reused, and when its first token came, with and without reuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave.cli.run.format_outcomes import format_seconds, format_speedup
from kvweave.cli.run.outcome import RequestOutcome, RunOutcomes
from kvweave.cli.svg.draw import FAINT, HUES, MARGIN, PADDING, WHITE, WIDTH, Drawing, heading, legend, rect, stack, text

REUSED, STORED, COMPUTED, OURS, PLAIN = HUES[2], HUES[0], HUES[1], HUES[2], PADDING
NAME_WIDTH = 170
TOKENS_X, TOKENS_WIDTH = MARGIN + NAME_WIDTH, 400
TIMES_X = TOKENS_X + TOKENS_WIDTH + 110
TIMES_WIDTH = WIDTH - MARGIN - TIMES_X - 90
MANY = 40
"""Requests from which on rows are low, and only their bars are drawn."""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """The place of one request."""

    y: float
    height: float
    is_low: bool

    @property
    def middle(self) -> float:
        return self.y + self.height / 2 + 4


def requests_drawing(outcomes: RunOutcomes) -> Drawing:
    """A row a request: bars of tokens on the left, of seconds on the right."""
    low = len(outcomes.each) > MANY
    height = 8.0 if low else 24.0
    most_tokens = max((outcome.prompt_tokens for outcome in outcomes.each), default=1)
    longest = max((max(_times(outcome)) for outcome in outcomes.each), default=1.0)
    shapes: list[str] = []
    for number, outcome in enumerate(outcomes.each):
        row = ChartRow(26 + number * height, height, low)
        shapes += _name(row, outcome)
        shapes += _tokens(row, outcome, lambda tokens: TOKENS_WIDTH * tokens / most_tokens)
        shapes += _seconds(row, outcome, lambda seconds: TIMES_WIDTH * seconds / longest)
    shapes += [
        text(TOKENS_X, 14, "tokens of the prompt", size=12, fill=FAINT),
        text(TIMES_X, 14, "time to first token", size=12, fill=FAINT),
    ]
    keys = [(REUSED, "tokens reused"), *([(STORED, "from the store")] if outcomes.stored_tokens else [])]
    keys += [(COMPUTED, "tokens computed"), (OURS, "first token, with reuse")]
    keys += [(PLAIN, "first token, without")] if outcomes.compared else []
    rows = Drawing(tuple(shapes), 26 + height * len(outcomes.each))
    said = f"{outcomes.reused_tokens:,} of {outcomes.prompt_tokens:,} prompt tokens reused"
    return stack([heading("Requests", said), legend(keys), rows], 6)


def _times(outcome: RequestOutcome) -> list[float]:
    return [outcome.first_token_seconds, *([outcome.plain.first_token_seconds] if outcome.plain else [])]


def _name(row: ChartRow, outcome: RequestOutcome) -> list[str]:
    return [] if row.is_low else [text(TOKENS_X - 12, row.middle, outcome.who, size=12, anchor="end")]


def _tokens(row: ChartRow, outcome: RequestOutcome, width: Callable[[float], float]) -> list[str]:
    y, height = row.y + 1, row.height - (2 if row.is_low else 6)
    reused, computed = width(outcome.reused_tokens), width(outcome.computed_tokens)
    tip = f"{outcome.who}: {outcome.reused_tokens:,} reused, {outcome.computed_tokens:,} computed"
    shapes = [
        rect(TOKENS_X, y, reused, height, REUSED, kind="reused", tip=tip),
        rect(TOKENS_X + reused, y, computed, height, COMPUTED, kind="computed", tip=tip),
    ]
    if outcome.stored_tokens:
        stored, tip = width(outcome.stored_tokens), f"{outcome.stored_tokens:,} of them from the store"
        shapes.append(rect(TOKENS_X + reused - stored, y, stored, height, STORED, kind="stored", tip=tip))
    if row.is_low:
        return shapes
    beside = f"{outcome.reused_tokens:,} / {outcome.prompt_tokens:,}"
    return [*shapes, text(TOKENS_X + reused + computed + 8, row.middle, beside, size=11, fill=FAINT)]


def _seconds(row: ChartRow, outcome: RequestOutcome, width: Callable[[float], float]) -> list[str]:
    ours, thick = outcome.first_token_seconds, (row.height - 4) / 2
    if outcome.plain is None:
        bars = [
            rect(TIMES_X, row.y + 1, max(1, width(ours)), 2 * thick - 2, OURS, kind="ours", tip=format_seconds(ours))
        ]
        beside, end = format_seconds(ours), width(ours)
    else:
        plain = outcome.plain.first_token_seconds
        bars = [
            rect(TIMES_X, row.y + 1, max(1, width(ours)), thick, OURS, kind="ours", tip=format_seconds(ours)),
            rect(
                TIMES_X, row.y + 1 + thick, max(1, width(plain)), thick, PLAIN, kind="plain", tip=format_seconds(plain)
            ),
        ]
        beside, end = format_speedup(outcome.faster), max(width(ours), width(plain))
    return bars if row.is_low else [*bars, text(TIMES_X + end + 8, row.middle, beside, size=12)]


def time_drawing(outcomes: RunOutcomes) -> Drawing:
    """Two bars to one scale: all time until the last token, with and without reuse."""
    ours = sum(outcome.seconds for outcome in outcomes.each)
    plain = sum(outcome.plain.seconds for outcome in outcomes.each if outcome.plain)
    longest = max(ours, plain)
    shapes: list[str] = []
    rows = [(ours, outcomes.first_token_seconds, OURS, "with reuse")]
    rows += [(plain, outcomes.plain_first_token_seconds, PLAIN, "without")] if outcomes.compared else []
    for number, (seconds, first, fill, name) in enumerate(rows):
        shapes += _total(34.0 * number, seconds, first, fill, name, (WIDTH - 2 * MARGIN - NAME_WIDTH - 100) / longest)
    said = f"{format_seconds(outcomes.saved_seconds)} saved" if outcomes.saved_seconds is not None else ""
    return stack([heading("Time of all requests", said), Drawing(tuple(shapes), 34.0 * len(rows))], 6)


def _total(y: float, seconds: float, first: float, fill: str, name: str, scale: float) -> list[str]:
    x = float(TOKENS_X)
    shapes = [
        text(x - 12, y + 18, name, size=13, anchor="end"),
        rect(
            x, y, first * scale, 26, fill, kind="until first tokens", tip=f"until first tokens {format_seconds(first)}"
        ),
        rect(x + first * scale, y, max(0.0, seconds - first) * scale, 26, fill, kind="after", tip="after them"),
        rect(x + first * scale - 1, y, 2, 26, WHITE),
        text(x + seconds * scale + 8, y + 18, format_seconds(seconds), size=13),
    ]
    if first * scale > 110:
        shapes.append(text(x + 8, y + 18, "until first tokens", size=11, fill=WHITE))
    if (seconds - first) * scale > 90:
        shapes.append(text(x + first * scale + 8, y + 18, "generating", size=11, fill=WHITE))
    return shapes
