"""What a request of 16 chunks takes the daemon until its reply: in one process, without a socket.

Prompts of 128 blobs (32 layers, 8 heads) and of 16 (61 layers of latents) are opened, saved, looked up and released.
What is done after a reply, as noting what a hit uses, is not timed. Medians, in microseconds: with the processor's
caches warm, as one request right after another finds them; and cold, as a request finds them that comes after
milliseconds in which other memory was read.

Run: PYTHONPATH=src:. python3 -m bench.daemon_requests [rounds]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.server import Settings, protocol
from kvweave.server.client_session import ClientSession
from kvweave.server.protocol import Message, packed
from kvweave.server.registered_model import registration
from kvweave.server.server_state import ServerState
from kvweave.server.settings import Limits
from kvweave.server.shared_arena import SharedArena
from kvweave.spec import ModelSpec
from kvweave.store import Namespace, Schema
from kvweave.store.keys import prompt
from kvweave.tensor import GQA, MLA, LayerRequest, assemble

CHUNKS, CHUNK, MEMORY = 16, 256, 2 << 30
SCHEMA = 1
OTHER_BYTES = 192 << 20
"""More than the caches have."""


async def measure(spec: ModelSpec, rounds: int, folder: Path, other: NDArray[np.int64]) -> dict[str, float]:
    """`other` memory is read before each request."""
    limits = replace(Limits(), reserve_share=1.0, lease_share=1.0)
    state = ServerState(Settings(memory=MEMORY, socket=folder / "kv.sock", limits=limits), SharedArena(MEMORY))
    session, schema, times = (
        ClientSession(state),
        Schema.of(spec, chunk_tokens=CHUNK),
        defaultdict[str, list[float]](list),
    )
    handlers = session.handlers()
    pieces = packed(np.argwhere(np.ones((len(schema.shards), CHUNKS))), "<i4")

    async def ask(request: Message) -> None:
        other.sum()
        began = time.perf_counter()
        handlers[type(request)](request)
        times[type(request).__name__.lower()].append(time.perf_counter() - began)
        await asyncio.sleep(0)  # for what follows the reply

    await ask(registration(SCHEMA, "", schema))
    for number in range(rounds):
        hashed = prompt([number, *range(CHUNKS * CHUNK)], Namespace("bench"), CHUNK)
        await ask(protocol.Open(number, SCHEMA, hashed.tenant_id, hashed.num_tokens, hashed.prefixes.tobytes()))
        await ask(protocol.Reserve(number, 1 + number, pieces))
        await ask(protocol.Commit(1 + number))
        await ask(protocol.Lookup(number, 1 + number))
        await ask(protocol.Release([1 + number]))
        await ask(protocol.Close([number]))
        state.arena.clear()
    state.close(1.0)
    return {kind: round(1e6 * statistics.median(taken), 1) for kind, taken in times.items() if len(taken) > 1}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    gqa = assemble("gqa", [(GQA(), LayerRequest(layer, heads=8)) for layer in range(32)])
    mla = assemble("mla", [(MLA(), LayerRequest(layer)) for layer in range(61)])
    other = np.ones(OTHER_BYTES // 8, np.int64)
    with tempfile.TemporaryDirectory() as folder:
        for spec in (gqa, mla):
            for caches, memory in (("warm", other[:0]), ("cold", other)):
                found = asyncio.run(measure(spec, rounds, Path(folder), memory))
                claim = f"requests at the daemon, {spec.model_type}, {CHUNKS} chunks, caches {caches}"
                print(json.dumps({"claim": claim, "unit": "us", **found}), flush=True)


if __name__ == "__main__":
    main()
