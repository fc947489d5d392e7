"""One sentence of advice: what more memory would save, and from where on it saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.sim.result import Cell
from kvweave.units import format_size

NOTHING = 0.01
"""A gain of less than this share of what is saved already is none."""


def advice(cells: Sequence[Cell]) -> str:
    """Of cells of one policy and trace, with several memories or tiers."""
    ordered = sorted(cells, key=lambda cell: cell.memory)
    levels = [(f"{format_size(cell.memory)}", cell.memory, cell.split.hit) for cell in ordered]
    found = ordered[-1].split.hit
    for use in ordered[-1].tiers:
        found += use.loaded_tokens
        levels.append((f"{format_size(use.memory)} of {use.name} memory", use.memory, found))
    base, most = levels[0], max(hit for _, _, hit in levels)
    overlap, prompt = ordered[0].split.overlap, ordered[0].split.prompt
    if not overlap:
        return "No request shares a block with an earlier one: no cache would save anything."
    enough = next(level for level in levels if level[2] >= most * (1 - NOTHING))
    left = _more(most, overlap)
    if enough is base:
        lacking = ordered[-1].split.evicted > NOTHING * most and len(levels) == 1
        rest = "try more memory (--memory, --tier)" if lacking else "more memory saves nothing"
        saves = (
            f"{base[0]} saves {base[2] / prompt:.0%} of all prompt tokens, an infinite cache {left or 'nothing'} more"
        )
        return f"{saves}; {rest}."
    beyond = "; more than that nothing" if levels[-1] is not enough else ""
    gain = _compared(base[2], enough[2], base[0])
    return f"{enough[0]} would save {gain}{beyond} (an infinite cache {left or 'nothing'} more still)."


def _compared(now: int, then: int, than: str) -> str:
    if now and then > 2 * now:
        return f"{then / now:.1f} times as much as {than}"
    return f"{_more(now, then)} more than {than}"


def _more(now: int, then: int) -> str:
    """By how much more `then` is; empty where that is nothing."""
    if then <= now * (1 + NOTHING):
        return ""
    return f"{then / now - 1:.0%}" if now else f"{then:,} tokens"
