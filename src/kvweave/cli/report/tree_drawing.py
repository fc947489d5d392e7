"""The prefix tree from left to right: a run of tokens is as wide as it is long, as high as its branches are many."""

from __future__ import annotations

from kvweave.cache.contents import Branch, CacheContents
from kvweave.cli.format import count
from kvweave.cli.svg.draw import FAINT, HUES, ON_LIGHT, WHITE, Drawing, Sheet, heading, lighter, rect, stack, text

HEIGHT, LOWEST, HIGHEST = 420.0, 3.0, 40.0


def tree_drawing(sheet: Sheet, snapshot: CacheContents) -> Drawing:
    """All resume points. Runs that many requests found are dark."""
    branches = snapshot.tree
    said = f"{count(len(branches), 'run')}, {count(sum(b.end - b.start for b in branches), 'token')} kept"
    if not branches:
        return heading(sheet, "What is kept: the prefix tree", said)
    ends = sum(branch.branches for branch in branches if branch.parent is None)
    row = min(HIGHEST, max(LOWEST, HEIGHT / ends))
    longest = max(branch.end for branch in branches)
    scale = sheet.inner / longest
    most = max(1, *(branch.found for branch in branches))
    tops = _tops(branches)
    shapes = [
        shape
        for b in branches
        for shape in _run(b, sheet.margin, tops[b.id] * row, b.branches * row, scale, b.found / most)
    ]
    shapes.append(text(sheet.margin, ends * row + 16, "token 0", size=11, fill=FAINT))
    shapes.append(text(sheet.right, ends * row + 16, f"{longest:,}", size=11, fill=FAINT, anchor="end"))
    title = heading(sheet, "What is kept: the prefix tree", said)
    return stack([title, Drawing(tuple(shapes), ends * row + 22)], 6)


def pages_words(branch: Branch) -> str:
    """`12 of full, 1 of state`."""
    return ", ".join(f"{pages} of {tag}" for tag, pages in branch.pages)


def _tops(branches: tuple[Branch, ...]) -> dict[int, int]:
    """By run: how many ends lie above it in the picture. Children follow one another within their parent."""
    tops: dict[int, int] = {}
    filled: dict[int | None, int] = {None: 0}
    for branch in sorted(branches, key=lambda branch: (branch.start, branch.id)):
        tops[branch.id] = filled[branch.id] = filled[branch.parent]
        filled[branch.parent] += branch.branches
    return tops


def _run(branch: Branch, left: float, y: float, height: float, scale: float, found: float) -> list[str]:
    x, width = left + branch.start * scale, (branch.end - branch.start) * scale
    fill = lighter(HUES[0], 0.7 * (1 - found))
    tip = f"tokens {branch.start:,} to {branch.end:,}, found {count(branch.found, 'time')}; {pages_words(branch)}"
    shapes = [rect(x, y, max(1, width - 1.5), max(1, height - 1.5), fill, kind="run", tip=tip)]
    words = f"{count(branch.end - branch.start, 'token')}, found {branch.found}x"
    if width > 7 * len(words) and height > 15:
        shapes.append(text(x + 8, y + height / 2 + 4, words, size=12, fill=WHITE if found > 0.5 else ON_LIGHT))
    return shapes
