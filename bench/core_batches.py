"""Lives of a cache with many open sequences, each call timed; bench/core_scaling.py reports them."""

from __future__ import annotations

import numpy as np

from bench.core_calls import BLOCK, CallTimes, Kinds, Life, num_pages, plan_of
from kvweave.cache import Batch, Cache
from kvweave.cache import Sequence as Running


def with_sequences(kinds: Kinds, count: int, times: CallTimes) -> None:
    """Every call with so many open sequences, which decode as one batch; then in a full pool."""
    pages = count * num_pages(kinds, blocks=24, states=4)
    life = Life(times, Cache(plan_of(kinds, pages), rows=count + 8, max_tokens=8192))
    times.enter(f"while {count} sequences are opened")
    running = [life.start(life.prompt(2 * BLOCK + 1 + i % BLOCK)) for i in range(count)]
    times.enter(f"{count} sequences")
    step_all(life, running, 64)
    times("open after 64 steps", life.cache.open, life.prompt(2 * BLOCK)).close()
    for sequence in running[:: max(1, count // 30)]:
        times("open of what a sequence generates", life.cache.open, sequence.tokens).close()
    times.enter(f"{count} sequences", 64 * count)
    times("publish of all", life.cache.publish)
    times.enter(f"{count} sequences")
    step_all(life, running, 200)  # ids are handed over after 256
    life.cache.publish()
    for _ in range(30):
        life.every_call()
    draft_all(life, running)
    sequences_in_full_pool(life, running)


def sequences_in_full_pool(life: Life, running: list[Running]) -> None:
    while not life.is_full():
        life.serve_quietly(life.tokens(8 * BLOCK + 1))
    life.times.enter(f"{len(running)} sequences, pool full")
    for _ in range(30):
        life.every_call()
    life.times("extend refused", life.cache.extend, Batch(running), 7000)
    step_all(life, running, BLOCK)
    for sequence in running:
        life.times("close", life.cache.close, sequence)


def step_all(life: Life, running: list[Running], steps: int) -> None:
    """Steps of all sequences; before every 16th one sequence ends and another comes, so that the batch is new."""
    cache, batch = life.cache, Batch(running)
    for i in range(steps):
        name = "all" if i % BLOCK else "all, one of them new"
        if i % BLOCK == 0:
            life.times("close", cache.close, running[i % len(running)])
            running[i % len(running)] = life.start(life.prompt(2 * BLOCK + 1 + i % BLOCK))
            batch = life.times("Batch", Batch, running)
        ids = life.tokens(len(running))
        life.times(f"extend {name}", cache.extend, batch, 1, tokens=ids)
        life.times(f"commit {name}", cache.commit, batch)
        life.times("slot_mapping of all", cache.slot_mapping, batch)


def draft_all(life: Life, running: list[Running]) -> None:
    cache, batch = life.cache, Batch(running)
    for _ in range(3):
        ids = np.ones(3 * len(running), np.int32)
        life.times("extend drafts of all", cache.extend, batch, 3, tokens=ids, drafts=2)
        life.times("accept all", cache.accept, batch, cache.state.counters.lengths[batch.rows] - 1)
        life.times("commit drafts of all", cache.commit, batch)


def pool_held(kinds: Kinds, count: int, times: CallTimes) -> None:
    """Sequences that hold nearly all pages; then one after the other grows, until one is refused."""
    pages, step = count * num_pages(kinds, blocks=6, states=2), 8 * BLOCK
    life = Life(times, Cache(plan_of(kinds, pages), rows=count, max_tokens=8192))
    times.enter(f"while {count} sequences are opened")
    running = [life.start(life.prompt(2 * BLOCK + 1 + i % BLOCK)) for i in range(count)]
    times.enter(f"{count} sequences hold the pool")
    batch, ids = Batch(running), np.ones(count, np.int32)
    while life.cache.can_extend(batch, BLOCK):
        for copies in (life.cache.extend(batch, 1, tokens=ids), life.cache.commit(batch)):
            list(copies)  # an engine would carry them out
    for one in running:
        if not times("can_extend", life.cache.can_extend, one, step):
            break
        times("extend one", life.cache.extend, one, step, tokens=ids[:step])
        times("commit one", life.cache.commit, one)
    times("extend one refused", life.cache.extend, running[-1], step)
    times("extend refused", life.cache.extend, batch, BLOCK)


def rows_in_step(kinds: Kinds, count: int, times: CallTimes) -> None:
    """Sequences of one length, which all need a page, and pass a point, in the same step."""
    life = Life(times, Cache(plan_of(kinds, count * num_pages(kinds, 6, 4)), rows=count, max_tokens=1024))
    times.enter(f"{count} sequences of one length")
    batch = Batch([life.start(life.tokens(2 * BLOCK)) for _ in range(count)])
    for _ in range(2 * BLOCK + 1):
        times("extend all", life.cache.extend, batch, 1, tokens=np.ones(count, np.int32))
        times("commit all", life.cache.commit, batch)


def twins(kinds: Kinds, count: int, times: CallTimes) -> None:
    """Sequences with one prompt, opened before the first has committed; and more of them than rows."""
    life = Life(times, Cache(plan_of(kinds, count * num_pages(kinds, 6, 4)), rows=256, max_tokens=1024))
    tokens = life.tokens(4 * BLOCK + 1)
    times.enter(f"{count} twins")
    running = [times("open cold", life.cache.open, tokens) for _ in range(count)]
    for sequence in running:
        life.prefill(sequence)
    times("lookup", life.cache.lookup, tokens)
    times("open warm", life.cache.open, tokens).close()
    for sequence in running:
        times("close", life.cache.close, sequence)
