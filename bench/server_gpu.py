"""On an H200: how fast an engine's pages go to the daemon and back, checks included; the goal is .95 of a flat copy.

Tensors in vLLM's layouts, blocks of 16 tokens all over them, 16 chunks of 256 tokens: `[blocks, 2, tokens, heads, dim]`
of 32 layers and of 80, and latents `[blocks, tokens, 576]` of 61. One save; one lookup and load; and one load of a hit
that was found before, as a worker loads what its scheduler looked up. From the call until all is there, checksums
included; the ceiling is one flat copy of as many bytes between the device and pinned memory, in turns.
Then as an engine does it: eight prompts of that length submitted at once, until the last one is there.
The peer is LMCache 0.5.6, whose figures are of its kernels alone, without a server, on another machine of the kind.

Run: PYTHONPATH=src:. python3 -m bench.server_gpu [rounds [seconds that the daemon polls after a request]]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_models import timed
from bench.server import HERE
from bench.transfer import PEERS, tell
from kvweave.errors import ServerError
from kvweave.server import Client, RemoteStore, Settings, protocol
from kvweave.server.remote_hit import RemoteHit
from kvweave.server.run import run
from kvweave.spec import ModelSpec
from kvweave.store import EngineMemory, HashedPrompt, PagePayloads, Schema, TableUse
from kvweave.tensor import GQA, MLA, LayerRequest, assemble
from kvweave.transfer.payload_copier import payload_copier

CHUNKS, CHUNK, BLOCK, GOAL = 16, 256, 16, 0.95
PROMPTS = 8
TOKENS = CHUNKS * CHUNK
PEER_NAMES = {"gqa": "gqa", "mla": "mla+indexer"}


@contextmanager
def daemon(folder: Path, poll_s: float) -> Iterator[Path]:
    settings = Settings(memory=16 << 30, socket=folder / "kv.sock", poll_s=poll_s)
    process = multiprocessing.get_context("spawn").Process(target=run, args=(settings,))
    process.start()
    try:
        connected(settings.socket).close()
        yield settings.socket
    finally:
        process.terminate()
        process.join()


def connected(socket: Path) -> Client:
    """A client whose arena is registered for DMA."""
    until = time.monotonic() + 60
    while True:
        try:
            client = Client(socket)
            assert client.register(), "the arena is not registered for DMA"
        except ServerError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return client


def random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << 15, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)


def engines() -> dict[str, tuple[ModelSpec, EngineMemory]]:
    """Models, and tensors as vLLM would allocate them."""
    blocks = 1 + 2 * TOKENS // BLOCK
    found = {}
    for name, layers in (("gqa", 32), ("gqa of 80 layers", 80)):
        spec = assemble("gqa", [(GQA(), LayerRequest(layer, heads=8)) for layer in range(layers)])
        both = {layer: random(blocks, 2, BLOCK, 8, 128) for layer in range(layers)}
        planes = {(layer, role): both[layer][:, i] for layer in both for i, role in enumerate(("key", "value"))}
        found[name] = spec, described(spec, planes)
    spec = assemble("mla", [(MLA(), LayerRequest(layer)) for layer in range(61)])
    latents = {(layer, "latent"): random(blocks, BLOCK, 576) for layer in range(61)}
    return found | {"mla": (spec, described(spec, latents))}


def described(spec: ModelSpec, tensors: dict[tuple[int, str], torch.Tensor]) -> EngineMemory:
    ((tag, _),) = spec.groups().items()
    tables = {(layer, tag): TableUse("pages", BLOCK) for layer, _ in tensors}
    return EngineMemory.of_tensors({(layer, tag, role): tensor for (layer, role), tensor in tensors.items()}, tables)


def measure(name: str, spec: ModelSpec, memory: EngineMemory, socket: Path, rounds: int) -> None:
    schema = Schema.of(spec, chunk_tokens=CHUNK)
    pages = PagePayloads(schema, memory, payload_copier(memory.pools))
    store = RemoteStore(schema, connected(socket))
    order = np.random.default_rng(0).permutation(np.arange(1, 1 + 2 * TOKENS // BLOCK)).astype(np.int32)
    at, to = ({"pages": order[part::2][: TOKENS // BLOCK]} for part in range(2))
    num_bytes = CHUNKS * sum(shard.payload_bytes for shard in schema.shards)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        prompt, *others = (store.prompt([number, other, *range(TOKENS)], HERE) for other in range(1 + PROMPTS))
        times["flat store"].append(timed(partial(host.copy_, device, non_blocking=True)))
        times["store"].append(timed(partial(store.save, prompt, pages.source(at))))
        times["flat load"].append(timed(partial(device.copy_, host, non_blocking=True)))
        times["load"].append(timed(partial(look_up_and_load, store, prompt, pages, to)))
        times["hit load"].append(timed(partial(load, store, store.lookup(prompt), pages, to)))
        if not number:
            check(pages, schema, at, to)
        times["stores"].append(timed(partial(store_all, store, others, pages, at)) / PROMPTS)
        times["loads"].append(timed(partial(load_all, store, others, pages, to)) / PROMPTS)
        store.client.ask(protocol.Clear(), protocol.ClearReply)
    speed = {what: num_bytes / statistics.median(taken[2:]) / 1e9 for what, taken in times.items()}
    for what in ("store", "load"):
        peer = PEERS.get((PEER_NAMES.get(name, ""), CHUNKS), {}).get(what)
        claim = f"{what} through the daemon, {name}, {CHUNKS} chunks ({num_bytes / 1e6:.0f} MB)"
        tell(claim, speed[what], speed[f"flat {what}"], GOAL, peer)
        if what == "load":
            tell(f"{claim}, found before", speed["hit load"], speed["flat load"], GOAL, peer)
        tell(f"{claim}, {PROMPTS} prompts at once", speed[f"{what}s"], speed[f"flat {what}"], GOAL, peer)
    store.close()


def look_up_and_load(store: RemoteStore, prompt: HashedPrompt, pages: PagePayloads, to: dict[str, Any]) -> None:
    load(store, store.lookup(prompt), pages, to)


def load(store: RemoteStore, hit: RemoteHit, pages: PagePayloads, to: dict[str, Any]) -> None:
    found = store.load(hit, pages.sink(to))
    assert found == TOKENS, f"{found} of {TOKENS} tokens"


def store_all(store: RemoteStore, prompts: Sequence[HashedPrompt], pages: PagePayloads, at: dict[str, Any]) -> None:
    saves = [store.submit_save(prompt, pages.source(at)) for prompt in prompts]
    assert not sum(save.result().dropped for save in saves)


def load_all(store: RemoteStore, prompts: Sequence[HashedPrompt], pages: PagePayloads, to: dict[str, Any]) -> None:
    lookups = [store.submit_lookup([prompt]) for prompt in prompts]
    loads = [store.submit_load(lookup.result()[0], pages.sink(to)) for lookup in lookups]
    assert [load.result() for load in loads] == [TOKENS] * len(prompts)


def check(pages: PagePayloads, schema: Schema, at: dict[str, Any], to: dict[str, Any]) -> None:
    """What came is what went."""
    one, other = pages.source(at), pages.source(to)
    for shard in schema.shards:
        assert np.array_equal(one(shard, CHUNKS - 1), other(shard, CHUNKS - 1)), shard.tag


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    poll_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder), poll_s) as socket:
        for name, (spec, memory) in engines().items():
            measure(name, spec, memory, socket, rounds)


if __name__ == "__main__":
    main()
