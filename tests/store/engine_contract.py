"""What an engine wants of every store, embedded or behind a daemon: nothing waits, nothing comes twice, hits travel.

The model has full attention, a window of 300 tokens and a state; chunks are of 256 tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, cast

import numpy as np
import pytest

from kvweave.errors import OperationCancelled, OperationTimeout, StoreError
from kvweave.operation import AnyOperation, OperationState
from kvweave.store import BaseStore, HashedPrompt, Operation, Saved, Shard
from kvweave.store.keys import Bytes
from kvweave.store.keys import prompt as make_prompt
from tests.store.models import hybrid, namespace, truth

SPEC = hybrid()
WAIT_S = 30.0


def prompt_of(store: BaseStore[Any], first: int = 0, tokens: int = 1025) -> HashedPrompt:
    """A prompt of its own for every number."""
    return store.prompt([5000 + first, *range(1, tokens)], namespace(SPEC))


def formed(form: Callable[[Bytes], Any], shard: Shard, chunk: int) -> Any:
    """The truth, as another array."""
    return form(truth(shard, chunk))


class Taken:
    """A sink that checks, notes what came, and can be told to wait."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int, int]] = []
        self.go_on, self.began = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, shard: Shard, chunk: int, payload: Bytes) -> None:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        assert (payload == truth(shard, chunk)).all(), (shard.tag, chunk)
        self.pieces.append((shard.tag, shard.part, chunk))

    def chunks(self, tag: str) -> list[int]:
        return sorted({chunk for each, _, chunk in self.pieces if each == tag})


def polled(store: BaseStore[Any], number: int) -> list[AnyOperation]:
    """So many that have ended, in whatever order."""
    ended: list[AnyOperation] = []
    until = time.monotonic() + WAIT_S
    while len(ended) < number and time.monotonic() < until:
        ended += store.poll()
        time.sleep(0.001)
    assert len(ended) == number
    return ended


