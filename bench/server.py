"""A daemon that answers in less than half the time of LMCache's, and moves KV near memory speed, checksums included.

Each line is a figure: ours, LMCache 0.5.6's in the same run, how many times better ours is. One engine process and one
daemon on this machine, 2,048 tokens of a model with 32 layers, 8 heads of 128, bfloat16: 256 MiB. LMCache's server
copies out of shared tensors by its CPU kernels; our client copies by itself, flat (chunks in one piece, as a transfer
leaves them) and paged (out of pools with blocks of 16 tokens by numpy: as LMCache does). Best of the rounds.

Run: make bench NAME=server, with LMCache in an environment of its own beside the one that runs this:

    python3 -m venv /work/venv-lmcache; pip install torch==2.13.0; pip install lmcache==0.5.6

Another place is named by LMCACHE_PYTHON. Without it figures of a quiet machine stand in, and the lines say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvweave import Layer, LayerCache, ModelSpec, Role, make_plan
from kvweave.errors import ServerError
from kvweave.server import Client, RemoteStore, protocol
from kvweave.spec import DType, Full, Segment, State, Window
from kvweave.store import EngineMemory, HashedPrompt, Namespace, PagePayloads, Schema, Shard, Sink
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes

PEER = Path(os.environ.get("LMCACHE_PYTHON", "/work/venv-lmcache/bin/python"))
QUIET = {"round trip": 236.0, "store": 0.88, "load": 2.5, "lookup": 12.1}
CHUNK, TOKENS, LONG = 256, 2048, 131_072
HERE = Namespace("bench")


def gqa() -> ModelSpec:
    roles = tuple(Role(name, (8, 128), DType.BFLOAT16, split=(Segment(8),)) for name in ("key", "value"))
    return ModelSpec("bench", (Layer((LayerCache("full", Full(), roles),)),) * 32)


def hybrid() -> ModelSpec:
    roles = tuple(Role(name, (8, 8), DType.BFLOAT16, split=(Segment(8),)) for name in ("key", "value"))
    state = Role("ssm_state", (8, 8), DType.FLOAT32, split=(Segment(8),))
    caches = (
        LayerCache("full", Full(), roles),
        LayerCache("window", Window(16 * CHUNK), roles),
        LayerCache("state", State(), (state,)),
    )
    return ModelSpec("bench", tuple(Layer((cache,)) for cache in caches))


def best(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def daemon(socket: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from kvweave.cli import main; main()", "serve", "--memory", "1GiB", *options]
    process = subprocess.Popen([*command, "--socket", str(socket)], stderr=subprocess.DEVNULL)
    while True:
        try:
            Client(socket, arena=False).close()
        except ServerError:
            time.sleep(0.05)
        else:
            return process


def round_trip(client: Client) -> float:
    """Microseconds, the median."""
    times = []
    for _ in range(5000):
        began = time.perf_counter()
        client.ask(protocol.Ping(), protocol.Done)
        times.append(time.perf_counter() - began)
    return 1e6 * sorted(times)[len(times) // 2]


def memcpy(payloads: list[Bytes], targets: list[Bytes], pool: ThreadPoolExecutor | None) -> None:
    """Plain copies of the same pieces."""
    if pool is None:
        for pair in zip(targets, payloads, strict=True):
            np.copyto(*pair)
    else:
        list(pool.map(np.copyto, targets, payloads))


class Flat:
    """Payloads in one piece each, here and there."""

    def __init__(self, schema: Schema) -> None:
        chance = np.random.default_rng(1)
        self.kept = {
            (shard.part, chunk): aligned(shard.payload_bytes)
            for shard in schema.shards
            for chunk in range(TOKENS // CHUNK)
        }
        self.got = {at: aligned(payload.nbytes) for at, payload in self.kept.items()}
        for at, payload in self.kept.items():
            payload[:] = chance.integers(0, 256, payload.nbytes, np.uint8)
            self.got[at][:] = 0

    def source(self, shard: Shard, chunk: int) -> Bytes:
        return self.kept[shard.part, chunk]

    def target(self, shard: Shard, chunk: int) -> Bytes:
        return self.got[shard.part, chunk]


def flat(store: RemoteStore, memory: Flat, rounds: int, workers: int) -> dict[str, float]:
    """GB/s of memcpy, saves and loads of chunks in one piece, in turns."""
    kept, got = [*memory.kept.values()], [*memory.got.values()]
    pool = ThreadPoolExecutor(workers) if workers > 1 else None
    times: dict[str, list[float]] = {"memcpy": [], "store": [], "load": []}
    for number in range(rounds):
        prompt = store.prompt([number, *range(TOKENS)], HERE)
        times["memcpy"].append(best(partial(memcpy, kept, got, pool), 2))
        times["store"].append(best(partial(store.save, prompt, memory.source), 1))
        times["load"].append(best(partial(loaded, store, prompt, memory.target), 2))
        assert all((mine == theirs).all() for mine, theirs in zip(kept, got, strict=True))
        store.client.ask(protocol.Clear(), protocol.ClearReply)
    return {what: sum(map(len, kept)) / min(seconds) / 1e9 for what, seconds in times.items()}


def loaded(store: RemoteStore, prompt: HashedPrompt, target: Callable[[Shard, int], Bytes]) -> None:
    assert store.load_into(store.lookup(prompt), target) == TOKENS


def paged(store: RemoteStore, rounds: int) -> tuple[float, float]:
    """GB/s out of pools and back into them."""
    made = make_plan(gqa(), "768MiB", block_tokens=16, layout="layer_major")
    pools = {pool.name: np.ones(pool.num_bytes, np.uint8) for pool in made.pools}
    pages = PagePayloads(store.schema, EngineMemory.of_plan(made, pools))
    table = {"full": np.random.default_rng(0).permutation(np.arange(1, 1 + TOKENS // 16)).astype(np.int32)}
    size = TOKENS * 32 * 2 * 8 * 128 * 2 / 1e9

    saves, loads = [], []
    for number in range(rounds):
        prompt = store.prompt([number, *range(TOKENS)], HERE)
        saves.append(best(partial(store.save, prompt, pages.source(table)), 1))
        loads.append(best(partial(scattered, store, prompt, pages.sink(table)), 2))
        store.client.ask(protocol.Clear(), protocol.ClearReply)
    return size / min(saves), size / min(loads)


def scattered(store: RemoteStore, prompt: HashedPrompt, sink: Sink) -> None:
    assert store.load(store.lookup(prompt), sink) == TOKENS


def lookups(client: Client, parts: int, rounds: int, *, anew: bool) -> float:
    """Milliseconds of a lookup that finds everything: hashed and sent `anew`, or named by its number."""
    schema = Schema.of(hybrid(), chunk_tokens=CHUNK, parts=parts)
    store = RemoteStore(schema, client)
    tokens = np.arange(LONG + 1, dtype=np.int32)
    prompt = store.prompt(tokens, HERE)
    saved = store.save(prompt, lambda shard, _: np.zeros(shard.payload_bytes, np.uint8))
    assert not saved.dropped

    def ask() -> None:
        if anew:
            store.client.exchange(lambda: store._prompt_session._close_messages(0))
        assert store.lookup(store.prompt(tokens, HERE) if anew else prompt).position == LONG

    return 1e3 * best(ask, 10 * rounds)


def peer(rounds: int) -> tuple[dict[str, float], str]:
    """LMCache's figures, and where they are from."""
    if PEER.exists():
        wish = json.dumps({"chunk": CHUNK, "tokens": TOKENS, "rounds": rounds, "lookup": LONG})
        script = Path(__file__).with_name("server_peer.py")
        done = subprocess.run([str(PEER), str(script), wish], capture_output=True, text=True, check=False)
        if not done.returncode:
            reply: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return reply, "in this run"
        print(done.stderr[-2000:], file=sys.stderr)
    return QUIET, "on a quiet machine; it could not be run here"


