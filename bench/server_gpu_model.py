"""Without a GPU: what of a save and a load of 16 chunks through the daemon is not copying.

The calls of `bench/server_gpu.py`, with a copier that moves nothing: it makes the tables of a real one, and its copies
end when those of a copy engine of `GB_PER_S` would, one after the other. Everything else is real: keys, messages, the
daemon in a process of its own, leases, headers. So lines say what share of the ceiling one call can reach, and where
the rest goes: milliseconds before the first copy begins, in which the copy engine has nothing to do between two copies,
and after the last one ends. Then the same of three prompts that are submitted at once.

Run: PYTHONPATH=src:. python3 -m bench.server_gpu_model [rounds]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import PART_BYTES, BlockCopy, Bytes, Gathering, Landing, PartChecksums
from kvweave.errors import ServerError
from kvweave.server import Client, RemoteStore, Settings, protocol
from kvweave.server.remote_hit import RemoteHit
from kvweave.server.run import run
from kvweave.server.settings import Limits
from kvweave.spec import ModelSpec
from kvweave.store import EngineMemory, Namespace, PagePayloads, Schema, TableUse
from kvweave.tensor import GQA, MLA, LayerRequest, assemble
from kvweave.transfer.payload_tables import PayloadTable, PooledFields

CHUNKS, CHUNK, BLOCK, PROMPTS = 16, 256, 16, 3
TOKENS = CHUNKS * CHUNK
GB_PER_S, DEVICE_GB_PER_S = 54.0, 1000.0
CALL_S, COPY_S, WAKE_S = 25e-6, 1e-6, 10e-6
"""Of a driver's calls for one submission, between two copies, and until the host sees an event."""


