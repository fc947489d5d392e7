"""Payloads of pages: read from an engine's memory and written back, for any blocks, layout and share of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol, cast, runtime_checkable

import numpy as np

from kvweave.copying import (
    BlockCopy,
    Gathering,
    HostPayloadCopier,
    Landing,
    PayloadCopier,
    StagedCopier,
    StagedPayloads,
)
from kvweave.errors import StoreError
from kvweave.store.engine_memory import EngineMemory
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from kvweave.store.payload_copies import ShardCopies, Tables, held_layers
from kvweave.store.shards import Schema, Shard

Source = Callable[[Shard, int], Bytes]
"""Returns the payload of a shard's chunk; its bytes must not change until every tier has them. The checksum of a
read-only array is computed on its way to a tier; that of a writable one at once, so that a change made too early is
detected."""
Sink = Callable[[Shard, int, Bytes], None]
"""Takes the payload of a shard's chunk, which is valid during the call only."""


class PagePayloads:
    """One rank's memory, as a schema's payloads. `copier` is for memory that is not the host's: `transfer` has one."""

    def __init__(self, schema: Schema, memory: EngineMemory, copier: PayloadCopier | None = None) -> None:
        views = {(view.layer, view.tag, view.role): view for view in memory.views}
        self._copies = {shard.id: ShardCopies(shard, memory, views) for shard in schema.shards}
        if copier is None and not all(isinstance(pool, np.ndarray) for pool in memory.pools.values()):
            raise StoreError("memory on a device needs a copier: kvweave.transfer.payload_copier has one for GPUs")
        self._copier = copier or HostPayloadCopier(memory.pools)
        self._is_staged = isinstance(self._copier, StagedCopier)  # asked once: of a protocol it takes long
        self._schema, self.parallel = schema, memory.parallel
        self._layers = [held_layers(shard, memory) for shard in schema.shards]

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The shards that this rank writes. Raises `StoreError` where ranks of its degrees hold no part, or not all
        layers of one."""
        for shard, layers in zip(self._schema.shards, self._layers, strict=True):
            if layers and layers != shard.layers:
                raise StoreError(
                    f"group {shard.tag!r}: a shard has layers {_numbers(shard.layers)}, this pipeline stage"
                    f" {_numbers(layers)} of them; make the schema with the stages of all degrees that write"
                )
        written = self._schema.written_by(self.parallel.tp, self.parallel.tp_rank)
        return tuple(number for number in written if self._layers[number])

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The shards of which this rank needs something."""
        read = self._schema.read_by(self.parallel.tp, self.parallel.tp_rank)
        return tuple(number for number in read if self._layers[number])

    def source(self, tables: Tables) -> Gather:
        """The payloads of a sequence's chunks."""
        return (StagedGather if self._is_staged else HostGather)(self, tables, self._copier.after_caller())

    def sink(self, tables: Tables) -> Sink:
        """A sink that writes payloads into the pages of a sequence. Rows whose page is NULL are skipped.

        A load that returns less than its hit may need window pages that these tables do not have: see `holds`.
        """
        copier = self._copier.after_caller()
        if self._is_staged:
            return StagedScatter(self, tables, cast(StagedCopier, copier))

        def write(shard: Shard, chunk: int, payload: Bytes) -> None:
            copier.scatter(self.sink_copies(shard, [chunk], tables), payload)

        return write

    def source_copies(self, shard: Shard, chunks: Sequence[int], tables: Tables) -> Iterator[BlockCopy]:
        """The copies that fill chunks' payloads from pages. Only complete chunks: an incomplete one would be taken for
        complete by a prompt that ends earlier."""
        return self._copies[shard.id].copies(chunks, tables, whole=True)

    def sink_copies(self, shard: Shard, chunks: Sequence[int], tables: Tables) -> Iterator[BlockCopy]:
        """The copies that write chunks' payloads into pages: of states all, else those whose page is there."""
        return self._copies[shard.id].copies(chunks, tables, whole=not shard.reach.per_token)

    def holds(self, shard: Shard, chunk: int, tables: Tables) -> bool:
        """Whether there is a page for every row of a chunk."""
        return self._copies[shard.id].holds(chunk, tables)


@runtime_checkable
class PagedSource(Protocol):
    """A source that may have freed pages, and tells which chunks it still has completely."""

    def holds(self, shard: Shard, chunk: int) -> bool: ...


