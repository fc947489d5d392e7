"""A payload's copies as the copy kernel takes them. Making them needs no device.

A segment of a copy is cut like a page, of all fields: the device knows the tiles of one segment, and is told where each
begins, here in the pools, and there, in staging memory, in the payload as it will be stored. So what the store keeps is
filled straight from an engine's pages, and leaves by one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from kvweave.copying import BlockCopy, FieldRuns
from kvweave.errors import BadCopy
from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.runs import Runs
from kvweave.transfer.tiles import TILE, Tiling, tiles_of, widest


class FieldTiles:
    """The tiles of a segment of all fields, by the addresses of their pools."""

    def __init__(self, fields: FieldRuns, addresses: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        (planes, rows, size), (plane, row) = fields.shape, fields.held_strides
        runs = Runs(0, 0, planes, plane, rows, row, size, 0, fields.kept_strides[0])
        tiling = Tiling(runs, *fields.kept_strides)
        begins = np.zeros((len(fields.held), 1, TILE), np.int64)
        begins[:, 0, 0] = fields.held + np.array([addresses[name] for name in fields.pools])[fields.pool_index]
        begins[:, 0, 1] = fields.kept
        self.tiles: Numbers = (begins + tiles_of(tiling)).reshape(-1, TILE)
        self.num_tiles = len(self.tiles)
        self.bits = tiling.bits | int(np.bitwise_or.reduce(begins, axis=None))
        room = np.array([sizes[name] for name in fields.pools])[fields.pool_index] - fields.held
        self._held_room = int(room.min()) - _reach(fields.shape, fields.held_strides)
        self._kept_reach = int(fields.kept.max()) + _reach(fields.shape, fields.kept_strides)

    def check(self, copy: BlockCopy, payload_bytes: int) -> None:
        """Raises `BadCopy` if a segment, of at least one, does not lie in the pools and the payload."""
        for name, starts, room in (
            ("pool", copy.held, self._held_room),
            ("payload", copy.kept, payload_bytes - self._kept_reach),
        ):
            first, last = int(starts.min()), int(starts.max())
            if first < 0 or last > room:
                raise BadCopy(
                    f"blocks begin at byte {first} of a {name}, and end {last - room} bytes behind its end: is a page"
                    " number wrong?"
                )


def _reach(shape: tuple[int, int, int], strides: tuple[int, int]) -> int:
    """The bytes from the beginning of a block to its end."""
    return strides[0] * (shape[0] - 1) + strides[1] * (shape[1] - 1) + shape[2]


class PooledFields:
    """The tiles of fields in some pools, by the addresses and sizes of these; worked out once. Thread-safe."""

    def __init__(self, addresses: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self._addresses, self._sizes = addresses, sizes
        self._made: dict[FieldRuns, FieldTiles] = {}

    def tiles(self, fields: FieldRuns) -> FieldTiles:
        if fields not in self._made:
            self._made.setdefault(fields, FieldTiles(fields, self._addresses, self._sizes))
        return self._made[fields]


class Segments(NamedTuple):
    """Segments that are cut alike, as the pages of a batch are."""

    num_pages: int
    tiling: FieldTiles


class PayloadTable:
    """The copies between some pools and payloads in staging memory. A `TabulatedCopy`."""

    def __init__(self, copies: Iterable[BlockCopy], pooled: PooledFields, payload_bytes: int) -> None:
        self.batches, found, bits = list[Segments](), list[Numbers](), 0
        for copy in copies:
            if len(copy.held):
                tiles = pooled.tiles(copy.fields)
                tiles.check(copy, payload_bytes)
                self.batches.append(Segments(len(copy.held), tiles))
                found += [copy.held, copy.kept]
                bits |= tiles.bits
        self.num_tiles = sum(batch.num_pages * batch.tiling.num_tiles for batch in self.batches)
        self.address_table = np.concatenate([np.empty(0, np.int64), *found])
        self.vector_bytes = widest(bits | int(np.bitwise_or.reduce(self.address_table)))
