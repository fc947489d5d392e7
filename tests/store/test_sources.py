"""What a source gives is the store's from then on: memory that it uses again is copied, all else is taken as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from kvweave.copying import BlockCopy, HostPayloadCopier
from kvweave.store import (
    DictTier,
    DiskTier,
    EngineMemory,
    MemoryTier,
    PagePayloads,
    Schema,
    Shard,
    Store,
    TierPolicy,
    TierStack,
)
from kvweave.store.blob import COUNTS_LOCALS, owned_payload
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from tests.store.faults import SCHEMA, SPEC, TOKENS, payload, verify
from tests.store.models import fill, hybrid, namespace, rank, truth


class Reusing:
    """Hands out one buffer again and again."""

    def __init__(self, *, writable: bool) -> None:
        self._memory, self._writable = np.empty(1 << 20, np.uint8), writable

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        found = payload(shard, chunk)
        self._memory[: len(found)] = found
        view = self._memory[: len(found)]
        view.flags.writeable = self._writable
        return view

    def spoil(self) -> None:
        self._memory[:] = 0xEE


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_source_may_use_its_memory_again(tmp_path: Path, write: str, writable: bool) -> None:
    tiers = (MemoryTier("16MiB"), DiskTier(tmp_path, "16MiB"), DictTier())
    for tier in tiers:
        store = Store(SCHEMA, TierStack((tier, TierPolicy(write=write))))  # type: ignore[arg-type]
        prompt, source = store.prompt(TOKENS, namespace(SPEC)), Reusing(writable=writable)
        assert store.save(prompt, source, points=[512, 1024]).dropped == 0
        source.spoil()
        assert store.flush()
        assert store.load(store.lookup(prompt), verify) == 1024
        assert store.stats().tiers[0].damaged == 0
        store.close()


def fresh() -> Bytes:
    return np.arange(100, dtype=np.uint8)


@pytest.mark.skipif(not COUNTS_LOCALS, reason="this Python does not count all references: everything is copied")
def test_what_nobody_else_has_is_not_copied() -> None:
    address = []

    def noted(array: Bytes) -> Bytes:
        address.append(array.ctypes.data)
        return array

    mine = owned_payload(noted(fresh()))
    assert mine.ctypes.data == address[-1]
    assert not mine.flags.writeable
    mine = owned_payload(noted(aligned(5000)))  # as `PagePayloads` gives them: a view of memory that nobody else has
    assert mine.ctypes.data == address[-1]
    mine = owned_payload(noted(np.frombuffer(bytes(100), np.uint8)))
    assert mine.ctypes.data == address[-1], "bytes never change"


def test_where_references_are_not_all_counted_whatever_could_change_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.14 on."""
    monkeypatch.setattr("kvweave.store.blob.COUNTS_LOCALS", False)
    address = []

    def noted(array: Bytes) -> Bytes:
        address.append(array.ctypes.data)
        return array

    assert owned_payload(noted(fresh())).ctypes.data != address[-1]
    assert owned_payload(noted(np.frombuffer(bytes(100), np.uint8))).ctypes.data == address[-1], "bytes never change"


def test_what_somebody_else_has_is_copied() -> None:
    kept = fresh()
    assert owned_payload(kept).ctypes.data != kept.ctypes.data
    assert owned_payload(kept[:50]).ctypes.data != kept.ctypes.data
    view = kept[:50]
    view.flags.writeable = False
    assert owned_payload(view).ctypes.data != kept.ctypes.data
    foreign = np.frombuffer(bytearray(100), np.uint8)
    assert owned_payload(foreign).ctypes.data != foreign.ctypes.data


def test_pages_of_one_shard_are_collected_by_one_call_a_batch() -> None:
    spec = hybrid()
    schema, calls = Schema.of(spec, parts=4), list[int]()
    made = rank(schema, spec, 1024, block_tokens=64)
    fill(schema, made, 1024 // schema.chunk_tokens)

    class Counting(HostPayloadCopier):
        def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
            calls.append(payload.nbytes)
            super().gather(copies, payload)

        def after_caller(self) -> Counting:
            return self

    def check(shard: Shard, chunk: int, found: Bytes) -> None:
        assert np.array_equal(found, truth(shard, chunk))

    pages = PagePayloads(schema, EngineMemory.of_plan(made.plan, made.pools), Counting(made.pools))
    with Store(schema, TierStack((DictTier(), TierPolicy()))) as store:
        prompt = store.prompt(range(1025), namespace(spec))
        assert store.save(prompt, pages.source(made.table)).stored > len(calls) == len(schema.shards)
        assert store.load(store.lookup(prompt), check) == 1024


def test_what_lies_in_memory_of_somebody_else_is_copied_however_it_is_cut() -> None:
    """A view of an array that nobody else has, over memory that somebody has."""
    memory = bytearray(100)
    mine = owned_payload(np.frombuffer(memory, np.uint8)[10:60])
    memory[:] = bytes([7]) * 100
    assert not mine.any()