@runtime_checkable
class FillableSource(Protocol):
    """A source that can write payloads into given memory, one after the other, best `together_bytes` of them by one
    call."""

    @property
    def together_bytes(self) -> int: ...

    def fill(self, shard: Shard, chunks: Sequence[int], out: Bytes) -> None: ...


class StagedScatter:
    """A sink for memory that is reached through a copier's own, as that of a GPU is."""

    def __init__(self, pages: PagePayloads, tables: Tables, copier: StagedCopier) -> None:
        self._pages, self._tables, self._copier = pages, tables, copier

    def __call__(self, shard: Shard, chunk: int, payload: Bytes) -> None:
        self._copier.scatter(self._pages.sink_copies(shard, [chunk], self._tables), payload)

    @property
    def together_bytes(self) -> int:
        return self._copier.together_bytes

    def begin_landing(self, shard: Shard, chunks: Sequence[int], payloads: Sequence[Bytes]) -> Landing:
        """As calls, for payloads that others may write to. What is returned ends it, and may be called by another
        thread."""
        return self._copier.begin_landing(self._copies(shard, chunks), payloads)

    def _copies(self, shard: Shard, chunks: Sequence[int]) -> Iterator[BlockCopy]:
        """Worked out when they are asked for: a GPU's copier does so while payloads are on their way."""
        yield from self._pages.sink_copies(shard, chunks, self._tables)


class Gather:
    """A source: the payloads of the chunks of one sequence. A `PagedSource`, too."""

    def __init__(self, pages: PagePayloads, tables: Tables, copier: PayloadCopier) -> None:
        self._pages, self._tables, self._copier = pages, tables, copier

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        return self.payloads(shard, [chunk])[0]

    def payloads(self, shard: Shard, chunks: Sequence[int]) -> list[Bytes]:
        """The payloads of chunks, by one call of the copier, in memory that no other code has or can write to."""
        out = aligned(shard.payload_bytes * len(chunks))
        self._copier.gather(self._copies(shard, chunks), out)
        out.flags.writeable = False
        return [*out.reshape(len(chunks), shard.payload_bytes)]

    def holds(self, shard: Shard, chunk: int) -> bool:
        return self._pages.holds(shard, chunk, self._tables)

    @property
    def together_bytes(self) -> int:
        return self._copier.together_bytes

    def _copies(self, shard: Shard, chunks: Sequence[int]) -> Iterator[BlockCopy]:
        return self._pages.source_copies(shard, chunks, self._tables)


class HostGather(Gather):
    """A `FillableSource`."""

    def fill(self, shard: Shard, chunks: Sequence[int], out: Bytes) -> None:
        self._copier.gather(self._copies(shard, chunks), out)


_Call = tuple[bytes, tuple[int, ...]]
"""A shard's id, and chunks."""


class StagedGather(Gather):
    """From memory that is reached through a copier's own, as that of a GPU is."""

    _copier: StagedCopier

    def __init__(self, pages: PagePayloads, tables: Tables, copier: PayloadCopier) -> None:
        super().__init__(pages, tables, copier)
        self._ahead: dict[_Call, StagedPayloads] = {}

    def begin_gather(self, shard: Shard, chunks: Sequence[int], payloads: Sequence[Bytes]) -> Gathering:
        """Start to fill payloads, which others may write to. What is returned ends it, and may be called by another
        thread."""
        staged = self._ahead.pop((shard.id, tuple(chunks)), None) or self._staged(shard, chunks)
        return staged.begin_copy(payloads)

    def gather_ahead(self, shard: Shard, chunks: Sequence[int]) -> None:
        """Start the first half of a `begin_gather` that may follow, while it is not known where payloads go, unless the
        pages are still being written. They must not change until it follows, or until `drop_ahead`."""
        call = shard.id, tuple(chunks)
        if call not in self._ahead and self._copier.is_caller_done():
            self._ahead[call] = self._staged(shard, chunks)

    def drop_ahead(self) -> None:
        """Forget what was gathered ahead. Never waits."""
        for call in [*self._ahead]:
            if staged := self._ahead.pop(call, None):  # another thread may save from this source, too
                staged.drop()

    def _staged(self, shard: Shard, chunks: Sequence[int]) -> StagedPayloads:
        return self._copier.stage(self._copies(shard, chunks), len(chunks), shard.payload_bytes)

    def wait_for_caller(self) -> None:
        """Block until pages have what the caller's stream writes there."""
        self._copier.wait_for_caller()


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
