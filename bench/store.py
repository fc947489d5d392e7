"""Lookups of 128k tokens beside LMCache's, and the disk tier with checksums beside its own without (goal: 10x, 1x).

Each line is a figure: ours, LMCache 0.5.6's in the same run, how many times better ours is. Lookups hash the prompt,
make the keys and find all of them in memory: LMCache's storage manager with its native fold, ours `Store.lookup`, over
1, 3 (full, window, state) and 24 presence rows (3 groups x 8 ranks or parts). Disk: 16 values of 32 MiB, four workers
each, round by round in turns; neither syncs. LMCache's native file adapter writes a file a value and checks nothing,
ours seals and verifies every byte. Best of the rounds, both.

Run: make bench NAME=store, or a part of it: python bench/store.py ROUNDS lookup|disk|reopen. LMCache is in an
environment of its own beside the one that runs this:

    python3 -m venv /work/venv-lmcache; pip install torch==2.13.0; pip install lmcache==0.5.6

Another place is named by LMCACHE_PYTHON. Without it our figures are printed alone.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave import Layer, LayerCache, ModelSpec, Role
from kvweave.prefix import TokenIds
from kvweave.spec import DType, Full, Segment, State, Window
from kvweave.store import DiskTier, MemoryTier, Namespace, Schema, Shard, Store, TierPolicy, TierStack
from kvweave.store.blob import BlobCheck, blob_bytes, seal
from kvweave.store.files import aligned
from kvweave.store.journal import MAGIC, packed
from kvweave.store.keys import KEY_BYTES, tenant_id
from kvweave.store.striped_file import FILES
from kvweave.store.tier import whole

PEER = Path(os.environ.get("LMCACHE_PYTHON", "/work/venv-lmcache/bin/python"))
NUM_TOKENS, CHUNK = 131_072, 256
COUNT, SIZE, WORKERS = 16, 32 << 20, 4
HERE = Namespace("bench")


def best(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def model(*names: str) -> ModelSpec:
    heads = (Segment(8),)
    kv = tuple(Role(name, (8, 8), DType.BFLOAT16, split=heads) for name in ("key", "value"))
    caches = {
        "full": LayerCache("full", Full(), kv),
        "window": LayerCache("window", Window(16 * CHUNK), kv),
        "state": LayerCache("state", State(), (Role("ssm_state", (8, 8), DType.FLOAT32, split=heads),)),
    }
    return ModelSpec("bench", tuple(Layer((caches[name],)) for name in names))


def lookups(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds by presence rows, for tokens in an int32 array and in a list."""
    found: dict[str, dict[str, float]] = {"array": {}, "list": {}}
    tokens = np.arange(NUM_TOKENS + 1, dtype=np.int32)
    listed = tokens.tolist()
    for shards, (names, parts) in {
        1: (("full",), 1),
        3: (("full", "window", "state"), 1),
        24: (("full", "window", "state"), 8),
    }.items():
        schema = Schema.of(model(*names), chunk_tokens=CHUNK, parts=parts)
        assert len(schema.shards) == shards
        tier = MemoryTier("64MiB")
        store = Store(schema, TierStack((tier, TierPolicy(inline=True))))
        keys = store.prompt(tokens, HERE).keys(schema.ids)
        assert all(tier.put(keys, [whole(b"x")] * len(keys)))
        for kind, prompt in (("array", tokens), ("list", listed)):

            def ask(store: Store = store, prompt: TokenIds = prompt) -> None:
                assert store.lookup(store.prompt(prompt, HERE)).position == NUM_TOKENS

            found[kind][str(shards)] = 1e3 * best(ask, 10 * rounds)
    return found


