"""Which bytes of an engine's memory are which of a payload's, for any chunk of a shard, whatever the engine's blocks.

    tokens      a                              b         of the piece
    blocks   |....|.......|.......|.......|.......|      of the engine's views
    segments    |--|-------|-------|-------|---|         rows of one block each; those of equal length go together

Fields (a role of a layer, cut to the heads that both sides hold) that look alike are copied together. All but the pages
is worked out once: how segments lie depends on where in its page a piece begins, how a field does on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import BlockCopy, FieldRuns, Numbers
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
        found: dict[tuple[TableUse, int, int], dict[_Look, list[_Start]]] = {}
        elsewhere = set(shard.layers).difference(held_layers(shard, memory))
        for layer, role, where in shard.fields():
            has_no_width = where.start == where.stop  # as some latents' ropes are
            if has_no_width or layer in elsewhere:
                continue
            view, table = _checked(shard, memory, views, layer, role), memory.tables[layer, shard.tag]
            block_tokens = _block_tokens(shard, role, view, table)
            num_pages = (view.parts or (view,))[0].shape[0] * block_tokens // table.block_tokens
            looks = found.setdefault((table, block_tokens, num_pages), {})
            for look, start in _fields(shard, role, view, where.start, memory.parallel):
                looks.setdefault(look, []).append(start)
        self._shares = [_TableShare(shard, *key, looks) for key, looks in found.items()]

    def copies(self, chunks: Sequence[int], tables: Tables, *, whole: bool) -> Iterator[BlockCopy]:
        """Between the pages and the payloads of chunks, one payload after the other. Rows on NULL pages are left out;
        `whole` refuses them."""
        found: dict[FieldRuns, list[BlockCopy]] = {}
        for share in self._shares:
            for offset, places, pages in self._pieces(share, chunks, tables):
                is_there = pages != self._null
                is_all = bool(is_there.all())
                if whole and not is_all:
                    raise self._not_whole(share, [chunks[place] for place in places], is_there)
                starts = places[:, None] * self._shard.payload_bytes
                for copy in share.copies(offset, pages, starts, None if is_all else is_there):
                    found.setdefault(copy.fields, []).append(copy)
        return map(_joined, found.values())

    def _pieces(
        self, share: _TableShare, chunks: Sequence[int], tables: Tables
    ) -> Iterator[tuple[int, Numbers, Numbers]]:
        """The pages of chunks, those together that begin as far behind the beginnings of their pages."""
        by_offset: dict[int, list[int]] = {}
        for place, chunk in enumerate(chunks):
            by_offset.setdefault(self._shard.tokens(chunk)[0] % share.page_tokens, []).append(place)
        for offset, places in by_offset.items():
            pages = share.pages([chunks[place] for place in places], tables, self._null)
            yield offset, np.array(places), pages

    def _not_whole(self, share: _TableShare, chunks: Sequence[int], is_there: NDArray[np.bool_]) -> StoreError:
        gone = [chunk for chunk, own in zip(chunks, is_there, strict=True) if not own.all()]
        return StoreError(
            f"group {self._shard.tag!r}: {np.count_nonzero(~is_there)} of the {is_there.size} pages of chunk"
            f" {', '.join(map(str, gone))} in table {share.name!r} are not there (NULL); keep windows in whole"
            " chunks, and states at their ends, or do not store it"
        )

    def holds(self, chunk: int, tables: Tables) -> bool:
        """Whether there is a page for every row of a chunk."""
        return all((share.pages([chunk], tables, self._null) != self._null).all() for share in self._shares)


def _joined(copies: Sequence[BlockCopy]) -> BlockCopy:
    """Copies of the same fields as one: a call takes longer than the copy of a small chunk."""
    if len(copies) == 1:
        return copies[0]
    held, kept = (np.concatenate([getattr(copy, side) for copy in copies]) for side in ("held", "kept"))
    return BlockCopy(copies[0].fields, held, kept)


def held_layers(shard: Shard, memory: EngineMemory) -> tuple[int, ...]:
    """The layers of a shard that a rank's memory has to have: of a pipeline stage those with block tables."""
    if memory.parallel.pp == 1:
        return shard.layers
    return tuple(layer for layer in shard.layers if (layer, shard.tag) in memory.tables)


class _Start(NamedTuple):
    """Where a field begins: in block 0 of a view in this pool, and in the payload."""

    pool: str
    held: int
    kept: int


