"""Pages: payloads out of an engine's memory and back, whatever its blocks, kernel layout and share of the heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from kvweave.copying import HostPayloadCopier, PayloadCopier
from kvweave.errors import StoreError
from kvweave.store.engine_memory import EngineMemory
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from kvweave.store.payload_copies import ShardCopies, Tables
from kvweave.store.shards import Schema, Shard

Source = Callable[[Shard, int], Bytes]
"""The payload of a row's chunk: bytes that stay as they are until every tier has them. An array that cannot be written
to is summed on its way to a tier; any other at once, so that what is changed too early is found out."""
Sink = Callable[[Shard, int, Bytes], None]
"""Takes a row's chunk; the payload is the sink's for the time of the call."""


class PagePayloads:
    """One rank's memory, as a schema's payloads. `copier` is for memory that is not the host's: `transfer` has one."""

    def __init__(self, schema: Schema, memory: EngineMemory, copier: PayloadCopier | None = None) -> None:
        views = {(view.layer, view.tag, view.role): view for view in memory.views}
        self._copies = {shard.id: ShardCopies(shard, memory, views) for shard in schema.shards}
        if copier is None and not all(isinstance(pool, np.ndarray) for pool in memory.pools.values()):
            raise StoreError("memory on a device needs a copier: kvweave.transfer.payload_copier has one for GPUs")
        self._copier = copier or HostPayloadCopier(memory.pools)
        self._schema, self.parallel = schema, memory.parallel

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The shards that this rank writes. Raises `StoreError` where its degree holds no part whole."""
        return self._schema.written_by(self.parallel.tp, self.parallel.tp_rank)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The shards of which this rank needs something."""
        return self._schema.read_by(self.parallel.tp, self.parallel.tp_rank)

    def source(self, tables: Tables) -> Source:
        """Payloads of a sequence's chunks; it can also `fill` memory that is there."""
        return _Gather(self, tables, self._copier.after_caller())

    def sink(self, tables: Tables) -> Sink:
        """Writes what is loaded into a sequence's pages. Rows without a page (NULL) are left out.

        A load that ends before its hit may have needed pages that the tables do not have: `holds` tells.
        """
        copier = self._copier.after_caller()

        def write(shard: Shard, chunk: int, payload: Bytes) -> None:
            copies = self._copies[shard.id].copies(chunk, tables, whole=not shard.reach.per_token)
            copier.scatter(copies, payload)

        return write

    def holds(self, shard: Shard, chunk: int, tables: Tables) -> bool:
        """Whether there is a page for every row of a chunk."""
        return self._copies[shard.id].holds(chunk, tables)


@runtime_checkable
class PagedSource(Protocol):
    """A source that may have lost pages, and says of which chunks it has them all."""

    def holds(self, shard: Shard, chunk: int) -> bool: ...


@runtime_checkable
class FillableSource(Protocol):
    """A source that writes payloads where they shall be, for several threads at once."""

    def fill(self, shard: Shard, chunk: int, out: Bytes) -> None: ...


class _Gather:
    """Payloads of the chunks of one sequence."""

    def __init__(self, pages: PagePayloads, tables: Tables, copier: PayloadCopier) -> None:
        self._pages, self._tables, self._copier = pages, tables, copier

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        out = aligned(shard.payload_bytes)
        self.fill(shard, chunk, out)
        out.flags.writeable = False
        return out

    def holds(self, shard: Shard, chunk: int) -> bool:
        return self._pages.holds(shard, chunk, self._tables)

    def fill(self, shard: Shard, chunk: int, out: Bytes) -> None:
        """Whole chunks only: half of one would pass for the whole, for a prompt that ends earlier."""
        self._copier.gather(self._pages._copies[shard.id].copies(chunk, self._tables, whole=True), out)
