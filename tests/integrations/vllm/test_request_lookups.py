"""Lookups for an engine's requests: few operations, a bounded wait, and nothing held for those who left."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.integrations.keyed_pages import KeyedPool, page_prompt, page_schema
from kvweave.integrations.vllm.request_lookups import AT_ONCE, IDLE_WAIT_S, RequestLookups
from kvweave.store import BaseStore, DictTier, Namespace, Store, TierPolicy, TierStack

KEYS = [bytes([number]) * 32 for number in range(40)]


class WatchedStore(Store):
    """Counts operations and releases; answers when it may."""

    def __init__(self) -> None:
        super().__init__(page_schema([KeyedPool("page", 64)]), TierStack((DictTier(), TierPolicy(inline=True))))
        self.asked: list[int] = []
        self.released: list[Any] = []
        self.may_answer = threading.Event()

    def submit_lookup(self, prompts: Any, **more: Any) -> Any:
        self.asked.append(len(prompts))
        return super().submit_lookup(prompts, **more)

    def _lookup_all(self, *args: Any, **more: Any) -> Any:
        self.may_answer.wait(10)
        return super()._lookup_all(*args, **more)

    def release_later(self, hit: Any) -> None:
        self.released.append(hit)


@pytest.fixture
def store() -> Any:
    with WatchedStore() as made:
        yield made
        made.may_answer.set()


def begun(lookups: RequestLookups, count: int) -> list[Any]:
    return [lookups.begin(page_prompt([key], Namespace("m"))) for key in KEYS[:count]]


def finds(lookups: RequestLookups, lookup: Any) -> Any:
    while (found := lookups.result(lookup)) is None:
        time.sleep(0.001)
    return found


def test_requests_that_arrive_together_are_looked_up_together(store: WatchedStore) -> None:
    store.save(page_prompt(KEYS[20:21], Namespace("m")), lambda shard, _: np.zeros(shard.payload_bytes, np.uint8))
    lookups = RequestLookups(store, 1.0)
    mine = begun(lookups, 40)
    assert store.asked == []
    store.may_answer.set()
    lookups.step(is_idle=True)
    assert store.asked == [AT_ONCE, AT_ONCE, 40 - 2 * AT_ONCE]
    assert [finds(lookups, each).hit.position for each in mine] == [int(number == 20) for number in range(40)]


def test_the_stores_thread_finds_where_the_engine_can_resume_and_what_a_load_reads(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def load_sizes(self: Store, hit: Any, start: int = 0) -> Any:
        threads.append(threading.current_thread().name)
        return BaseStore.load_sizes(self, hit, start)

    monkeypatch.setattr(WatchedStore, "load_sizes", load_sizes)
    store.save(page_prompt(KEYS[:5], Namespace("m")), lambda shard, _: np.zeros(shard.payload_bytes, np.uint8))
    store.may_answer.set()
    lookups = RequestLookups(store, 1.0, alignment=3)
    found = finds(lookups, lookups.begin(page_prompt(KEYS[:7], Namespace("m"))))
    assert (found.hit.position, found.stored) == (3, 5)
    assert found.sizes == store.load_sizes(found.hit)
    assert threads[0].startswith("kvweave-lookups")


def test_an_idle_engine_waits_once_for_all_and_a_running_one_never(store: WatchedStore) -> None:
    lookups = RequestLookups(store, 1.0)
    mine = begun(lookups, 40)
    for is_idle in (True, False):
        lookups.step(is_idle=is_idle)
        began = time.monotonic()
        assert {lookups.result(each) for each in mine} == {None}
        spent = time.monotonic() - began
        assert spent < 10 * IDLE_WAIT_S, "40 times as long, if each request waited"
    store.may_answer.set()


def test_what_was_found_for_a_request_that_left_is_released(store: WatchedStore) -> None:
    lookups = RequestLookups(store, 1.0)
    left, stays, unsent = begun(lookups, 3)
    lookups.abandon(unsent)
    lookups.step(is_idle=False)
    lookups.abandon(left)
    lookups.step(is_idle=False)
    assert store.asked == [2]
    assert not store.released
    store.may_answer.set()
    found = finds(lookups, stays)
    lookups.step(is_idle=False)
    lookups.step(is_idle=False)
    (released,) = store.released
    assert released is not found.hit


def test_a_lookup_that_fails_raises_for_each_that_asked_and_for_nobody_that_left(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise StoreError("gone")

    monkeypatch.setattr(WatchedStore, "_lookup_all", broken)
    lookups = RequestLookups(store, 1.0)
    mine = begun(lookups, 3)
    for each in mine[:2]:
        with pytest.raises(StoreError):
            finds(lookups, each)
    lookups.abandon(mine[2])
    lookups.step(is_idle=True)
    assert not store.released
