"""Two processes share KV through one daemon, without torch or a GPU. Needs kvweave[cli,server].

The daemon owns an arena in shared memory. The first process computes a prompt and saves it; the second one, another
"engine" with other block sizes if it likes, finds it, takes what it needs, and computes the rest.

Run: python examples/two_processes.py
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import kvweave as kw
from kvweave.server import RemoteStore
from kvweave.spec import DType
from kvweave.store import Namespace, Schema, model_digest

TOKENS = list(range(4000))


def model() -> kw.ModelSpec:
    rows = tuple(kw.Role(name, (4, 16), DType.BFLOAT16) for name in ("key", "value"))
    full, window = kw.LayerCache("full", kw.Full(), rows), kw.LayerCache("window", kw.Window(512), rows)
    return kw.ModelSpec("example", (kw.Layer((full,)), kw.Layer((window,))))


def engine(name: str, socket: str) -> None:
    """What an engine does with a prompt: look it up, load what is there, compute the rest, save it."""
    spec = model()
    here = Namespace(model_digest(spec), weights="main@3f2a")
    store = RemoteStore(Schema.of(spec, parts=1), socket, model="example")
    prompt = store.prompt(TOKENS, here)
    hit = store.lookup(prompt)
    loaded: list[int] = []
    position = store.load(hit, lambda row, chunk, payload: loaded.append(payload.nbytes))
    print(f"{name}: {position:,} of {len(TOKENS):,} tokens found, {sum(loaded):,} bytes loaded", flush=True)
    saved = store.save(prompt, lambda row, chunk: np.full(row.payload_bytes, chunk, np.uint8))
    print(f"{name}: {saved.stored} blobs saved, {saved.present} were there", flush=True)
    store.close()


@contextmanager
def daemon(socket: Path) -> Iterator[None]:
    """`kvweave serve`, until the end of the block."""
    command = [sys.executable, "-m", "kvweave", "serve", "--memory", "64MiB", "--socket", str(socket)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not socket.exists() and process.poll() is None:
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder) / "kv.sock"):
        for name in ("first", "second"):
            process = multiprocessing.get_context("spawn").Process(target=engine, args=(name, f"{folder}/kv.sock"))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