class CopyEngine:
    """Copies end one after the other. What it did since `start`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.free_at = self.first = self.idle = 0.0

    def copy(self, num_bytes: int, count: int, after: float) -> float:
        """When it ends."""
        begin = max(after, self.free_at)
        if not self.first:
            self.first = begin
        else:
            self.idle += begin - self.free_at
        self.free_at = begin + num_bytes / GB_PER_S / 1e9 + count * COPY_S
        return self.free_at


def until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - 1e-4))  # others run meanwhile, also during the last moment


def call_driver() -> None:
    end = time.perf_counter() + CALL_S
    while time.perf_counter() < end:
        pass


class ModelledPayloads:
    """`StagedPayloads` that are gathered at a time."""

    def __init__(self, engine: CopyEngine, num_bytes: int, gathered_at: float) -> None:
        self._engine, self._num_bytes, self._gathered_at = engine, num_bytes, gathered_at

    def begin_copy(self, payloads: Sequence[Bytes]) -> Gathering:
        call_driver()
        end = self._engine.copy(self._num_bytes, 1, max(self._gathered_at, time.perf_counter()))

        def finish() -> Sequence[PartChecksums]:
            until(end + WAKE_S)
            return sums(payloads)

        return finish

    def drop(self) -> None:
        pass


class ModelledCopier:
    """A `StagedCopier` whose copies take time and do nothing."""

    together_bytes = 36 << 20

    def __init__(self, pools: dict[str, Bytes]) -> None:
        addresses = {name: pool.ctypes.data for name, pool in pools.items()}
        self._pooled = PooledFields(addresses, {name: pool.nbytes for name, pool in pools.items()})
        self.engine = CopyEngine()

    def after_caller(self) -> ModelledCopier:
        return self

    def wait_for_caller(self) -> None:
        pass

    def is_caller_done(self) -> bool:
        return True

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        raise NotImplementedError

    scatter = gather

    def stage(self, copies: Iterable[BlockCopy], num_payloads: int, payload_bytes: int) -> ModelledPayloads:
        num_bytes = num_payloads * payload_bytes
        return ModelledPayloads(self.engine, num_bytes, self.table(copies, num_bytes))

    def table(self, copies: Iterable[BlockCopy], num_bytes: int) -> float:
        """Tabulate and launch; returns when it is done on the device."""
        PayloadTable(copies, self._pooled, num_bytes)
        call_driver()
        return time.perf_counter() + num_bytes / DEVICE_GB_PER_S / 1e9

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        call_driver()
        num_bytes = len(payloads) * payloads[0].nbytes
        end = self.engine.copy(num_bytes, 1, time.perf_counter())
        self.table(copies, num_bytes)

        def land(is_intact: Callable[[Sequence[PartChecksums]], bool]) -> bool:
            until(end + num_bytes / DEVICE_GB_PER_S / 1e9 + WAKE_S)
            assert is_intact(sums(payloads)), "a header is not that of its payload"
            until(time.perf_counter() + CALL_S + num_bytes / DEVICE_GB_PER_S / 1e9 + WAKE_S)
            return True

        return land


def sums(payloads: Sequence[Bytes]) -> list[PartChecksums]:
    return [PartChecksums(bytes(8 * (payload.nbytes // PART_BYTES))) for payload in payloads]


@contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    limits = replace(Limits(), lease_share=0.5, reserve_share=0.5)  # in an arena of few prompts
    settings = Settings(memory=2 << 30, socket=folder / "kv.sock", limits=limits)
    process = multiprocessing.get_context("spawn").Process(target=run, args=(settings,))
    process.start()
    try:
        connected(settings.socket).close()
        yield settings.socket
    finally:
        process.terminate()
        process.join()


def connected(socket: Path) -> Client:
    until_s = time.monotonic() + 60
    while True:
        try:
            return Client(socket)
        except ServerError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def engines() -> Iterator[tuple[ModelSpec, EngineMemory]]:
    """Models, and memory as vLLM would allocate it, which nothing touches."""
    blocks = 1 + TOKENS // BLOCK
    gqa = assemble("gqa", [(GQA(), LayerRequest(layer, heads=8)) for layer in range(32)])
    both = {layer: np.empty((blocks, 2, BLOCK, 8, 128), np.int16) for layer in range(32)}
    tensors = {(layer, role): both[layer][:, i] for layer in both for i, role in enumerate(("key", "value"))}
    yield gqa, described(gqa, tensors)
    mla = assemble("mla", [(MLA(), LayerRequest(layer)) for layer in range(61)])
    yield mla, described(mla, {(layer, "latent"): np.empty((blocks, BLOCK, 576), np.int16) for layer in range(61)})


def described(spec: ModelSpec, tensors: dict[tuple[int, str], NDArray[np.int16]]) -> EngineMemory:
    ((tag, _),) = spec.groups().items()
    tables = {(layer, tag): TableUse("pages", BLOCK) for layer, _ in tensors}
    return EngineMemory.of_tensors({(layer, tag, role): tensor for (layer, role), tensor in tensors.items()}, tables)


def measure(spec: ModelSpec, memory: EngineMemory, socket: Path, rounds: int) -> Iterator[dict[str, object]]:
    schema, copier = Schema.of(spec, chunk_tokens=CHUNK), ModelledCopier(memory.pools)  # type: ignore[arg-type]
    pages, store, engine = PagePayloads(schema, memory, copier), RemoteStore(schema, connected(socket)), copier.engine
    table = {"pages": np.random.default_rng(0).permutation(np.arange(1, 1 + TOKENS // BLOCK)).astype(np.int32)}
    num_bytes = CHUNKS * sum(shard.payload_bytes for shard in schema.shards)
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def timed(what: str, work: Callable[[], object]) -> None:
        engine.start()
        began = time.perf_counter()
        work()
        ended = time.perf_counter()
        found[what].append((ended - began, engine.first - began, engine.idle, ended - engine.free_at))

    def save() -> None:
        assert not store.save(prompts[0], pages.source(table)).dropped

    def load(hit: RemoteHit | None = None) -> None:
        assert store.load(hit or store.lookup(prompts[0]), pages.sink(table)) == TOKENS

    def save_all() -> None:
        saves = [store.submit_save(prompt, pages.source(table)) for prompt in prompts]
        assert not sum(save.result().dropped for save in saves)

    def load_all() -> None:
        lookups = [store.submit_lookup([prompt]) for prompt in prompts]
        loads = [store.submit_load(lookup.result()[0], pages.sink(table)) for lookup in lookups]
        assert [each.result() for each in loads] == [TOKENS] * PROMPTS

    for number in range(rounds):
        prompts = [store.prompt([number, other, *range(TOKENS)], Namespace("bench")) for other in range(PROMPTS)]
        timed("save", save)
        timed("load", load)
        timed("load of a hit found before", partial(load, store.lookup(prompts[0])))
        store.client.ask(protocol.Clear(), protocol.ClearReply)
        timed("saves at once", save_all)
        timed("loads at once", load_all)
        store.client.ask(protocol.Clear(), protocol.ClearReply)
    store.close()
    for what, times in found.items():
        taken, before, idle, behind = (1e3 * statistics.median(column) for column in zip(*times[2:], strict=True))
        count = PROMPTS if "once" in what else 1
        yield {
            "claim": f"{what} through the daemon, {spec.model_type}, {CHUNKS} chunks, copies modelled",
            "share": round(count * num_bytes / GB_PER_S / 1e6 / taken, 3), "ms": round(taken, 2),
            "before": round(before, 2), "idle": round(idle, 2), "behind": round(behind, 2),
        }  # fmt: skip


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder)) as socket:
        for spec, memory in engines():
            for line in measure(spec, memory, socket, rounds):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