def lines(socket: Path, rounds: int) -> Iterator[dict[str, object]]:
    theirs, where = peer(rounds)
    apart = socket.with_name("inbox.sock")
    processes = [daemon(socket), daemon(apart, "--inbox", "64MiB")]
    try:
        yield from ours(Client(socket), theirs, f"LMCache {where}", rounds)
        yield from inboxes(Client(socket), Client(apart), rounds)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def inboxes(client: Client, apart: Client, rounds: int) -> Iterator[dict[str, object]]:
    """What it costs that clients cannot write to the arena."""
    schema, speeds = Schema.of(gqa(), chunk_tokens=CHUNK), dict[Client, list[dict[str, float]]]()
    memory = Flat(schema)
    for _ in range(rounds):
        for each in (client, apart):
            speeds.setdefault(each, []).append(flat(RemoteStore(schema, each, workers=2), memory, 2, 2))
    for what in ("store", "load"):
        through, straight = (max(each[what] for each in speeds[one]) for one in (apart, client))
        claim = f"daemon {what}, flat, 2 threads, clients read-only (--inbox 64MiB); beside a writable arena"
        yield line(claim, through, straight, "GB/s", lower=False)


def ours(client: Client, theirs: dict[str, float], where: str, rounds: int) -> Iterator[dict[str, object]]:
    yield line(f"no-op round trip; {where}", round_trip(client), theirs["round trip"], "us", lower=True)
    schema = Schema.of(gqa(), chunk_tokens=CHUNK)
    memory = Flat(schema)
    for workers in (1, 2):
        speeds = flat(RemoteStore(schema, client, workers=workers), memory, 2 * rounds, workers)
        for what in ("store", "load"):
            claim = f"daemon {what}, flat, {workers} thread{'s' * (workers > 1)}"
            yield line(f"{claim}; {where}", speeds[what], theirs[what], "GB/s", lower=False)
            beside = f"{claim}; beside memcpy by as many (goal 0.8)"
            yield line(beside, speeds[what], speeds["memcpy"], "GB/s", lower=False)
    whole = Schema.of(gqa(), chunk_tokens=CHUNK, parts=1)
    for what, speed in zip(("store", "load"), paged(RemoteStore(whole, client), rounds), strict=True):
        yield line(f"daemon {what}, paged, 2 threads; {where}", speed, theirs[what], "GB/s", lower=False)
    client.ask(protocol.Clear(), protocol.ClearReply)
    for parts in (1, 8):
        for anew, words in ((True, "hashed and sent"), (False, "by its number")):
            claim = f"lookup of 128k tokens, {3 * parts} presence rows, all found, {words}; {where} (1 row, none found)"
            yield line(claim, lookups(client, parts, rounds, anew=anew), theirs["lookup"], "ms", lower=True)


def line(claim: str, ours: float, theirs: float, unit: str, *, lower: bool) -> dict[str, Any]:
    ratio = theirs / ours if lower else ours / theirs
    return {"claim": claim, "ours": round(ours, 3), "peer": round(theirs, 3), "unit": unit, "ratio": round(ratio, 2)}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory(prefix="kvweave-server-") as folder:
        for figure in lines(Path(folder) / "kv.sock", rounds):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
