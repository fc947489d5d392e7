"""Copy plans: which pages are copied to, or from, which blocks of which chunks. Frozen values; making them touches no
memory.

tokens     0              tail(p)                         p
chunk      |  0   |  1   |  2   |  3   |  4   |  5   |
full       |######|######|######|######|######|######|     whole_chunks, and all that is `needed` at p
window     |......|......|....##|######|######|######|     `needed` at p: its last blocks
state      |......|......|......|......|......|.....#|     `needed` at p: the snapshot taken there
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadCopy
from kvweave.pool import NULL
from kvweave.transfer.layout import ChunkGroup, ChunkLayout

Numbers: TypeAlias = "NDArray[np.int64]"
Tables: TypeAlias = Mapping[str, object]
"""By tag, the pages of a sequence: its row of `Cache.table`. For states, the page of the snapshot at each chunk's
end, NULL where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Pages of a group: `pages[i]` belongs to block `blocks[i]` of the plan's chunk `chunks[i]`. Sorted by chunk and
    block."""

    tag: str
    pages: Numbers
    chunks: Numbers
    blocks: Numbers

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Moves between a memory's pages and chunks of one layout. Buffers are given in the order of `chunks`."""

    layout: ChunkLayout
    chunks: tuple[int, ...]
    """The position of each chunk in its sequence, for callers who look buffers up by it."""
    moves: tuple[Move, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(len(move) * self.layout.group(move.tag).block_bytes for move in self.moves)

    @cached_property
    def shape(self) -> Hashable:
        """Equal for plans of one layout that differ in pages only."""
        return len(self.chunks), *((move.tag, move.chunks.tobytes(), move.blocks.tobytes()) for move in self.moves)

    @property
    def num_pages(self) -> int:
        return sum(len(move) for move in self.moves)

    def only(self, tags: Iterable[str]) -> CopyPlan:
        """The same plan of some groups alone; its chunks stay the same."""
        wanted = {self.layout.group(tag).tag for tag in tags}
        return replace(self, moves=tuple(move for move in self.moves if move.tag in wanted))


def whole_chunks(
    layout: ChunkLayout, tables: Tables, first: int, last: int, *, skip: int = 0, absent: bool = False
) -> CopyPlan:
    """All blocks of the chunks [first, last) of a sequence, except those before token `skip`.

    A NULL page is an error, unless `absent` is given: then such blocks are left out (of windows that have passed, and
    ends of chunks without a snapshot).
    """
    if not 0 <= first <= last:
        raise BadCopy(f"chunks {first} to {last} are no range")
    wanted = {}
    for part in layout.groups:
        blocks = np.arange(part.first_block, part.end_block)
        wanted[part.tag] = (np.arange(first, last)[:, None] * _per_chunk(layout, part) + blocks).ravel()
    return _plan(layout, tables, wanted, skip, absent)


def needed(layout: ChunkLayout, tables: Tables, position: int, *, skip: int = 0, absent: bool = False) -> CopyPlan:
    """Exactly what a sequence needs to resume at `position`: the head and the tail of every group.

    Blocks before token `skip` are left out, as present already.
    """
    if position < 0:
        raise BadCopy(f"no sequence goes on from position {position}")
    wanted = {part.tag: _needed(layout, part, position) for part in layout.groups}
    return _plan(layout, tables, wanted, skip, absent)


def join(plans: Sequence[CopyPlan]) -> CopyPlan:
    """Several plans as one; buffers are given for all chunks of the first, then of the second, and so on."""
    if not plans:
        raise BadCopy("no plans to join; a transfer of nothing is one plan without moves")
    for plan in plans[1:]:
        if plan.layout != plans[0].layout:
            raise BadCopy(f"plans of two layouts, {plans[0].layout.digest[:12]} and {plan.layout.digest[:12]}")
    starts = np.cumsum([0, *(len(plan.chunks) for plan in plans)])
    moves = []
    for part in plans[0].layout.groups:
        own = [(start, move) for start, plan in zip(starts, plans, strict=False) for move in plan.moves]
        own = [(start, move) for start, move in own if move.tag == part.tag]
        if own:
            pages, blocks = (np.concatenate([getattr(m, name) for _, m in own]) for name in ("pages", "blocks"))
            moves.append(make_move(part.tag, pages, np.concatenate([m.chunks + s for s, m in own]), blocks))
    return CopyPlan(plans[0].layout, tuple(number for plan in plans for number in plan.chunks), tuple(moves))


def make_move(tag: str, pages: object, chunks: object, blocks: object) -> Move:
    """A move of any pages to any blocks of chunks, sorted by chunk and block."""
    arrays = [np.array(numbers, np.int64).ravel() for numbers in (pages, chunks, blocks)]
    if len({len(array) for array in arrays}) != 1:
        raise BadCopy(f"{len(arrays[0])} pages of {tag!r} for {len(arrays[1])} chunks and {len(arrays[2])} blocks")
    order = np.lexsort((arrays[2], arrays[1]))
    arrays = [array[order] for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    return Move(tag, *arrays)


# ---- which blocks


def _per_chunk(layout: ChunkLayout, part: ChunkGroup) -> int:
    """Columns of a table that a chunk spans."""
    group = part.group
    return layout.num_tokens // (group.block_tokens * group.context_shards) if group.cache.reach.per_token else 1


def _needed(layout: ChunkLayout, part: ChunkGroup, position: int) -> Numbers:
    """Columns of the blocks of [0, head) and [tail, position)."""
    reach = part.group.cache.reach
    span = layout.num_tokens // _per_chunk(layout, part)
    end = -(-position // span)
    if not reach.per_token:
        return np.arange(max(0, end - 1), end)
    head = -(-min(reach.head, position) // span)
    tail = max(head, reach.tail(position) // span) if reach.tail(position) < position else end
    columns = np.concatenate([np.arange(head), np.arange(tail, end)])
    lost = columns[columns % _per_chunk(layout, part) < part.first_block]
    if len(lost):
        raise BadCopy(
            f"block {lost[0]} of {part.tag!r}, needed at {position}, is not in chunks that hold what their ends need;"
            f" go on from a multiple of {layout.num_tokens}, or make the layout without ends_only"
        )
    return columns


def _plan(layout: ChunkLayout, tables: Tables, wanted: Mapping[str, Numbers], skip: int, absent: bool) -> CopyPlan:
    found = {}
    for part in layout.groups:
        columns = wanted[part.tag]
        columns = columns[columns >= _first_column(part, skip)]
        pages = _pages(part, tables, columns)
        if not absent and len(missing := columns[pages == NULL]):
            raise BadCopy(
                f"block {missing[0]} of {part.tag!r} has no page (NULL): its window has passed, or nothing wrote it;"
                " say absent=True to leave such blocks out"
            )
        kept = pages != NULL
        found[part.tag] = pages[kept], *np.divmod(columns[kept], _per_chunk(layout, part))
    used = np.unique(np.concatenate([chunks for _, chunks, _ in found.values()])) if found else np.empty(0, np.int64)
    moves = [
        make_move(tag, pages, np.searchsorted(used, chunks), blocks) for tag, (pages, chunks, blocks) in found.items()
    ]
    return CopyPlan(layout, tuple(used.tolist()), tuple(move for move in moves if len(move)))


def _first_column(part: ChunkGroup, skip: int) -> int:
    """The first column after `skip` tokens; 0 for states, of which only the last is ever needed."""
    if not part.group.cache.reach.per_token:
        return 0
    span = part.group.block_tokens * part.group.context_shards
    if skip < 0 or skip % span:
        raise BadCopy(
            f"{skip} tokens to skip are no whole number of the blocks of {part.tag!r}, which span {span} tokens;"
            f" skip {max(0, skip) // span * span}"
        )
    return skip // span


def _pages(part: ChunkGroup, tables: Tables, columns: Numbers) -> Numbers:
    if part.tag not in tables:
        raise BadCopy(f"no table for {part.tag!r}; make the layout of the tags {', '.join(tables) or '(none)'} alone")
    row = np.asarray(tables[part.tag]).ravel().astype(np.int64)
    if len(columns) and columns.max() >= len(row):
        what = "blocks" if part.group.cache.reach.per_token else "chunks"
        raise BadCopy(f"{what} up to {columns.max()} of {part.tag!r} are wanted, but its table has {len(row)} pages")
    pages: Numbers = row[columns]
    return pages
