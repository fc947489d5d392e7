"""Requests as bars: what of each prompt was reused, and when its first token came, with and without reuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave.cli.run.format_outcomes import format_seconds, format_speedup, saved_words
from kvweave.cli.run.outcome import RequestOutcome, RunOutcomes
from kvweave.cli.svg.draw import FAINT, HUES, PADDING, WHITE, Drawing, Sheet, heading, legend, rect, stack, text

REUSED, STORED, COMPUTED, OURS, PLAIN = HUES[2], HUES[0], HUES[1], HUES[2], PADDING
NAME_WIDTH = 170
MANY = 40
"""Requests from which on rows are low, and only their bars are drawn."""

Width = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class BarLayout:
    """Where the two bars of a row are: tokens and seconds, side by side, or one below the other."""

    tokens: tuple[float, float, float]
    """x, and y within the row, and the width of the longest."""
    seconds: tuple[float, float, float]
    row_height: float
    bar_height: float
    is_low: bool

    @classmethod
    def of(cls, sheet: Sheet, is_low: bool) -> BarLayout:
        if sheet.is_narrow:
            below, bar = (0.0, 5.0) if is_low else (18.0, 12.0)
            width = float(sheet.inner)
            row = 2 * bar + below + (4 if is_low else 14)
            return cls((sheet.margin, below, width), (sheet.margin, below + bar + 2, width), row, bar, is_low)
        x = sheet.margin + NAME_WIDTH
        times = x + 400 + 110
        row = 8.0 if is_low else 24.0
        bar = row - (2 if is_low else 6)
        return cls((x, 1.0, 400.0), (times, 1.0, sheet.right - times - 90.0), row, bar, is_low)


def requests_drawing(sheet: Sheet, outcomes: RunOutcomes) -> Drawing:
    """A row a request: bars of tokens, and of seconds."""
    layout = BarLayout.of(sheet, len(outcomes.each) > MANY)
    most_tokens = max((outcome.prompt_tokens for outcome in outcomes.each), default=1)
    longest = max((max(_times(outcome)) for outcome in outcomes.each), default=1.0)
    top = 0.0 if sheet.is_narrow else 26.0
    shapes: list[str] = []
    for number, outcome in enumerate(outcomes.each):
        y = top + number * layout.row_height
        shapes += [] if layout.is_low else _labels(sheet, layout, y, outcome, most_tokens, longest)
        shapes += _tokens(layout, y, outcome, most_tokens)
        shapes += _seconds(layout, y, outcome, longest)
    if not sheet.is_narrow:
        shapes.append(text(layout.tokens[0], 14, "tokens of the prompt", size=12, fill=FAINT))
        shapes.append(text(layout.seconds[0], 14, "time to first token", size=12, fill=FAINT))
    rows = Drawing(tuple(shapes), top + layout.row_height * len(outcomes.each))
    said = f"{outcomes.reused_tokens:,} of {outcomes.prompt_tokens:,} prompt tokens reused"
    return stack([heading(sheet, "Requests", said), legend(sheet, _keys(outcomes)), rows], 8)


def _keys(outcomes: RunOutcomes) -> list[tuple[str, str]]:
    keys = [(REUSED, "tokens reused"), *([(STORED, "from the store")] if outcomes.stored_tokens else [])]
    keys += [(COMPUTED, "tokens computed"), (OURS, "first token, with reuse")]
    return keys + ([(PLAIN, "first token, without")] if outcomes.compared else [])


def _times(outcome: RequestOutcome) -> list[float]:
    return [outcome.first_token_seconds, *([outcome.plain.first_token_seconds] if outcome.plain else [])]


def _labels(
    sheet: Sheet, layout: BarLayout, y: float, outcome: RequestOutcome, most_tokens: float, longest: float
) -> list[str]:
    """The request's name, its tokens and its speed: around its bars, or above them."""
    tokens = f"{outcome.reused_tokens:,} / {outcome.prompt_tokens:,}"
    speed = format_seconds(outcome.first_token_seconds) if outcome.plain is None else format_speedup(outcome.faster)
    if sheet.is_narrow:
        beside = f"{tokens} reused, {speed}"
        return [
            text(sheet.margin, y + 12, outcome.who, size=12, bold=True),
            text(sheet.right, y + 12, beside, size=12, fill=FAINT, anchor="end"),
        ]
    (x, _, width), (times_x, _, times_width) = layout.tokens, layout.seconds
    middle = y + layout.row_height / 2 + 4
    end, times_end = (width * outcome.prompt_tokens / most_tokens, times_width * max(_times(outcome)) / longest)
    return [
        text(x - 12, middle, outcome.who, size=12, anchor="end"),
        text(x + end + 8, middle, tokens, size=11, fill=FAINT),
        text(times_x + times_end + 8, middle, speed, size=12),
    ]