class _Look(NamedTuple):
    """What fields must have in common to be copied together: strides begin with the rows'."""

    tokens_per_row: int
    item_bytes: int
    shape: tuple[int, ...]
    held_block: int
    held: tuple[int, ...]
    kept: tuple[int, ...]

    def fields(self, starts: Sequence[_Start], num_tokens: int) -> FieldRuns:
        """As many tokens of each field. Inner axes that are dense on both sides are one run, the next two its strides,
        the others fields of their own."""
        axes = [(num_tokens // self.tokens_per_row, self.held[0], self.kept[0])]
        axes += zip(self.shape, self.held[1:], self.kept[1:], strict=True)
        size = self.item_bytes
        while axes and (axes[-1][0] == 1 or axes[-1][1:] == (size, size)):
            size *= axes.pop()[0]
        loops = [axis for axis in axes if axis[0] > 1]
        (planes, *plane), (rows, *row) = [(1, 0, 0), (1, 0, 0), *loops][-2:]
        pools = tuple(dict.fromkeys(start.pool for start in starts))
        found: Numbers = np.array([(pools.index(pool), held, kept) for pool, held, kept in starts], np.int64)
        for count, *strides in loops[:-2]:
            steps = np.outer(np.arange(count), np.array([0, *strides]))
            found = (found[:, None] + steps).reshape(-1, 3)
        index, held, kept = np.ascontiguousarray(found.T)
        return FieldRuns(pools, index, held, (plane[0], row[0]), kept, (plane[1], row[1]), (planes, rows, size))


class _Segments(NamedTuple):
    """Ranges of as many tokens each of all fields that look alike, in a piece that begins so far behind its page: the
    number of its page among the piece's, where it begins there and in the payload, and how far apart pages lie."""

    fields: FieldRuns
    pages: Numbers
    held: Numbers
    kept: Numbers
    page_bytes: int


class _TableShare:
    """The fields of a shard whose pages one table names, in views of one block size."""

    def __init__(
        self,
        shard: Shard,
        table: TableUse,
        block_tokens: int,
        num_pages: int,
        looks: Mapping[_Look, Sequence[_Start]],
    ) -> None:
        self._shard, self._table, self._block_tokens, self._looks = shard, table, block_tokens, looks
        self._num_pages = num_pages
        self._fields: dict[tuple[_Look, int], FieldRuns] = {}
        self._segments: dict[int, list[_Segments]] = {}

    @property
    def name(self) -> str:
        """The table's."""
        return self._table.name

    @property
    def page_tokens(self) -> int:
        return self._table.block_tokens

    def pages(self, chunks: Sequence[int], tables: Tables, null: int) -> Numbers:
        """`[chunks, pages]`: the pages of pieces that begin as far behind the beginnings of their first pages, in
        order; for states, that of each piece's end."""
        name, size, shard = self.name, self.page_tokens, self._shard
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

    def copies(
        self, offset: int, pages: Numbers, starts: Numbers, is_there: NDArray[np.bool_] | None
    ) -> Iterator[BlockCopy]:
        """The copies of pieces that begin `offset` tokens behind the first of their `pages`, and at `starts` of the
        payloads; only those on pages that are there."""
        if offset not in self._segments:
            self._segments[offset] = [*self._cut(offset)]
        for segments in self._segments[offset]:
            held = (pages[:, segments.pages] * segments.page_bytes + segments.held).ravel()
            kept = (starts + segments.kept).ravel()
            if is_there is not None:
                own = is_there[:, segments.pages].ravel()
                held, kept = held[own], kept[own]
            yield BlockCopy(segments.fields, held, kept)

    def _cut(self, offset: int) -> Iterator[_Segments]:
        start, stop = self._shard.tokens(0)
        size, stop = self._block_tokens, offset + stop - start
        if not self._shard.reach.per_token:  # the one row of a page
            offset, size, stop = 0, 1, 1
        cuts = np.array([offset, *range((offset // size + 1) * size, stop, size), stop], np.int64)
        first, counts = cuts[:-1], np.diff(cuts)
        pages, rest = np.divmod(first, self.page_tokens)
        blocks, tokens = np.divmod(rest, size)
        for count in np.unique(counts).tolist():
            alike = counts == count
            for look in self._looks:
                held = blocks * look.held_block + tokens // look.tokens_per_row * look.held[0]
                kept = (first - offset) // look.tokens_per_row * look.kept[0]
                page_bytes = self.page_tokens // self._block_tokens * look.held_block
                yield _Segments(self._field_runs(look, count), pages[alike], held[alike], kept[alike], page_bytes)

    def _field_runs(self, look: _Look, num_tokens: int) -> FieldRuns:
        if (look, num_tokens) not in self._fields:
            self._fields[look, num_tokens] = look.fields(self._looks[look], num_tokens)
        return self._fields[look, num_tokens]


def _fields(shard: Shard, role: Role, view: View, start: int, parallel: Parallel) -> Iterator[tuple[_Look, _Start]]:
    """What both sides hold of a role, and where it begins."""
    row_bytes, tokens_per_row = role.shard(shard.parts).row_bytes, role.tokens_per_row if shard.reach.per_token else 1
    planes = [plane if shard.reach.per_token else _one_row(plane) for plane in view.parts or (view,)]
    if view.parts:
        for part, plane in zip(role.parts, planes, strict=True):
            yield _look(plane, row_bytes, tokens_per_row), _Start(plane.pool, plane.offset, start)
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
            held = view.offset + both[0].start * view.strides[2]
            yield look, _Start(view.pool, held, start + both[1].start * entry)


def _one_row(view: View) -> View:
    """A state's view with an axis for its one row."""
    return replace(view, shape=(view.shape[0], 1, *view.shape[1:]), strides=(view.strides[0], 0, *view.strides[1:]))


def _look(view: View, row_bytes: int, tokens_per_row: int, shape: tuple[int, ...] | None = None) -> _Look:
    """In the payload, rows are `row_bytes` apart, and have no gaps."""
    (_, _, *row), item = shape or view.shape, view.dtype.align_bytes
    kept = (row_bytes, *contiguous(tuple(row), item))
    return _Look(tokens_per_row, item, tuple(row), view.strides[0], view.strides[1:], kept)


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
