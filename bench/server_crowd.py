"""Sixteen engine processes at one daemon, more offered than fits, for minutes: nothing is dropped, and prompts on disk
are found as often as in quiet.

Half of the processes save prompts that nobody has seen, without end; the disk has room for a part of them. The others
look old prompts up and load them, of which the arena holds a half, so that most come from disk; every byte is compared.
Lines: old prompts found, in quiet (nobody saves) and among writers; what was dropped; the median and 99th percentile of
lookups, as the readers saw them; and the daemon's own memory (RssAnon, without the arena) after a fifth of the time and
at the end.

Run: python bench/server_crowd.py [SECONDS [PROCESSES]]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvweave import Layer, LayerCache, ModelSpec, Role
from kvweave.errors import ServerError
from kvweave.server import Client, RemoteStore, Settings
from kvweave.server.run import run as run_daemon
from kvweave.server.settings import Disk
from kvweave.spec import DType, Full, Segment, Window
from kvweave.store import HashedPrompt, Namespace, Schema, Shard
from kvweave.store.keys import Bytes

TOKENS, OLD, PAUSE_S = 1025, 96, 0.2
ARENA, DISK = 64 << 20, 1 << 30
CORES = multiprocessing.get_context("fork")


def schema() -> Schema:
    """About 1.4 MB a prompt, in 24 blobs."""
    roles = tuple(Role(name, (4, 64), DType.BFLOAT16, split=(Segment(4),)) for name in ("key", "value"))
    caches = LayerCache("full", Full(), roles), LayerCache("window", Window(512), roles)
    return Schema.of(ModelSpec("crowd", tuple(Layer((cache,)) for cache in caches)), parts=4)


class Seen(NamedTuple):
    """What one process saw."""

    saved: int
    dropped: int
    asked: int
    found: int
    unanswered: int
    """Calls that the daemon did not answer, because it had no processor for a second or more."""
    lookups_s: list[float]


class Prompts:
    """Prompts by number, and what their payloads are: different for each, and cheap to make."""

    def __init__(self, store: RemoteStore) -> None:
        self.store, self._tokens = store, np.arange(TOKENS, dtype=np.int32)
        largest = max(shard.payload_bytes for shard in store.schema.shards)
        self._noise = np.random.default_rng(1).integers(0, 256, largest + 4096, np.uint8)

    def hashed(self, number: int) -> HashedPrompt:
        self._tokens[0] = number
        return self.store.prompt(self._tokens, Namespace("crowd"))

    def payload(self, number: int, shard: Shard, chunk: int) -> Bytes:
        start = (number * 31 + chunk * 7 + shard.part) % 4096
        return self._noise[start : start + shard.payload_bytes]

    def source(self, number: int) -> Callable[[Shard, int], Bytes]:
        return lambda shard, chunk: self.payload(number, shard, chunk)

    def sink(self, number: int) -> Callable[[Shard, int, Bytes], None]:
        def check(shard: Shard, chunk: int, payload: Bytes) -> None:
            assert (payload == self.payload(number, shard, chunk)).all(), "wrong bytes"

        return check


def write(socket: Path, process: int, until: float) -> Seen:
    prompts = Prompts(RemoteStore(schema(), socket, workers=1))
    saved = dropped = 0
    while time.monotonic() < until:
        number = (process + 1) * 1_000_000 + saved
        dropped += prompts.store.save(prompts.hashed(number), prompts.source(number)).dropped
        saved += 1
        time.sleep(PAUSE_S)
    return Seen(saved, dropped, 0, 0, unanswered(prompts.store), [])


def read(socket: Path, process: int, until: float) -> Seen:
    prompts, chance = Prompts(RemoteStore(schema(), socket, workers=1)), random.Random(process)
    asked, found, times = 0, 0, list[float]()
    while time.monotonic() < until:
        number = chance.randrange(OLD)
        prompt, began = prompts.hashed(number), time.perf_counter()
        hit = prompts.store.lookup(prompt)
        times.append(time.perf_counter() - began)
        asked, found = asked + 1, found + (prompts.store.load(hit, prompts.sink(number)) == TOKENS - 1)
        time.sleep(PAUSE_S / 4)
    return Seen(0, 0, asked, found, unanswered(prompts.store), times)


def unanswered(store: RemoteStore) -> int:
    return store.unreachable + store.stats().unanswered


def run(work: Callable[[Path, int, float], Seen], results: Any, *args: Any) -> None:
    results.put(work(*args))


def crowd(socket: Path, seconds: float, readers: int, writers: int, watch: Callable[[], None]) -> list[Seen]:
    """All processes at once; `watch` is called every second."""
    results, until = CORES.Queue(), time.monotonic() + seconds
    each = [(read, number) for number in range(readers)] + [(write, number) for number in range(writers)]
    processes = [CORES.Process(target=run, args=(work, results, socket, number, until)) for work, number in each]
    for process in processes:
        process.start()
    while time.monotonic() < until:
        time.sleep(1.0)
        watch()
    seen = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return seen


def private_bytes(process: int) -> int:
    """A process's memory that it shares with nobody."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError("this kernel does not say RssAnon")