class EngineContract:
    """Tests inherit it, and give `store`."""

    # ---- mistakes have names

    @pytest.mark.parametrize("points", [[1026], [256, 100_000], [-256]])
    def test_a_point_that_the_prompt_does_not_have_is_an_error(self, store: BaseStore[Any], points: list[int]) -> None:
        prompt = prompt_of(store)
        with pytest.raises(StoreError, match="the prompt has 1025 tokens"):
            store.save(prompt, truth, points=points)
        with pytest.raises(StoreError, match="the prompt has 1025 tokens"):
            store.submit_save(prompt, truth, points=points).result(WAIT_S)
        assert store.lookup(prompt).position == 0

    @pytest.mark.parametrize("points", [[100], [256, 1000]])
    def test_a_point_within_a_chunk_is_an_error(self, store: BaseStore[Any], points: list[int]) -> None:
        prompt, words = prompt_of(store), f"points .{points[-1]}.: chunks are of 256 tokens"
        for call in (store.save, store.gather, lambda *a, **k: store.submit_save(*a, **k).result(WAIT_S)):
            with pytest.raises(StoreError, match=words):
                call(prompt, truth, points=points)
        assert store.lookup(prompt).position == 0

    @pytest.mark.parametrize("start", [-1, 1026, 5000])
    def test_a_start_that_the_prompt_does_not_have_is_an_error(self, store: BaseStore[Any], start: int) -> None:
        prompt, words = prompt_of(store), f"start {start}: the prompt has 1025 tokens"
        for call in (store.save, store.gather, lambda *a, **k: store.submit_save(*a, **k).result(WAIT_S)):
            with pytest.raises(StoreError, match=words):
                call(prompt, truth, start=start)
        store.save(prompt, truth)
        hit, sink = store.lookup(prompt), Taken()
        for load in (store.load, lambda *a, **k: store.submit_load(*a, **k).result(WAIT_S)):
            with pytest.raises(StoreError, match=words):
                load(hit, sink, start=start)
        assert not sink.pieces
        assert store.load(hit, sink) == 1024, "the hit is what it was"

    def test_a_refused_ticket_is_a_miss_wherever_a_load_starts(self, store: BaseStore[Any]) -> None:
        assert store.load(store.redeem(b"none"), Taken(), start=512) == 512

    @pytest.mark.parametrize("shards", [[0, 99], [-1]])
    def test_shards_that_no_model_has_are_not_taken_for_loaded(self, store: BaseStore[Any], shards: list[int]) -> None:
        prompt = prompt_of(store)
        with pytest.raises(StoreError, match="this store's are 0 to"):
            store.save(prompt, truth, shards=shards)
        store.save(prompt, truth)
        with pytest.raises(StoreError, match="this store's are 0 to"):
            store.load(store.lookup(prompt), Taken(), shards=shards)
        with pytest.raises(StoreError, match="this store's are 0 to"):
            store.submit_load(store.lookup(prompt), Taken(), shards=shards).result(WAIT_S)

    def test_a_prompt_that_is_hashed_for_other_chunks_is_an_error(self, store: BaseStore[Any]) -> None:
        other = make_prompt(np.arange(1025), namespace(SPEC), 64)
        for call in (lambda: store.lookup(other), lambda: store.save(other, truth), lambda: store.gather(other, truth)):
            with pytest.raises(StoreError, match="in chunks of 64 tokens, the store has 256"):
                call()

    def test_a_source_may_give_an_array_of_any_type_shape_and_stride(self, store: BaseStore[Any]) -> None:
        forms: list[Callable[[Bytes], Any]] = [
            lambda payload: payload.view(np.int8),
            lambda payload: payload.view(np.float32).reshape(2, -1),
            lambda payload: np.repeat(payload, 2)[::2],
        ]
        for number, form in enumerate(forms):
            prompt, sink = prompt_of(store, number), Taken()
            saved = store.save(prompt, partial(formed, form))
            assert (saved.dropped, store.load(store.lookup(prompt), sink)) == (0, 1024)
            assert sink.chunks("full") == [0, 1, 2, 3]

    @pytest.mark.parametrize("given", [None, b"bytes", np.zeros(7, np.uint8), np.full(512, None)])
    def test_a_source_that_gives_something_else_is_an_error_of_that_save_alone(
        self, store: BaseStore[Any], given: Any
    ) -> None:
        with pytest.raises(StoreError, match=r"gave (a NoneType|a bytes|7 bytes|objects), an array of \d+ is needed"):
            store.save(prompt_of(store), lambda *_: given)
        assert store.save(prompt_of(store), truth).dropped == 0

    @pytest.mark.parametrize("seconds", [inf, 1e12, np.float32(60)])
    def test_a_budget_may_be_endless(self, store: BaseStore[Any], seconds: float) -> None:
        prompt = prompt_of(store)
        assert store.save(prompt, truth, budget_s=seconds).dropped == 0
        assert store.load(store.lookup(prompt, budget_s=seconds), Taken(), budget_s=seconds) == 1024
        assert store.submit_lookup([prompt], budget_s=seconds).result(seconds)[0].position == 1024
        assert store.prefetch(store.lookup(prompt), budget_s=seconds).result(WAIT_S) == 1024
        assert store.stats(budget_s=seconds).lookups == 3
        assert store.flush(float(seconds))

    @pytest.mark.parametrize("form", [iter, lambda numbers: [number + 0.5 for number in numbers], str])
    def test_numbers_that_can_be_read_once_only_or_are_none_are_errors(
        self, store: BaseStore[Any], form: Callable[[list[int]], Any]
    ) -> None:
        prompt, words = prompt_of(store), "must be a list of whole numbers, got"
        for calls in ({"shards": form([0, 1])}, {"points": form([512])}):
            with pytest.raises(StoreError, match=words):
                store.save(prompt, truth, **calls)
        store.save(prompt, truth)
        hit = store.lookup(prompt)
        loads: list[Callable[[Any], object]] = [
            lambda shards: store.load(hit, Taken(), shards=shards),
            lambda shards: store.submit_load(hit, Taken(), shards=shards).result(WAIT_S),
            lambda shards: store.prefetch(hit, shards=shards).result(WAIT_S),
        ]
        for load in loads:
            with pytest.raises(StoreError, match=words):
                load(form([0, 1]))

    def test_numbers_may_come_as_arrays_and_sets(self, store: BaseStore[Any]) -> None:
        prompt, sink, few, every = prompt_of(store), Taken(), Taken(), np.arange(len(store.schema.shards))
        shards, points, first = (cast("list[int]", each) for each in (every, np.array([512, 1024]), {0}))
        saved = store.save(prompt, truth, points=points, shards=shards)
        assert saved == store.save(prompt_of(store, 1), truth, points=[512, 1024])
        assert store.load(store.lookup(prompt), sink, shards=shards) == 1024
        assert sink.chunks("full") == [0, 1, 2, 3]
        assert store.load(store.lookup(prompt), few, shards=first) == 1024
        assert {(tag, part) for tag, part, _ in few.pieces} == {("full", 0)}

    def test_tokens_are_no_prompt(self, store: BaseStore[Any]) -> None:
        tokens: Any = [1, 2, 3]
        for call in (lambda: store.lookup(tokens), lambda: store.save(tokens, truth)):
            with pytest.raises(StoreError, match=r"what `store.prompt` makes of tokens, not list"):
                call()

    def test_a_hit_is_shortened_to_multiples_of_one_at_least(self, store: BaseStore[Any]) -> None:
        store.save(prompt := prompt_of(store), truth)
        with pytest.raises(StoreError, match="a multiple of 0: 1 at least"):
            store.shorten(store.lookup(prompt), 600, 0)

    # ---- nothing waits

    def test_everything_submitted_is_reported_once_with_its_request(self, store: BaseStore[Any]) -> None:
        prompts = [prompt_of(store, number) for number in range(3)]
        for number, prompt in enumerate(prompts):
            store.submit_save(prompt, truth, points=[512, 1024], request=("save", number))
        saves = polled(store, 3)
        assert sorted(each.request for each in saves) == [("save", number) for number in range(3)]  # type: ignore[attr-defined]
        assert {each.state for each in saves} == {OperationState.DONE}
        assert store.poll() == []
        lookup = store.submit_lookup([*prompts, prompt_of(store, 9)], request="all")
        assert polled(store, 1) == [lookup]
        hits = lookup.result()
        assert [hit.position for hit in hits] == [1024, 1024, 1024, 0]
        sinks = [Taken() for _ in hits]
        for hit, sink in zip(hits, sinks, strict=True):
            store.submit_load(hit, sink, request=hit.position)
        loads = polled(store, 4)
        assert sorted(each.request for each in loads) == [0, 1024, 1024, 1024]  # type: ignore[attr-defined]
        assert all(each.result() == each.request and not each.failed for each in loads)  # type: ignore[attr-defined]
        assert [sink.chunks("full") for sink in sinks] == [[0, 1, 2, 3]] * 3 + [[]]
        assert store.stats().operations == 0

    def test_what_is_to_be_done_with_hits_is_done_in_the_stores_thread(self, store: BaseStore[Any]) -> None:
        prompt = prompt_of(store)
        store.save(prompt, truth)
        lookup = store.submit_lookup([prompt], then=lambda hit: (hit.position, threading.current_thread()))
        ((position, thread),) = lookup.result(WAIT_S)
        assert position == 1024
        assert thread is not threading.current_thread()

    def test_to_submit_and_to_poll_take_no_time_whatever_the_sink_does(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[1024])
        sink.go_on.clear()
        load, *others = [store.submit_load(store.lookup(prompt), sink) for _ in range(6)]  # more than there are threads
        assert sink.began.wait(WAIT_S)
        began = time.monotonic()
        assert store.poll() == []
        lookup = store.submit_lookup([prompt])
        assert time.monotonic() - began < WAIT_S / 2
        assert lookup.result(WAIT_S)[0].position == 1024, "a lookup waited for a load"
        assert load.state is OperationState.PENDING
        with pytest.raises(OperationTimeout, match="not done after"):
            load.wait(0.01)
        sink.go_on.set()
        assert [each.result(WAIT_S) for each in (load, *others)] == [1024] * 6

    def test_saves_beyond_a_bound_have_ended_on_return_and_are_dropped(self, store: BaseStore[Any]) -> None:
        goes_on, saves = threading.Event(), list[Operation[Saved]]()

        def source(shard: Shard, chunk: int) -> Bytes:
            assert goes_on.wait(WAIT_S)
            return truth(shard, chunk)

        while not saves or not saves[-1].is_done:
            saves.append(store.submit_save(prompt_of(store), source, points=[256]))
            assert len(saves) < 256 + 10, "they wait without bound"
        last = saves.pop()
        assert last.result(WAIT_S) == Saved(dropped=len(last.failed))
        assert last.failed
        goes_on.set()
        for save in saves[3:]:
            save.cancel()
        for save in saves[:3]:
            save.result(WAIT_S)

    def test_what_was_waited_for_is_not_reported_again(self, store: BaseStore[Any]) -> None:
        assert store.submit_save(prompt_of(store), truth).result(WAIT_S).dropped == 0
        assert store.poll() == []

    def test_a_load_that_is_cancelled_ends_and_writes_no_more(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[1024])
        hit = store.lookup(prompt)
        sink.go_on.clear()
        load = store.submit_load(hit, sink)
        assert sink.began.wait(WAIT_S)
        assert load.cancel()
        sink.go_on.set()
        with pytest.raises(OperationCancelled):
            load.result(WAIT_S)
        written = len(sink.pieces)
        assert load.state is OperationState.CANCELLED
        assert (
            0 < len(load.failed) + written <= len([*store._needs(1024, range(len(store.schema.shards)), hit.present)])
        )
        assert load.failed
        time.sleep(0.02)
        assert len(sink.pieces) == written
        assert store.load(store.lookup(prompt), Taken()) == 1024

    def test_what_was_not_begun_is_cancelled_at_once(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[1024])
        sink.go_on.clear()
        running = [store.submit_load(store.lookup(prompt), sink) for _ in range(3)]
        queued = store.submit_save(prompt_of(store, 1), truth)
        assert queued.cancel()
        assert queued.state is OperationState.CANCELLED
        assert queued.is_gathered
        sink.go_on.set()
        assert [each.result(WAIT_S) for each in running] == [1024] * 3
        assert not running[0].cancel(), "it is done"

    def test_an_error_of_the_sink_or_the_source_is_the_operations_own(self, store: BaseStore[Any]) -> None:
        def broken(*_: object) -> Any:
            raise RuntimeError("the engine's own")

        save = store.submit_save(prompt_of(store), broken)
        with pytest.raises(RuntimeError, match="the engine's own"):
            save.result(WAIT_S)
        assert save.state is OperationState.FAILED
        assert store.save(prompt_of(store), truth).dropped == 0
        hit = store.lookup(prompt_of(store))
        load = store.submit_load(hit, broken)
        with pytest.raises(RuntimeError, match="the engine's own"):
            load.result(WAIT_S)
        assert len(load.failed) == len([*store._needs(1024, range(len(store.schema.shards)), hit.present)])
        assert store.load(store.lookup(prompt_of(store)), Taken()) == 1024

    def test_a_row_is_there_before_all_are(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[1024])
        seen, given = list[list[bool]](), list[list[bool]]()
        load: Operation[int] | None = None
        submitted, hit = threading.Event(), store.lookup(prompt)
        numbers = range(len(store.schema.shards))
        left = {*store._needs(1024, numbers, hit.present)}

        def watched(shard: Shard, chunk: int, payload: Bytes) -> None:
            assert submitted.wait(WAIT_S)
            assert load is not None
            seen.append([load.has_shard(number) for number in numbers])
            given.append([all(number != piece[0] for piece in left) for number in numbers])
            left.remove((store.schema.shards.index(shard), chunk))
            sink(shard, chunk, payload)

        load = store.submit_load(hit, watched)
        submitted.set()
        assert load.result(WAIT_S) == 1024
        assert seen == given
        assert sum(seen[-1]) == len(store.schema.shards) - 1
        assert all(load.has_shard(number) for number in numbers)

    def test_shards_come_in_the_order_in_which_they_are_named(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[1024])
        last_first = [*range(len(store.schema.shards))][::-1]
        assert store.load(store.lookup(prompt), sink, shards=last_first) == 1024
        named = [(store.schema.shards[number].tag, store.schema.shards[number].part) for number in last_first]
        assert [*dict.fromkeys((tag, part) for tag, part, _ in sink.pieces)] == named

    # ---- in two phases

    def test_gathered_memory_may_be_used_again_before_the_commit(self, store: BaseStore[Any]) -> None:
        prompt, scratch = prompt_of(store), np.empty(1 << 20, np.uint8)

        def source(shard: Shard, chunk: int) -> Bytes:
            scratch[: shard.payload_bytes] = truth(shard, chunk)
            return scratch[: shard.payload_bytes]

        gathered = store.gather(prompt, source, points=[1024])
        scratch[:] = 0xEE
        assert store.lookup(prompt).position == 0, "visible before its commit"
        saved = gathered.commit()
        assert (saved.dropped, gathered.failed) == (0, ())
        assert store.load(store.lookup(prompt), Taken()) == 1024
        assert store.gather(prompt, source, points=[1024]).commit() == Saved(present=saved.stored)

    def test_what_was_gathered_and_not_committed_is_given_back(self, store: BaseStore[Any]) -> None:
        prompt = prompt_of(store)
        with store.gather(prompt, truth, points=[1024]) as gathered:
            pass
        assert gathered.commit().stored == 0
        assert store.lookup(prompt).position == 0
        assert store.save(prompt, truth, points=[1024]).dropped == 0

    def test_a_save_says_when_its_source_is_free(self, store: BaseStore[Any]) -> None:
        go_on, began = threading.Event(), threading.Event()

        def source(shard: Shard, chunk: int) -> Bytes:
            began.set()
            assert go_on.wait(WAIT_S)
            return truth(shard, chunk)

        save = store.submit_save(prompt_of(store), source, points=[1024])
        assert began.wait(WAIT_S)
        assert not save.is_gathered
        go_on.set()
        assert save.result(WAIT_S).dropped == 0
        assert save.is_gathered

    def test_a_source_is_free_only_when_the_last_batch_is_copied(
        self, store: BaseStore[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.one_by_one(monkeypatch)
        free: list[bool] = []
        submitted, save = threading.Event(), None

        def source(shard: Shard, chunk: int) -> Bytes:
            assert submitted.wait(WAIT_S)
            assert save is not None
            free.append(save.is_gathered)
            return truth(shard, chunk)

        save = store.submit_save(prompt_of(store), source, points=[1024])
        submitted.set()
        assert save.result(WAIT_S).dropped == 0
        assert len(free) > 1
        assert not any(free)

    def one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every piece be a batch of its own."""
        raise NotImplementedError

    # ---- only what is lacking

    @pytest.mark.parametrize(
        ("start", "full", "window", "state"),
        [
            (0, [0, 1, 2, 3], [2, 3], [3]),
            (256, [1, 2, 3], [2, 3], [3]),
            (700, [2, 3], [2, 3], [3]),
            (768, [3], [3], [3]),
            (1023, [3], [3], [3]),
            (1024, [], [], []),
            (1025, [], [], []),
        ],
    )
    def test_a_load_from_a_position_brings_what_lies_behind_it(
        self, store: BaseStore[Any], start: int, full: list[int], window: list[int], state: list[int]
    ) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[512, 1024])
        assert store.load(store.lookup(prompt), sink, start=start) == max(start, 1024)
        assert [sink.chunks(tag) for tag in ("full", "window", "state")] == [full, window, state]

    def test_a_load_that_shortens_never_falls_behind_its_start(self, store: BaseStore[Any]) -> None:
        """The first chunk is lost; the caller has it, so the hit stands. Without a start, nothing does."""
        prompt = prompt_of(store)
        store.save(prompt, truth, points=[512, 1024])
        hit = store.lookup(prompt, **self.without_lease())
        self.lose(store, prompt, 0)
        assert store.load(hit, Taken(), start=256) == 1024
        assert store.load(hit, Taken(), start=0) == 0
        self.lose(store, prompt, 3)
        assert store.load(hit, Taken(), start=300) == 512
        assert store.load(hit, Taken(), start=600) == 600

    def test_a_shorter_hit_counts_what_the_caller_has(self, store: BaseStore[Any]) -> None:
        """At 768 the window needs chunks 1 and 2, of which the store never had the first."""
        prompt, sink = prompt_of(store), Taken()
        states = [number for number, shard in enumerate(store.schema.shards) if shard.tag == "state"]
        store.save(prompt, truth, points=[1024])
        store.save(prompt, truth, points=[768], shards=states)
        hit = store.lookup(prompt, **self.without_lease())
        self.lose(store, prompt, 3)
        assert store.load(hit, sink, start=512) == 768
        assert [sink.chunks(tag) for tag in ("full", "window", "state")] == [[2], [2], [2]]
        assert store.load(hit, Taken(), start=0) == 0

    def without_lease(self) -> dict[str, Any]:
        return {}

    def lose(self, store: BaseStore[Any], prompt: HashedPrompt, chunk: int) -> None:
        """Make the store forget a chunk, behind its back."""
        raise NotImplementedError

    # ---- growing

    def test_a_prompt_that_grew_is_saved_from_where_it_was(self, store: BaseStore[Any]) -> None:
        asked: list[tuple[str, int]] = []

        def source(shard: Shard, chunk: int) -> Bytes:
            asked.append((shard.tag, chunk))
            return truth(shard, chunk)

        prompt = store.prompt(range(600), namespace(SPEC))
        first = store.save(prompt, source, points=[512])
        asked.clear()
        prompt = prompt.extend(range(600, 1025))
        second = store.save(prompt, source, points=[1024], start=512)
        assert second == Saved(stored=second.stored), "old pieces were asked about"
        assert {chunk for _, chunk in asked} == {2, 3}
        assert first.stored
        assert store.load(store.lookup(store.prompt(range(1025), namespace(SPEC))), Taken()) == 1024

    def test_prompts_of_foreign_digests_are_saved_and_found(self, store: BaseStore[Any]) -> None:
        def prompt(tenant: str = "") -> HashedPrompt:
            digests = [number.to_bytes(32, "little") for number in range(16)]
            here = namespace(SPEC, tenant=tenant)
            return HashedPrompt.of_digests(digests, here, 256, block_tokens=64, scheme="test", num_tokens=1030)

        assert store.save(prompt(), truth, points=[512, 1024]).dropped == 0
        assert store.load(store.lookup(prompt()), Taken()) == 1024
        assert store.lookup(prompt("other")).position == 0

    # ---- tickets

    def test_a_ticket_is_loaded_without_another_lookup(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[512, 1024])
        ticket = store.lookup(prompt).ticket()
        assert len(ticket) < 200 + 32 * 4
        lookups = store.stats().lookups
        hit = store.redeem(ticket)
        assert hit.position == 1024
        assert store.load(hit, sink, shards=[0, 1]) == 1024
        assert store.stats().lookups == lookups

    def test_a_ticket_for_what_is_gone_shortens(self, store: BaseStore[Any]) -> None:
        prompt, sink = prompt_of(store), Taken()
        store.save(prompt, truth, points=[512, 1024])
        ticket = store.lookup(prompt, **self.without_lease()).ticket()
        self.lose(store, prompt, 3)
        assert store.load(store.redeem(ticket), sink) == 512

    def test_tickets_that_are_damaged_foreign_or_too_old_are_misses(self, store: BaseStore[Any]) -> None:
        prompt = prompt_of(store)
        store.save(prompt, truth, points=[1024])
        hit = store.lookup(prompt)
        ticket = hit.ticket()
        wrong = [b"", b"KVT1", ticket[:-1], ticket + b"x", b"KVT9" + ticket[4:], hit.ticket(valid_s=-1.0)]
        wrong += [ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :] for at in range(0, len(ticket), 7)]
        for each in wrong:
            missed = store.redeem(each)
            assert missed.position == 0
            assert store.load(missed, Taken()) == 0
        assert store.stats().refused_tickets == len(wrong)

    def test_a_hit_is_shortened_to_the_longest_that_was_found_within_a_limit(self, store: BaseStore[Any]) -> None:
        prompt = prompt_of(store)
        store.save(prompt, truth, points=[512, 1024])
        hit = store.lookup(prompt)
        assert [store.shorten(hit, limit).position for limit in (9999, 1024, 1023, 512, 511)] == [
            1024,
            1024,
            512,
            512,
            0,
        ]
        assert [store.shorten(hit, 1023, multiple).position for multiple in (1, 512, 768)] == [512, 512, 0]
        assert store.shorten(hit, 9999, 512) is hit
        sink = Taken()
        assert store.load(store.shorten(hit, 1000), sink) == 512
        assert sink.chunks("full") == [0, 1]

    def test_a_hit_names_the_farthest_tier_and_is_released_without_waiting(self, store: BaseStore[Any]) -> None:
        prompt = prompt_of(store)
        assert store.farthest_tier(store.lookup(prompt)) == ""
        store.save(prompt, truth)
        hit = store.lookup(prompt)
        assert store.farthest_tier(hit) in ("memory", "dict", "disk")
        store.release_later(hit)
        store.release_later(hit)
        assert store.lookup(prompt).position == 1024

    def test_a_store_is_a_context(self, store: BaseStore[Any]) -> None:
        with store as same:
            assert same is store
