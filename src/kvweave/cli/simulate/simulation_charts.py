"""Pictures of a simulation: the curve over memory, where tokens went, and both and occupancy over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.cli.format import format_size as short_size
from kvweave.cli.svg.draw import (
    EMPTY,
    FAINT,
    HUES,
    LINE,
    NULL,
    PADDING,
    Drawing,
    Sheet,
    bar_row,
    heading,
    hues,
    legend,
    rect,
    stack,
    text,
)
from kvweave.sim import Cell, Simulation, TokenSplit
from kvweave.sim.result import BUCKETS
from kvweave.units import format_size

HEIGHT = 260.0
PARTS = (
    ("hit", HUES[2], "hit"),
    ("no_point", HUES[4], "no point there"),
    ("evicted", HUES[1], "not kept"),
    ("never_seen", EMPTY, "never seen"),
)
"""What became of prompt tokens: the field, its colour, its words."""
ORACLES = (
    ("placement", HUES[0], "placement, LRU"),
    ("belady", HUES[3], "Belady"),
    ("both", HUES[5], "both"),
    ("bound", PADDING, "bound"),
)
OF_POLICIES = [hue for hue in (*HUES[2:], *HUES[:2]) if hue not in {colour for _, colour, _ in ORACLES}]
Curve = list[tuple[int, float]]


def curve_drawing(sheet: Sheet, simulation: Simulation) -> Drawing:
    """Shares of prompt tokens hit over memory: policies, oracles, and the infinite cache."""
    cells, prompt = simulation.cells, max(1, simulation.cells[0].split.prompt)
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    found = [
        (name, OF_POLICIES[at % len(OF_POLICIES)], "", _policy_curve(cells, name)) for at, name in enumerate(policies)
    ]
    for name, colour, words in ORACLES if cells[0].oracles else ():
        found.append((words, colour, "6 4", _oracle_curve(cells, name, prompt)))
    infinite = cells[0].split.overlap / prompt
    found.append(("infinite", NULL, "2 4", [(cell.memory, infinite) for cell in cells if cell.policy == policies[0]]))
    axes = Axes.of(sheet, sorted({cell.memory for cell in cells}), max(v for *_, curve in found for _, v in curve))
    shapes = [*axes.shapes(), *(shape for one in found for shape in axes.curve(*one))]
    keys = [(colour, name) for name, colour, _, _ in found]
    said = "share of prompt tokens hit, by memory"
    return stack([heading(sheet, "Memory", said), legend(sheet, keys), Drawing(tuple(shapes), HEIGHT + 34)], 8)


def _sides(sheet: Sheet) -> tuple[float, float]:
    """Where axes begin and end, with room for their numbers."""
    return sheet.margin + 36.0, sheet.right - 20.0


def _policy_curve(cells: Sequence[Cell], policy: str) -> Curve:
    return [(cell.memory, cell.split.hit_rate) for cell in cells if cell.policy == policy]


def _oracle_curve(cells: Sequence[Cell], name: str, prompt: int) -> Curve:
    return [
        (cell.memory, getattr(cell.oracles, name) / prompt)
        for cell in cells
        if cell.oracles is not None and cell.policy == cells[0].policy
    ]


@dataclass(frozen=True, slots=True)
class Axes:
    """Memory to the right, by its logarithm; shares upwards."""

    left: float
    right: float
    memories: tuple[int, ...]
    most: float

    @classmethod
    def of(cls, sheet: Sheet, memories: Sequence[int], most: float) -> Axes:
        return cls(*_sides(sheet), tuple(memories), max(0.1, math.ceil(most * 10) / 10))

    def x(self, memory: int) -> float:
        low, high = math.log(self.memories[0]), math.log(self.memories[-1])
        share = 0.5 if low == high else (math.log(memory) - low) / (high - low)
        return self.left + (self.right - self.left) * share

    def y(self, share: float) -> float:
        return HEIGHT * (1 - share / self.most)

    def shapes(self) -> list[str]:
        shapes = []
        for tenth in range(round(self.most * 10) + 1):
            y = self.y(tenth / 10)
            shapes.append(rect(self.left, y, self.right - self.left, 0.5, LINE))
            shapes.append(text(self.left - 6, y + 4, f"{tenth * 10}%", size=11, fill=FAINT, anchor="end"))
        for memory in self.memories:
            shapes.append(text(self.x(memory), HEIGHT + 20, format_size(memory), size=11, fill=FAINT, anchor="middle"))
        return shapes

    def curve(self, name: str, colour: str, dashes: str, points: Curve) -> list[str]:
        """A line with its points, which say their numbers; its name at the end."""
        at = [(self.x(memory), self.y(share)) for memory, share in points]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        line = f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
        dots = [
            rect(x - 3, y - 3, 6, 6, colour, kind="share", tip=f"{name}, {format_size(memory)}: {share:.1%}")
            for (x, y), (memory, share) in zip(at, points, strict=True)
        ]
        return [line, *dots]


def split_drawing(sheet: Sheet, simulation: Simulation) -> Drawing:
    """A bar a policy and memory: where all prompt tokens went."""
    rows = [
        bar_row(
            sheet,
            (format_size(cell.memory), cell.policy),
            (f"{cell.split.hit_rate:.1%} hit", ""),
            20,
            lambda x, y, split=cell.split: _bar(split, x, y, sheet.bar_width, 20),  # type: ignore[misc]
        )
        for cell in simulation.cells
    ]
    keys = [(colour, words) for _, colour, words in PARTS]
    return stack([heading(sheet, "Where prompt tokens went"), legend(sheet, keys), stack(rows, 6)], 8)


def _bar(split: TokenSplit, x: float, y: float, width: float, height: float) -> list[str]:
    shapes = []
    for name, colour, words in PARTS:
        tokens = getattr(split, name)
        part = width * tokens / max(1, split.prompt)
        tip = f"{words}: {tokens:,} tokens, {tokens / max(1, split.prompt):.1%}"
        shapes.append(rect(x, y, part, height, colour, kind=name, tip=tip))
        x += part
    return shapes


def timeline_drawing(sheet: Sheet, cell: Cell) -> Drawing:
    """Prompt tokens by the time of their arrival, and what became of them."""
    most = max((bucket.split.prompt for bucket in cell.timeline), default=1)
    left, right = _sides(sheet)
    width, start = (right - left) / BUCKETS, cell.timeline[0].start
    seconds = max(cell.timeline[-1].start - start, 1e-9) / (BUCKETS - 1)
    shapes: list[str] = []
    for bucket in cell.timeline:
        x, y = left + (bucket.start - start) / seconds * width, HEIGHT / 2
        for name, colour, words in PARTS:
            tokens = getattr(bucket.split, name)
            height = HEIGHT / 2 * tokens / max(1, most)
            y -= height
            tip = f"from {bucket.start:,.0f} s: {words} {tokens:,} of {bucket.split.prompt:,} tokens"
            shapes.append(rect(x, y, width * 0.9, height, colour, kind=name, tip=tip))
    for x, at, anchor in ((left, start, "start"), (right, start + seconds * BUCKETS, "end")):
        shapes.append(text(x, HEIGHT / 2 + 16, f"{at:,.0f} s", size=11, fill=FAINT, anchor=anchor))
    said = f"{format_size(cell.memory)}, {cell.policy}; prompt tokens by arrival, at most {most:,}"
    keys = [(colour, words) for _, colour, words in PARTS]
    return stack([heading(sheet, "Over time", said), legend(sheet, keys), Drawing(tuple(shapes), HEIGHT / 2 + 20)], 8)


def occupancy_drawing(sheet: Sheet, cell: Cell) -> Drawing:
    """Bytes cached by group, after requests."""
    colours = hues(cell.groups)
    most = max((sum(at.cached_bytes) for at in cell.occupancy), default=1) or 1
    left, right = _sides(sheet)
    width = (right - left) / max(1, len(cell.occupancy))
    shapes: list[str] = []
    for number, at in enumerate(cell.occupancy):
        y = HEIGHT / 2
        for tag, size in zip(cell.groups, at.cached_bytes, strict=True):
            height = HEIGHT / 2 * size / most
            y -= height
            tip = f"after request {at.request:,}: {tag} {short_size(size)}"
            shapes.append(rect(left + number * width, y, width, height, colours[tag], kind="cached", tip=tip))
    for x, request, anchor in ((left, 1, "start"), (right, cell.requests, "end")):
        shapes.append(text(x, HEIGHT / 2 + 16, f"request {request:,}", size=11, fill=FAINT, anchor=anchor))
    said = f"{format_size(cell.memory)}, {cell.policy}; at most {short_size(most)} cached"
    keys = [(colours[tag], tag) for tag in cell.groups]
    return stack([heading(sheet, "Occupancy", said), legend(sheet, keys), Drawing(tuple(shapes), HEIGHT / 2 + 20)], 8)
