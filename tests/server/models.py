"""A hybrid model, truth to compare with, and daemons in threads and processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvweave.prefix import TokenIds
from kvweave.server import Daemon, RemoteStore, Settings
from kvweave.store import HashedPrompt, Schema, Shard, TierStack
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes
from tests.store.models import hybrid, namespace, truth

SPEC = hybrid()
SCHEMA = Schema.of(SPEC, parts=4)
TOKENS = np.arange(1025, dtype=np.int32)
POINTS = [512, 1024]
LARGEST = max(blob_bytes(shard) for shard in SCHEMA.shards)


def settings(folder: Path, memory: int = 4 << 20, **more: object) -> Settings:
    return replace(Settings(memory=memory, socket=folder / "kv.sock"), **more)  # type: ignore[arg-type]


@contextmanager
def serving(wish: Settings, backing: TierStack | None = None) -> Iterator[Daemon]:
    """A daemon in a thread of this process."""
    ready: Future[tuple[Daemon, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with Daemon(wish, backing) as daemon:
            stop = asyncio.Event()
            ready.set_result((daemon, asyncio.get_running_loop(), stop))
            await stop.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        daemon, loop, stop = ready.result(30)
        yield daemon
        loop.call_soon_threadsafe(stop.set)
    finally:
        if ready.done() and not ready.exception():
            _, loop, stop = ready.result()
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join(60)


@contextmanager
def spawned(socket: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`kvweave serve` in a process of its own."""
    command = [sys.executable, "-c", "from kvweave.cli import main; main()", "serve", "--socket", str(socket), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        wait_for(socket, process)
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr
        process.stderr.close()


def wait_for(socket: Path, process: subprocess.Popen[str], seconds: float = 30.0) -> None:
    """Until somebody answers there."""
    from kvweave.errors import ServerError
    from kvweave.server import Client

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"the daemon ended with {process.returncode}: {process.communicate()[1]}")
        try:
            Client(socket, arena=False).close()
        except ServerError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the daemon does not answer")


def store(socket: Path, **more: object) -> RemoteStore:
    return RemoteStore(SCHEMA, socket, model="hybrid", **more)  # type: ignore[arg-type]


def prompt(first: int = 0, tenant: str = "") -> HashedPrompt:
    """A prompt of its own for every number."""
    tokens = TOKENS.copy()
    tokens[0] = 5000 + first
    return store_prompt(tokens, tenant)


def store_prompt(tokens: TokenIds, tenant: str = "") -> HashedPrompt:
    from kvweave.store.keys import prompt as make

    return make(tokens, namespace(SPEC, tenant=tenant), SCHEMA.chunk_tokens)


def verify(shard: Shard, chunk: int, found: Bytes) -> None:
    assert (found == truth(shard, chunk)).all(), (shard.tag, chunk)


def prompt_bytes() -> int:
    """What one prompt with its points takes in the arena."""
    from kvweave.store import DictTier, Store, TierPolicy

    twin = Store(SCHEMA, TierStack((DictTier(), TierPolicy(inline=True))))
    twin.save(prompt(), truth, points=POINTS)
    return int(twin.stats().tiers[0].tier.used_bytes or 0)
