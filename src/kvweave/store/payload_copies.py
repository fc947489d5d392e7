"""Which bytes of an engine's memory are which of a payload's, for any chunk of a shard, whatever the engine's blocks.

    tokens      a                              b         of the piece
    blocks   |....|.......|.......|.......|.......|      of the engine's views
    segments    |--|-------|-------|-------|---|         rows of one block each; those of equal length go together

Fields (a role of a layer, cut to the heads that both sides hold) that look alike are copied together. All but the pages
is worked out once: how segments lie depends on where in its page a piece begins, how a field does on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import BlockCopy, Numbers
from kvweave.errors import StoreError
from kvweave.plan import Parallel, View
from kvweave.plan.view import as_bytes, contiguous
from kvweave.spec import Part, Role
from kvweave.store.engine_memory import EngineMemory, TableUse
from kvweave.store.shards import AxisSlice, Shard, axis_slices

Tables = Mapping[str, NDArray[np.int32]]
"""By the engine's name of the table: the page of each block of a sequence; for states, of the snapshot at its end."""


class ShardCopies:
    """The copies of one shard's pieces, of the layers that are in this memory: all, but for pipeline-parallel ranks.
    Refuses, by name, memory that is not as the schema has it."""

    def __init__(self, shard: Shard, memory: EngineMemory, views: Mapping[tuple[int, str, str], View]) -> None:
        self._shard, self._null = shard, memory.null
        found: dict[tuple[TableUse, int, int], dict[_Look, list[tuple[int, int]]]] = {}
        elsewhere = set(shard.layers).difference(held_layers(shard, memory))
        for layer, role, where in shard.fields():
            has_no_width = where.start == where.stop  # as some latents' ropes are
            if has_no_width or layer in elsewhere:
                continue
            view, table = _checked(shard, memory, views, layer, role), memory.tables[layer, shard.tag]
            block_tokens = _block_tokens(shard, role, view, table)
            num_pages = (view.parts or (view,))[0].shape[0] * block_tokens // table.block_tokens
            looks = found.setdefault((table, block_tokens, num_pages), {})
            for look, starts in _fields(shard, role, view, where.start, memory.parallel):
                looks.setdefault(look, []).append(starts)
        self._shares = [_TableShare(shard, *key, looks) for key, looks in found.items()]
        self._placed: dict[tuple[int, ...], list[_PlacedRuns]] = {}

    def copies(self, chunks: Sequence[int], tables: Tables, *, whole: bool) -> Iterator[BlockCopy]:
        """Between the pages and the payloads of chunks, one payload after the other. Rows on NULL pages are left out;
        `whole` refuses them."""
        by_offsets: dict[tuple[int, ...], list[int]] = {}
        for place, chunk in enumerate(chunks):
            start = self._shard.tokens(chunk)[0]
            by_offsets.setdefault(tuple(start % share.page_tokens for share in self._shares), []).append(place)
        alike: dict[tuple[Any, ...], list[BlockCopy]] = {}
        for offsets, places in by_offsets.items():
            own = [chunks[place] for place in places]
            for copy in self._at_offsets(offsets, np.array(places), own, tables, whole):
                look = copy.pools, copy.held_strides, copy.kept_strides, copy.shape
                alike.setdefault(look, []).append(copy)
        return (_joined(copies) for copies in alike.values())

    def _at_offsets(
        self, offsets: tuple[int, ...], places: Numbers, chunks: Sequence[int], tables: Tables, whole: bool
    ) -> Iterator[BlockCopy]:
        """The copies of chunks that begin as far behind the beginnings of their pages."""
        pages = [share.pages(chunks, tables, self._null) for share in self._shares]
        numbers: Numbers = np.concatenate(pages, axis=1)
        missing = int(np.count_nonzero(numbers == self._null))
        if whole and missing:
            gone = [chunk for chunk, own in zip(chunks, numbers, strict=True) if self._null in own]
            raise StoreError(
                f"group {self._shard.tag!r}: {missing} of the {numbers.size} pages of chunk"
                f" {', '.join(map(str, gone))} are not there (NULL); keep windows in whole chunks, and states at their"
                " ends, or do not store it"
            )
        starts = places[:, None] * self._shard.payload_bytes
        for runs in self._runs_at(offsets, [each.shape[1] for each in pages]):
            own = numbers[:, runs.slots]
            held: Numbers = (runs.held + own * runs.steps).ravel()
            kept: Numbers = (runs.kept + starts).ravel()
            pools = runs.pool_index[None].repeat(len(chunks), 0).ravel() if len(runs.pools) > 1 else None
            if missing:
                is_there = (own != self._null).ravel()
                held, kept, pools = held[is_there], kept[is_there], None if pools is None else pools[is_there]
            yield BlockCopy(runs.pools, pools, held, runs.held_strides, kept, runs.kept_strides, runs.shape)

    def _runs_at(self, offsets: tuple[int, ...], num_pages: Sequence[int]) -> list[_PlacedRuns]:
        """The runs of a piece that begins so many tokens behind its first pages: what lies alike is copied together."""
        if offsets not in self._placed:
            alike: dict[tuple[Any, ...], list[tuple[str, tuple[Numbers, ...]]]] = {}
            firsts = np.cumsum([0, *num_pages])
            for share, offset, first in zip(self._shares, offsets, firsts.tolist(), strict=False):
                for key, pool, arrays in share.runs(offset, first):
                    alike.setdefault(key, []).append((pool, arrays))
            self._placed[offsets] = [_placed(key, runs) for key, runs in alike.items()]
        return self._placed[offsets]

    def holds(self, chunk: int, tables: Tables) -> bool:
        """Whether there is a page for every row of a chunk."""
        return all((share.pages([chunk], tables, self._null) != self._null).all() for share in self._shares)


