"""The cascade: near before far, no request beyond its budget, and trouble in one tier is a miss in that tier."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from kvweave.errors import ReadOnly, StoreError, TierError
from kvweave.store import DictTier, MemoryTier, Shard, Store, TierPolicy, TierStack
from kvweave.store.breaker import CircuitBreaker
from kvweave.store.keys import Bytes, HashedPrompt
from kvweave.store.removals import FROM_NOW
from kvweave.store.tier import Blob, ChecksumObserver, whole
from kvweave.store.tier_stack import Budget
from tests.store.faults import SCHEMA, SPEC, TOKENS, keys_of, payload, replace, stored, verify
from tests.store.interrupts import interrupted
from tests.store.models import namespace

FAST = TierPolicy(inline=True, promote=True)
FAR = TierPolicy(deadline_s=0.15, backoff_s=0.001, cool_s=0.2)


class Troubled(DictTier):
    """A dictionary that hangs or fails when told to, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__("troubled")
        self.fine = threading.Event()
        self.fine.set()
        self.errors: list[Exception] = []
        self.half: list[Exception] = []
        """Raised by gets that have filled half of their buffers."""
        self.fails: dict[str, Exception] = {}
        self.asked: list[str] = []

    def _trouble(self, what: str) -> None:
        self.asked.append(what)
        self.fine.wait(10)
        if what in self.fails:
            raise self.fails[what]
        if self.errors:
            raise self.errors.pop()

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        self._trouble("contains")
        return super().contains(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        self._trouble("get")
        if self.half:
            super().get(keys[: len(keys) // 2], into[: len(keys) // 2])
            raise self.half.pop()
        return super().get(keys, into, observer)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        self._trouble("put")
        return super().put(keys, blobs)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._trouble("delete")
        return super().delete(keys)


@pytest.fixture
def far() -> Iterator[Troubled]:
    tier = Troubled()
    yield tier
    tier.fine.set()


Make = Callable[..., tuple[Store, HashedPrompt]]


@pytest.fixture
def make(far: Troubled) -> Iterator[Make]:
    """A store over a near tier and `far`, and a prompt."""
    stores = []

    def made(policy: TierPolicy = FAR, near: str = "4MiB") -> tuple[Store, HashedPrompt]:
        stores.append(Store(SCHEMA, TierStack((MemoryTier(near), FAST), (far, policy))))
        return stores[-1], stores[-1].prompt(TOKENS, namespace(SPEC))

    yield made
    far.fine.set()
    for store in stores:
        store.close()


def test_a_lookup_is_one_question_a_tier_and_none_where_all_is_near(far: Troubled, make: Make) -> None:
    store, prompt = make()
    assert store.lookup(prompt).position == 0
    assert far.asked == ["contains"]
    store.save(prompt, payload)
    far.asked.clear()
    assert store.lookup(prompt).position == 1024
    assert far.asked == ["contains"]  # about windows and states that were not kept
    store.save(prompt, payload, points=range(256, 1025, 256))
    far.asked.clear()
    assert store.lookup(prompt).position == 1024
    assert far.asked == []


def test_what_only_the_far_tier_has_is_loaded_from_it_and_kept_near(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make()
    assert store.load(store.lookup(prompt), verify) == 1024
    far.asked.clear()
    assert store.load(store.lookup(prompt), verify) == 1024
    assert "get" not in far.asked
    near, distant = store.stats().tiers
    assert near.hits == distant.hits == near.stored
    assert near.misses == 0, "it was not asked for what the lookup had not found there"


def test_a_tier_that_hangs_costs_a_request_its_deadline_and_no_more(far: Troubled, make: Make) -> None:
    store, prompt = make()
    store.save(prompt, payload)
    far.fine.clear()
    for _ in range(6):
        began = time.monotonic()
        assert store.load(store.lookup(prompt), verify) == 1024  # all of it is near
        assert time.monotonic() - began < 5, "it waited until the tier no longer hangs"
    assert store.stats().tiers[1].late >= 1
    assert store.stats().tiers[1].open
    asked = len(far.asked)
    store.lookup(prompt)
    assert len(far.asked) == asked, "it is not even asked any more"


def test_a_request_waits_for_its_budget_and_no_longer(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(deadline_s=5))
    far.fine.clear()
    began = time.monotonic()
    assert store.lookup(prompt, budget_s=0.1).position == 0
    assert store.save(prompt, payload, budget_s=0.1).dropped == 0  # the near tier has it
    assert time.monotonic() - began < 2


def test_requests_in_a_hurry_do_not_close_a_tier_that_is_well(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(deadline_s=5))
    far.fine.clear()
    for _ in range(5):
        store.lookup(prompt, budget_s=0.1)
    far.fine.set()
    stats = store.stats().tiers[1]
    assert (stats.late, stats.open) == (5, False)


def test_a_payload_that_is_changed_before_a_tier_has_it_is_kept_as_it_was(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(write="back", deadline_s=5))
    far.fine.clear()
    given = []

    def early(shard: Shard, chunk: int) -> Bytes:
        given.append(payload(shard, chunk).copy())
        return given[-1]

    store.save(prompt, early)
    for array in given:
        np.invert(array, out=array)
    far.fine.set()
    assert store.flush()
    store.tier_stack.executors[0].tier.clear()
    hit = store.lookup(prompt)
    assert hit.position == 1024
    assert store.load(hit, verify) == 1024
    assert store.stats().tiers[1].damaged == 0


def test_a_load_that_hangs_half_way_returns_what_can_be_had(far: Troubled, make: Make) -> None:
    store, prompt = make()
    store.save(prompt, payload, points=[512, 1024])
    near = store.tier_stack.executors[0].tier
    near.delete(keys_of(prompt, "state", 3))
    hit = store.lookup(prompt)
    assert hit.position == 1024
    far.fine.clear()
    began = time.monotonic()
    assert store.load(hit, verify) == 512
    assert time.monotonic() - began < 1.5


def test_many_batches_of_a_tier_that_hangs_cost_one_deadline_and_not_one_each(
    far: Troubled, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.store.batches.BATCH_BYTES", 1)
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make(TierPolicy(deadline_s=0.3, failures=100))
    hit = store.lookup(prompt)
    far.fine.clear()
    began = time.monotonic()
    assert store.load(hit, verify) == 0
    assert time.monotonic() - began < 1.5


def test_a_load_asks_a_tier_for_all_blobs_at_once_and_forgets_damaged_ones_at_once(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload)
    damaged = [*keys_of(prompt, "full", 1), *keys_of(prompt, "full", 3)]
    for key in damaged:
        replace(far, key, b"X" + stored(far, key)[1:])
    store, _ = make()
    hit = store.lookup(prompt)
    far.asked.clear()
    assert store.load(hit, verify) == 0
    assert far.asked == ["get", "delete"]
    assert store.stats().tiers[1].damaged == len(damaged)
    assert not far.contains(damaged).any()


def test_what_came_with_a_damaged_blob_is_had_though_the_tier_cannot_forget_it(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload, points=[512, 1024])
    key = keys_of(prompt, "full", 3)[0]
    replace(far, key, b"X" + stored(far, key)[1:])
    store, _ = make()
    hit = store.lookup(prompt)
    far.fails = {"delete": TierError("it cannot be written")}
    assert store.load(hit, verify) == 512
    assert (store.stats().tiers[1].damaged, store.stats().tiers[1].failed) == (1, 0)


def test_a_batch_that_fails_half_way_is_asked_for_again(far: Troubled, make: Make) -> None:
    """What was written into its buffers until then is nobody's."""
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make()
    hit = store.lookup(prompt)
    far.half, far.asked = [TierError("lost the line")], []
    assert store.load(hit, verify) == 1024
    assert far.asked == ["get", "get"]
    assert store.stats().tiers[1].retried == 1


def test_an_answer_that_comes_late_touches_nothing(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make()
    hit = store.lookup(prompt)
    far.fine.clear()
    seen: list[Bytes] = []
    assert store.load(hit, lambda shard, chunk, data: seen.append(data)) == 0
    far.fine.set()
    time.sleep(0.1)
    assert seen == []


def test_a_tier_that_was_away_is_used_again_when_it_is_back(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(deadline_s=0.5, retries=0, cool_s=0.05))
    far.errors = [TierError("away")] * 3
    for _ in range(3):
        store.lookup(prompt)
    assert store.stats().tiers[1].open
    assert store.stats().tiers[1].failed == 3
    time.sleep(0.06)
    store.save(prompt, payload)
    assert not store.stats().tiers[1].open
    assert len(far.blobs)


def test_a_passing_error_is_tried_again(far: Troubled, make: Make) -> None:
    store, prompt = make()
    far.errors = [TierError("once"), OSError("twice")]
    store.save(prompt, payload)
    assert len(far.blobs) == store.stats().tiers[0].stored
    stats = store.stats().tiers[1]
    assert (stats.retried, stats.failed, stats.open) == (2, 0, False)


def test_a_tier_that_refuses_writes_is_still_read(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make(near="1MiB")
    for number in range(5):
        far.errors = []
        unseen = store.prompt(TOKENS + number + 1, namespace(SPEC))
        original = far.put
        far.put = _refuse  # type: ignore[method-assign]
        store.save(unseen, payload)
        far.put = original  # type: ignore[method-assign]
    stats = store.stats().tiers[1]
    assert (stats.failed, stats.retried, stats.last_error) == (3, 0, "no writes")
    assert store.load(store.lookup(prompt), verify) == 1024


def _refuse(keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
    raise ReadOnly("no writes")


def test_write_back_answers_at_once_and_flush_waits(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(write="back", deadline_s=5))
    far.fine.clear()
    store.tier_stack.missing = lambda keys, budget: np.ones(len(keys), bool)  # type: ignore[method-assign]
    saved = store.save(prompt, payload)
    assert saved.dropped == 0
    assert (len(far.blobs), store.stats().tiers[1].late) == (0, 0), "the save waited for a write"
    far.fine.set()
    assert store.flush(5)
    assert len(far.blobs) == saved.stored


def test_write_back_is_bounded_and_what_finds_no_place_is_counted(far: Troubled) -> None:
    policy = TierPolicy(write="back", deadline_s=0.02, workers=1, queue_jobs=2, failures=100)
    tier_stack = TierStack((far, policy))
    far.fine.clear()
    for number in range(8):
        tier_stack.put([bytes([number]) * 48], [whole(b"x")], Budget.of(None))
    assert tier_stack.stats()[0].dropped >= 5
    far.fine.set()
    assert tier_stack.flush(5)
    assert len(far.blobs) == 8 - tier_stack.stats()[0].dropped
    tier_stack.close()


def test_damage_in_the_near_tier_is_healed_by_the_far_one(make: Make) -> None:
    store, prompt = make()
    store.save(prompt, payload)
    near = store.tier_stack.executors[0].tier
    key = keys_of(prompt, "full", 1)[0]
    replace(near, key, stored(near, key)[:-1] + b"?")
    assert store.load(store.lookup(prompt), verify) == 1024
    assert [executor.damaged for executor in store.stats().tiers] == [1, 0]
    assert near.contains([key]).all()  # promoted again


def test_a_save_that_is_interrupted_anywhere_leaves_a_memory_tier_whole() -> None:
    tier = MemoryTier("256KiB")  # less than two prompts: each save evicts
    with Store(SCHEMA, TierStack((tier, TierPolicy(inline=True)))) as store:
        prompts = [store.prompt([int(token) + 1000 * i for token in TOKENS], namespace(SPEC)) for i in range(3)]
        after = 0

        def save() -> None:
            store.save(prompts[after % 3], payload)

        while interrupted(save, after) or interrupted(save, after + 1):  # one in a generator's `close` is ignored
            after += 1 + after // 8
        store.flush(10)
        entries = [
            (int(tier._catalog.starts[slot]), int(tier._catalog.sizes[slot])) for slot in tier._catalog.slot_of.values()
        ]
        runs = sorted([*entries, *tier._extents._size_at.items()])
        ends = [start + size for start, size in runs]
        assert [start for start, _ in runs] == [0, *ends[:-1]], "every byte is free or in one entry"
        assert (ends[-1], tier._moving) == (tier._extents.capacity, 0)
        assert after > 100


def test_prefetch_brings_near_what_a_hit_will_need(far: Troubled, make: Make) -> None:
    other, prompt = make()
    other.save(prompt, payload)
    store, _ = make()
    assert store.prefetch(store.lookup(prompt)).result(5) == 1024
    far.asked.clear()
    assert store.load(store.lookup(prompt), verify) == 1024
    assert "get" not in far.asked


def test_four_times_the_near_tier_at_once_is_all_stored_somewhere(far: Troubled, make: Make) -> None:
    store, _ = make(near="1MiB")
    prompts = [store.prompt(TOKENS + number, namespace(SPEC)) for number in range(40)]
    assert all(store.save(prompt, payload).dropped == 0 for prompt in prompts)
    assert store.stats().tiers[0].dropped == 0
    assert all(store.load(store.lookup(prompt), verify) == 1024 for prompt in prompts)


def test_a_tier_that_hangs_while_it_closes_is_abandoned_in_time() -> None:
    class Clinging(DictTier):
        def close(self) -> None:
            assert fine.wait(30)

    fine = threading.Event()
    stack, began = TierStack((Clinging(), FAR)), time.monotonic()
    assert not stack.close(0.1)
    assert time.monotonic() - began < 5
    fine.set()


def test_an_error_of_a_tier_that_closes_is_raised() -> None:
    class Failing(DictTier):
        def close(self) -> None:
            raise TierError("the disk is gone")

    with pytest.raises(TierError, match="the disk is gone"):
        TierStack((Failing(), FAR)).close(0.1)


def test_a_cascade_of_nothing_is_an_error() -> None:
    with pytest.raises(StoreError, match="at least one"):
        TierStack()


def test_a_breaker_opens_waits_and_tries_one() -> None:
    now = [0.0]
    breaker = CircuitBreaker(2, 10.0, lambda: now[0])
    breaker.failed()
    assert breaker.passes()
    breaker.failed()
    assert not breaker.passes()
    now[0] = 10.0
    assert [breaker.passes(), breaker.passes()] == [True, False]
    breaker.succeeded()
    assert breaker.passes()


@pytest.mark.parametrize("write", ["through", "back"])
def test_what_a_tier_fails_to_write_is_counted_as_dropped_and_told(
    far: Troubled, write: Literal["through", "back"]
) -> None:
    with Store(SCHEMA, TierStack((far, dataclasses.replace(FAR, write=write, retries=0)))) as store:
        prompt, before = store.prompt(TOKENS, namespace(SPEC)), store.submit_removed(FROM_NOW).result(10)
        far.fails["put"] = TierError("a cable is gone")
        saved = store.save(prompt, payload)
        assert store.flush()
        tier = store.stats().tiers[0]
        assert tier.drops == {"failed": saved.stored + saved.dropped}
        assert tier.stored == 0
        told = store.submit_removed(before.number).result(10)
        assert len(told.keys) == tier.dropped


class Unreadable(Troubled):
    """Its index answers at once; nothing can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.fails["get"] = TierError("no sector can be read")

    def contains_now(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return self.contains(keys)


@pytest.mark.parametrize("tier", [Troubled, Unreadable])
def test_nothing_is_found_in_a_tier_that_cannot_be_read_now(tier: type[Troubled]) -> None:
    far = tier()
    far.fails["get"] = TierError("no sector can be read")
    with Store(SCHEMA, TierStack((far, TierPolicy(cool_s=60, backoff_s=0.001)))) as store:
        prompt = store.prompt(TOKENS, namespace(SPEC))
        store.save(prompt, payload)
        hits = [store.lookup(prompt)]
        while store.load(hits[-1], verify) == 0 and not store.stats().tiers[0].open:
            hits.append(store.lookup(prompt))
        assert hits[-1].position == 1024
        far.asked.clear()
        assert store.lookup(prompt).position == 0
        assert far.asked == []


def test_a_failure_is_not_tried_again_behind_the_deadline(far: Troubled) -> None:
    far.fails["contains"] = TierError("no")
    with Store(SCHEMA, TierStack((far, TierPolicy(deadline_s=0.2, backoff_s=1.0)))) as store:
        store.lookup(store.prompt(TOKENS, namespace(SPEC)))
        assert (far.asked, store.stats().tiers[0].retried) == (["contains"], 0)


def test_reads_that_nobody_waits_for_any_more_never_begin(far: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.store.batches.BATCH_BYTES", 1)
    stack = TierStack((far, TierPolicy(workers=1, deadline_s=5)))
    with Store(SCHEMA, stack) as store:
        prompt = store.prompt(TOKENS, namespace(SPEC))
        store.save(prompt, payload)
        hit = store.lookup(prompt)
        far.fine.clear()
        (executor,) = stack.executors
        busy = [executor.start(executor.reads, lambda: far.fine.wait(10)) for _ in range(2)]
        far.asked.clear()
        assert store.load(hit, verify, budget_s=0.1) == 0
        far.fine.set()
        assert all(each is not None and each.result(10) for each in busy)
        executor.start(executor.reads, lambda: None).result(10)  # type: ignore[union-attr]
        assert far.asked == []


def test_a_lookup_that_was_not_answered_is_no_miss(far: Troubled, make: Make) -> None:
    store, prompt = make(TierPolicy(deadline_s=5))
    far.fine.clear()
    assert store.lookup(prompt, budget_s=0.05).position == 0
    assert (store.stats().unanswered, [tier.misses for tier in store.stats().tiers]) == (1, [0, 0])
    far.fine.set()
    assert store.lookup(prompt).position == 0
    assert [tier.misses > 0 for tier in store.stats().tiers] == [True, True]


def test_what_one_tier_has_lost_is_stored_there_again(far: Troubled, make: Make) -> None:
    store, prompt = make()
    count = store.save(prompt, payload).stored
    far.clear()
    assert store.save(prompt, payload).stored == count
    assert len(far.blobs) == count