def disk(path: Path, direct: bool) -> Iterator[dict[str, float]]:
    """Round by round, seconds of sealed puts and verified gets."""
    shard = Shard("bench", Full(), (0,), (Role("latent", (SIZE // CHUNK,), DType.UINT8),), 0, 1, CHUNK)
    tier = DiskTier(path, 2 * COUNT * SIZE, direct=direct)
    payloads = [aligned(SIZE) for _ in range(COUNT)]
    for number, payload in enumerate(payloads):
        payload[:] = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)
        payload.flags.writeable = False
    buffers = [aligned(blob_bytes(shard)) for _ in range(COUNT)]

    def put(pair: tuple[bytes, NDArray[np.uint8]]) -> bool:
        return tier.put([pair[0]], [seal(shard, 0, *pair)])[0]

    def get(pair: tuple[bytes, NDArray[np.uint8]]) -> bool:
        check = BlobCheck(shard, 0, pair[0])
        return tier.get([pair[0]], [pair[1]], [check])[0] == pair[1].nbytes and check.passes(pair[1])

    def everywhere(work: Callable[[tuple[bytes, NDArray[np.uint8]]], bool], arrays: list[NDArray[np.uint8]]) -> None:
        assert all(pool.map(work, zip(keys, arrays, strict=True)))

    with ThreadPoolExecutor(WORKERS) as pool:
        for number in itertools.count():
            keys = [(number * COUNT + n).to_bytes(KEY_BYTES, "big") for n in range(COUNT)]
            store = best(lambda: everywhere(put, payloads), 1)
            load = best(lambda: everywhere(get, buffers), 2)
            assert all((buffer[-SIZE:] == payload).all() for buffer, payload in zip(buffers, payloads, strict=True))
            tier.delete(keys)
            yield {"store": store, "load": load}


def reopening(path: Path, count: int = 1_000_000) -> float:
    """Seconds to open a disk tier of a million entries of four tenants."""
    keys = np.frombuffer(np.random.default_rng(0).bytes(count * KEY_BYTES), np.uint8).reshape(count, KEY_BYTES).copy()
    for tenant in range(4):
        keys[tenant::4, :8] = np.frombuffer(tenant_id(str(tenant)), np.uint8)
    listed = keys.view(f"V{KEY_BYTES}").ravel().tolist()
    path.mkdir()
    starts = np.arange(count, dtype=np.int64) * 4096
    (path / "journal").write_bytes(MAGIC + packed(listed, starts, np.full(count, 4096)).tobytes())
    for number in range(FILES):
        (path / f"blobs-{number}").touch()
        os.truncate(path / f"blobs-{number}", count * 4096)
    return best(lambda: DiskTier(path, count * 4096).close(), 3)


class Peer:
    """LMCache in a process of its own, asked by lines; one that cannot be run has no answers."""

    def __init__(self, path: Path, rounds: int) -> None:
        self._process = None
        if PEER.exists():
            wish = json.dumps({"path": str(path), "rounds": rounds, "count": COUNT, "size": SIZE})
            command = [str(PEER), str(Path(__file__).with_name("store_peer.py")), wish]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: str) -> dict[str, float]:
        if self._process is None or not self._process.stdin or not self._process.stdout:
            return {}
        print(question, file=self._process.stdin, flush=True)
        for answer in self._process.stdout:
            if answer.startswith("{"):
                numbers: dict[str, float] = json.loads(answer)
                return numbers
        return {}

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


def lines(path: Path, rounds: int, wanted: set[str]) -> Iterator[dict[str, object]]:
    peer = Peer(path, rounds)
    try:
        if "lookup" in wanted:
            yield from lookup_lines(peer.ask("lookup"), lookups(rounds))
        if "disk" in wanted:
            for name, direct in (("page cache", False), ("O_DIRECT", True)):
                yield from disk_lines(name, peer, disk(path / f"kvweave-{int(direct)}", direct), rounds)
    finally:
        peer.close()
    if "reopen" in wanted:
        yield line("reopening 1 million entries (goal 2 s)", reopening(path / "many"), None, "s", lower=True)


def lookup_lines(theirs: dict[str, float], ours: dict[str, dict[str, float]]) -> Iterator[dict[str, object]]:
    for kind, by_rows in ours.items():
        for shards, milliseconds in by_rows.items():
            claim = f"lookup of 128k tokens ({kind}), {shards} presence rows, hashing and keys included"
            yield line(claim, milliseconds, theirs.get(shards), "ms", lower=True)


def disk_lines(name: str, peer: Peer, ours: Iterator[dict[str, float]], rounds: int) -> Iterator[dict[str, object]]:
    times = [(next(ours), peer.ask(name)) for _ in range(rounds)]
    speed = COUNT * SIZE / 1e9
    for what in ("store", "load"):
        mine = speed / min(seconds[what] for seconds, _ in times)
        other = speed / min(seconds[what] for _, seconds in times) if times[0][1] else None
        yield line(f"disk {what}, {name}, 32 MiB values, ours with checksums", mine, other, "GB/s", lower=False)


def line(claim: str, ours: float, theirs: float | None, unit: str, *, lower: bool) -> dict[str, object]:
    ratio = None if theirs is None else round(theirs / ours if lower else ours / theirs, 2)
    return {
        "claim": claim, "ours": round(ours, 3), "peer": None if theirs is None else round(theirs, 3),
        "unit": unit, "ratio": ratio,
    }  # fmt: skip


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    place = Path(tempfile.mkdtemp(prefix="kvweave-store-", dir=os.environ.get("BENCH_DIR")))
    try:
        for figure in lines(place, rounds, {*sys.argv[2:]} or {"lookup", "disk", "reopen"}):
            print(json.dumps(figure), flush=True)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