def _joined(copies: Sequence[BlockCopy]) -> BlockCopy:
    """Copies that lie alike as one: a call takes longer than the copy of a small chunk."""
    first, *others = copies
    if not others:
        return first
    index = None if first.pool_index is None else np.concatenate([copy.pool_index for copy in copies])
    held, kept = (np.concatenate([getattr(copy, side) for copy in copies]) for side in ("held", "kept"))
    return first._replace(pool_index=index, held=held, kept=kept)


def held_layers(shard: Shard, memory: EngineMemory) -> tuple[int, ...]:
    """The layers of a shard that a rank's memory has to have: of a pipeline stage those with block tables."""
    if memory.parallel.pp == 1:
        return shard.layers
    return tuple(layer for layer in shard.layers if (layer, shard.tag) in memory.tables)


class _Look(NamedTuple):
    """What fields must have in common to be copied together: strides begin with the rows'."""

    pool: str
    tokens_per_row: int
    item_bytes: int
    shape: tuple[int, ...]
    held_block: int
    held: tuple[int, ...]
    kept: tuple[int, ...]

    def runs(self, starts: Iterable[tuple[int, int]], num_tokens: int, tokens: Numbers, places: Numbers) -> _Runs:
        """Of segments of `num_tokens` that begin at `tokens` of their blocks, and at token `places` of the piece.

        Inner axes that are dense on both sides are one run, the next two its strides, the others starts.
        """
        axes = [(num_tokens // self.tokens_per_row, self.held[0], self.kept[0])]
        axes += zip(self.shape, self.held[1:], self.kept[1:], strict=True)
        size, fields = self.item_bytes, np.array([*starts], np.int64)
        while axes and (axes[-1][0] == 1 or axes[-1][1:] == (size, size)):
            size *= axes.pop()[0]
        loops = [axis for axis in axes if axis[0] > 1]
        (planes, *plane), (rows, *row) = [(1, 0, 0), (1, 0, 0), *loops][-2:]
        for count, *strides in loops[:-2]:
            fields = (fields[:, None] + np.arange(count)[None, :, None] * strides).reshape(-1, 2)
        held = fields[:, :1] + tokens // self.tokens_per_row * self.held[0]
        kept = fields[:, 1:] + places // self.tokens_per_row * self.kept[0]
        shape = (planes, rows, size)
        return _Runs(self.pool, held, kept, self.held_block, (plane[0], row[0]), (plane[1], row[1]), shape)


class _Runs(NamedTuple):
    """Fields that look alike: where the rows of each segment start, in block 0 of the view and in the payload."""

    pool: str
    held: Numbers
    """`[fields, segments]`"""
    kept: Numbers
    held_block: int
    held_strides: tuple[int, int]
    kept_strides: tuple[int, int]
    shape: tuple[int, int, int]


class _PlacedRuns(NamedTuple):
    """Runs of all fields and segments of a piece that lie alike: on the page of number `slots` among the piece's pages,
    and for each page `steps` bytes further than `held`, in pool `pools[pool_index]`."""

    pools: tuple[str, ...]
    pool_index: Numbers
    held_strides: tuple[int, int]
    kept_strides: tuple[int, int]
    shape: tuple[int, int, int]
    held: Numbers
    kept: Numbers
    slots: Numbers
    steps: Numbers


def _placed(key: tuple[Any, ...], runs: Sequence[tuple[str, tuple[Numbers, ...]]]) -> _PlacedRuns:
    """Runs that lie alike in pools of any number: to copy them by one call takes less time than by one a pool."""
    pools = tuple(dict.fromkeys(pool for pool, _ in runs))
    index = [np.full(arrays[0].size, pools.index(pool)) for pool, arrays in runs]
    columns = zip(*(arrays for _, arrays in runs), strict=True)
    merged = (np.concatenate([array.ravel() for array in column]) for column in columns)
    return _PlacedRuns(pools, np.concatenate(index), *key, *merged)


class _Segments(NamedTuple):
    """Ranges of as many tokens each: in which of the piece's pages, in which of its blocks, and the fields there."""

    pages: Numbers
    blocks: Numbers
    runs: list[_Runs]


class _TableShare:
    """The fields of a shard whose pages one table names, in views of one block size."""

    def __init__(
        self,
        shard: Shard,
        table: TableUse,
        block_tokens: int,
        num_pages: int,
        looks: Mapping[_Look, list[tuple[int, int]]],
    ) -> None:
        self._shard, self._table, self._block_tokens, self._looks = shard, table, block_tokens, looks
        self._num_pages = num_pages

    def pages(self, chunks: Sequence[int], tables: Tables, null: int) -> Numbers:
        """`[chunks, pages]`: the pages of pieces that begin as far behind the beginnings of their first pages,
        in order; for states, that of each piece's end."""
        (name, size), shard = (self._table.name, self._table.block_tokens), self._shard
        if name not in tables:
            raise StoreError(f"group {shard.tag!r}: no block table {name!r} among {', '.join(tables) or '(none)'}")
        firsts = []
        for chunk in chunks:
            start, stop = shard.tokens(chunk)
            if not shard.reach.per_token and stop % size:
                raise StoreError(f"group {shard.tag!r}: no snapshot at {stop}, its blocks are of {size} tokens")
            first, last = (start // size if shard.reach.per_token else stop // size - 1), -(-stop // size)
            if last > len(tables[name]):
                raise StoreError(
                    f"group {shard.tag!r}: chunk {chunk} ends at {stop}, but table {name!r} has {len(tables[name])}"
                    f" pages of {size} tokens"
                )
            firsts.append(first)
        pages = np.asarray(tables[name])[np.array(firsts)[:, None] + np.arange(last - first)].astype(np.int64)
        if pages.view(np.uint64).max(initial=0) >= self._num_pages:  # also what is below 0, and NULL may be that
            wrong = pages[(pages != null) & ((pages < 0) | (pages >= self._num_pages))]
            if len(wrong):
                raise StoreError(f"table {name!r} names page {wrong[0]}: its pages are 0 to {self._num_pages - 1}")
        return pages

    @property
    def page_tokens(self) -> int:
        return self._table.block_tokens

    def runs(self, offset: int, first: int) -> Iterator[tuple[tuple[Any, ...], str, tuple[Numbers, ...]]]:
        """Of a piece that begins `offset` tokens after its first page, number `first` among the piece's, does: what
        runs must have in common to be copied together, their pool, and `held`, `kept`, `slots` and `steps`."""
        per_page = self.page_tokens // self._block_tokens
        for pages, within, all_runs in self._cut(offset):
            for runs in all_runs:
                held = runs.held + within * runs.held_block
                slots = np.broadcast_to(first + pages, held.shape)
                steps = np.full(held.shape, per_page * runs.held_block)
                key = runs.held_strides, runs.kept_strides, runs.shape
                yield key, runs.pool, (held, runs.kept, slots, steps)

    def _cut(self, offset: int) -> Iterator[_Segments]:
        start, stop = self._shard.tokens(0)
        size, stop = self._block_tokens, offset + stop - start
        if not self._shard.reach.per_token:  # the one row of a page
            offset, size, stop = 0, 1, 1
        cuts = np.array([offset, *range((offset // size + 1) * size, stop, size), stop], np.int64)
        first, counts = cuts[:-1], np.diff(cuts)
        pages, rest = np.divmod(first, self._table.block_tokens)
        blocks, tokens = np.divmod(rest, size)
        for count in np.unique(counts).tolist():
            alike = counts == count
            placed = count, tokens[alike], first[alike] - offset
            runs = [look.runs(starts, *placed) for look, starts in self._looks.items()]
            yield _Segments(pages[alike], blocks[alike], runs)


def _fields(
    shard: Shard, role: Role, view: View, start: int, parallel: Parallel
) -> Iterator[tuple[_Look, tuple[int, int]]]:
    """What both sides hold of a role, and where it starts in block 0 of the view, and in the payload."""
    row_bytes, tokens_per_row = role.shard(shard.parts).row_bytes, role.tokens_per_row if shard.reach.per_token else 1
    planes = [plane if shard.reach.per_token else _one_row(plane) for plane in view.parts or (view,)]
    if view.parts:
        for part, plane in zip(role.parts, planes, strict=True):
            yield _look(plane, row_bytes, tokens_per_row), (plane.offset, start)
            start += part.num_bytes
        return
    (view,) = planes
    item = view.dtype.align_bytes
    entry = item * int(np.prod(view.shape[3:]))
    for mine, theirs in zip(axis_slices(role, parallel.tp, parallel.tp_rank), shard.axis_slices(role), strict=True):
        both = in_items(mine, role).within(in_items(theirs, role))
        if both:
            share = (*view.shape[:2], both[0].stop - both[0].start, *view.shape[3:])
            look = _look(view, row_bytes, tokens_per_row, share)
            yield look, (view.offset + both[0].start * view.strides[2], start + both[1].start * entry)


def _one_row(view: View) -> View:
    """A state's view with an axis for its one row."""
    return replace(view, shape=(view.shape[0], 1, *view.shape[1:]), strides=(view.strides[0], 0, *view.strides[1:]))


def _look(view: View, row_bytes: int, tokens_per_row: int, shape: tuple[int, ...] | None = None) -> _Look:
    """In the payload, rows are `row_bytes` apart, and have no gaps."""
    (_, _, *row), item = shape or view.shape, view.dtype.align_bytes
    kept = (row_bytes, *contiguous(tuple(row), item))
    return _Look(view.pool, tokens_per_row, item, tuple(row), view.strides[0], view.strides[1:], kept)


def _checked(
    shard: Shard, memory: EngineMemory, views: Mapping[tuple[int, str, str], View], layer: int, role: Role
) -> View:
    """The view of a role of a layer, in which one rank's rows are as the spec says."""
    where = f"group {shard.tag!r}, layer {layer}, {role.name!r}"
    view = views.get((layer, shard.tag, role.name))
    if view is None:
        raise StoreError(f"{where}: in the schema, but not in the memory; make the schema of the layers that are here")
    fields: Sequence[Part | Role] = role.parts if view.parts else (role.shard(memory.parallel.tp),)
    planes, axes = view.parts or (view,), 2 if shard.reach.per_token else 1
    names = [plane.role.rpartition(".")[2] for plane in planes]
    if names != [row.name for row in fields] or len({plane.shape[:axes] for plane in planes}) > 1:
        raise StoreError(f"{where}: planes {names} of unequal rows, or not the fields {[row.name for row in fields]}")
    for row, plane in zip(fields, planes, strict=True):
        (shape, dtype), held = as_bytes(row.shape, row.dtype), plane.shape[axes:]
        if (held, plane.dtype.align_bytes) != (shape, dtype.align_bytes):
            raise StoreError(
                f"{where}: a row of {row.name!r} is {held} of {plane.dtype} in the memory, but {shape} of {dtype} on"
                f" each of {memory.parallel.tp} ranks; permute the tensor to blocks, rows, and the axes of a row"
            )
    return view


def _block_tokens(shard: Shard, role: Role, view: View, table: TableUse) -> int:
    """Tokens of one of the view's blocks, of which a table's page is some."""
    if not shard.reach.per_token:
        return table.block_tokens
    tokens = (view.parts or (view,))[0].shape[1] * role.tokens_per_row
    if table.block_tokens % tokens:
        raise StoreError(
            f"group {shard.tag!r}, layer {view.layer}: blocks of {tokens} tokens do not divide the pages of"
            f" {table.block_tokens} that table {table.name!r} names"
        )
    return tokens


def in_items(axis_slice: AxisSlice, role: Role) -> AxisSlice:
    """A cut in the items of its view: packed nibbles of a row with one axis count in bytes."""
    if role.dtype.bits >= 8 or len(role.shape) > 1:
        return axis_slice
    return AxisSlice(
        *(entries * role.dtype.bits // 8 for entries in (axis_slice.start, axis_slice.stop, axis_slice.at))
    )
