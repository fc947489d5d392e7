"""One sentence of advice: what more memory would save, and from where on it saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.sim.result import Cell
from kvweave.units import format_size

NOTHING = 0.01
"""A gain of at most this share of what is saved already is none."""


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
    infinite = f"an infinite cache {_gain(most, overlap)}"
    if most <= base[2] * (1 + NOTHING):
        rest = "more memory saves nothing"
        if ordered[-1].split.evicted - (found - ordered[-1].split.hit) > NOTHING * most:
            tried = f"{levels[-1][0]} saves nothing more, " if len(levels) > 1 else ""
            rest = f"{tried}try more memory (--memory, --tier)"
        return f"{base[0]} saves {base[2] / prompt:.0%} of all prompt tokens, {infinite}; {rest}."
    enough = next(level for level in levels if level[2] - base[2] >= (most - base[2]) * (1 - NOTHING))
    beyond = "; more than that nothing" if levels[-1] is not enough else ""
    return f"{enough[0]} would save {_gain(base[2], enough[2], base[0])}{beyond} ({infinite} still)."


def _gain(now: int, then: int, than: str = "") -> str:
    """How much more `then` is, in words."""
    if now and then > 2 * now:
        return f"{then / now:.1f} times as much" + (f" as {than}" if than else "")
    more = "nothing" if then <= now * (1 + NOTHING / 2) else f"{then / now - 1:.0%}" if now else f"{then:,} tokens"
    return f"{more} more" + (f" than {than}" if than else "")