@contextmanager
def daemon(folder: Path) -> Iterator[int]:
    """A daemon, by the number of its process."""
    settings = Settings(memory=ARENA, socket=folder / "kv.sock", disk=Disk(folder / "disk", DISK))
    process = multiprocessing.get_context("spawn").Process(target=run_daemon, args=(settings,))
    process.start()
    try:
        while True:
            try:
                Client(folder / "kv.sock", arena=False).close()
            except ServerError:
                assert process.is_alive(), "the daemon did not start"
                time.sleep(0.05)
            else:
                break
        assert process.pid
        yield process.pid
    finally:
        process.terminate()
        process.join()


def reads(name: str, seen: list[Seen]) -> Iterator[dict[str, object]]:
    asked, found = sum(each.asked for each in seen), sum(each.found for each in seen)
    times = 1e3 * np.sort(np.concatenate([each.lookups_s for each in seen]))
    median, late = (float(np.quantile(times, share)) for share in (0.5, 0.99))
    yield {"claim": f"old prompts found and loaded whole, {name}", "ours": found, "of": asked, "unit": "prompts"}
    yield {
        "claim": f"lookup, {name}: median, 99th percentile",
        "ours": [round(median, 2), round(late, 2)],
        "unit": "ms",
    }


def lines(folder: Path, seconds: float, processes: int) -> Iterator[dict[str, object]]:
    socket, memory = folder / "kv.sock", list[int]()
    with daemon(folder) as served:
        prompts = Prompts(RemoteStore(schema(), socket))
        for number in range(OLD):
            assert not prompts.store.save(prompts.hashed(number), prompts.source(number)).dropped
        assert prompts.store.flush()
        half = processes // 2
        yield from reads("in quiet", crowd(socket, seconds / 5, half, 0, lambda: None))
        seen = crowd(socket, seconds, half, processes - half, lambda: memory.append(private_bytes(served)))
        yield from reads(f"while {processes - half} processes save", [each for each in seen if each.asked])
        saved = sum(each.saved for each in seen)
        tiers = prompts.store.report().tiers
        offered = round(sum(tier.written_bytes for tier in tiers[:1]) / (ARENA + DISK), 1)
        yield {"claim": "offered, times arena and disk", "ours": offered, "unit": "times", "prompts": saved}
        dropped, (arena, disk) = sum(each.dropped for each in seen), tiers
        yield {"claim": "blobs dropped by saves; damaged on disk", "ours": [dropped, disk.damaged]}
        yield {"claim": "blobs dropped by the arena, by the disk, by reason", "ours": [arena.drops, disk.drops]}
        silent = sum(each.unanswered for each in seen)
        late = [silent, disk.late, disk.skipped]
        yield {"claim": "calls that the daemon did not answer; that the disk did late, or was not asked", "ours": late}
        growth = [round(memory[len(memory) // 5] / 2**20, 1), round(memory[-1] / 2**20, 1)]
        yield {"claim": "the daemon's own memory after a fifth of the time, at the end", "ours": growth, "unit": "MiB"}


def main() -> None:
    seconds, processes = (*map(int, sys.argv[1:]), *(180, 16)[len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory(prefix="kvweave-crowd-", dir=os.environ.get("BENCH_DIR")) as folder:
        for figure in lines(Path(folder), seconds, processes):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