def _tokens(layout: BarLayout, y: float, outcome: RequestOutcome, most_tokens: float) -> list[str]:
    x, below, width = layout.tokens
    reused, computed, stored = (
        width * tokens / most_tokens
        for tokens in (outcome.reused_tokens, outcome.computed_tokens, outcome.stored_tokens)
    )
    tip = f"{outcome.who}: {outcome.reused_tokens:,} reused, {outcome.computed_tokens:,} computed"
    top, height = y + below, layout.bar_height
    shapes = [
        rect(x, top, reused, height, REUSED, kind="reused", tip=tip),
        rect(x + reused, top, computed, height, COMPUTED, kind="computed", tip=tip),
    ]
    if outcome.stored_tokens:
        tip = f"{outcome.stored_tokens:,} of them from the store"
        shapes.append(rect(x + reused - stored, top, stored, height, STORED, kind="stored", tip=tip))
    return shapes


def _seconds(layout: BarLayout, y: float, outcome: RequestOutcome, longest: float) -> list[str]:
    x, below, width = layout.seconds
    times = _times(outcome)
    thick = layout.bar_height / len(times)
    return [
        rect(
            x, y + below + number * thick, max(1, width * seconds / longest), thick, fill,
            kind=kind, tip=format_seconds(seconds),
        )
        for number, (seconds, fill, kind) in enumerate(zip(times, (OURS, PLAIN), ("ours", "plain"), strict=False))
    ]  # fmt: skip


def time_drawing(sheet: Sheet, outcomes: RunOutcomes) -> Drawing:
    """Two bars to one scale: all time until the last token, with and without reuse."""
    ours = sum(outcome.seconds for outcome in outcomes.each)
    plain = sum(outcome.plain.seconds for outcome in outcomes.each if outcome.plain)
    rows = [(ours, outcomes.first_token_seconds, OURS, "with reuse")]
    rows += [(plain, outcomes.plain_first_token_seconds, PLAIN, "without")] if outcomes.compared else []
    room = sheet.inner if sheet.is_narrow else sheet.inner - NAME_WIDTH - 100
    scale = room / max(ours, plain, 1e-9)
    drawn = [_total(sheet, *row, scale) for row in rows]
    said = " ".join(saved_words(outcomes.saved_seconds)) if outcomes.saved_seconds is not None else ""
    return stack([heading(sheet, "Time of all requests", said), *drawn], 8)


def _total(sheet: Sheet, seconds: float, first: float, fill: str, name: str, scale: float) -> Drawing:
    x, y = (sheet.margin, 18.0) if sheet.is_narrow else (sheet.margin + NAME_WIDTH, 0.0)
    parts = [(0.0, first, "until first tokens"), (first, max(0.0, seconds - first), "generating")]
    shapes = []
    for start, length, says in parts:
        tip = f"{says}: {format_seconds(length)}"
        shapes.append(rect(x + start * scale, y, length * scale, 26, fill, kind=says, tip=tip))
        if length * scale > 7 * len(tip):
            shapes.append(text(x + start * scale + 8, y + 18, tip, size=11, fill=WHITE))
    shapes.append(rect(x + first * scale - 1, y, 2, 26, WHITE))
    if sheet.is_narrow:
        words = f"{name}: {format_seconds(seconds)}, of it {format_seconds(first)} until first tokens"
        shapes.append(text(x, 12, words, size=13))
        return Drawing(tuple(shapes), y + 30)
    shapes.append(text(x - 12, y + 18, name, size=13, anchor="end"))
    shapes.append(text(x + seconds * scale + 8, y + 18, format_seconds(seconds), size=13))
    return Drawing(tuple(shapes), 26)
