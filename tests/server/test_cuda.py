"""On a GPU: the arena is pinned memory for torch, and what is copied from there is what was stored."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvweave[torch]'")
pytest.importorskip("msgspec", reason="msgspec is not installed: pip install 'kvweave[server]'")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvweave.server import Client, RemoteStore  # noqa: E402
from kvweave.store import PagePayloads, Schema  # noqa: E402
from kvweave.transfer.payload_copier import payload_copier  # noqa: E402
from tests.server.models import serving, settings  # noqa: E402
from tests.store.engines import LAYOUTS, SPEC, Engine, Truth  # noqa: E402
from tests.store.models import namespace  # noqa: E402


def test_the_arena_is_pinned_while_its_client_is_open(tmp_path: Path) -> None:
    torch.cuda.init()
    with serving(settings(tmp_path, memory=64 << 20)) as daemon:
        client = Client(tmp_path / "kv.sock")
        until = time.monotonic() + 30
        while not client.is_registered and time.monotonic() < until:
            time.sleep(0.01)
        arena = torch.from_numpy(client.arena)
        assert arena.is_pinned()
        truth = np.random.default_rng(1).integers(0, 256, len(client.arena), np.uint8)
        daemon.state.arena.view(0, len(truth))[:] = truth
        there = torch.empty_like(arena, device="cuda")
        there.copy_(arena, non_blocking=True)
        torch.cuda.synchronize()
        assert (there.cpu().numpy() == truth).all()
        client.close()
        assert not arena.is_pinned()


@pytest.mark.parametrize("inbox", [0, 4 << 20])
def test_pages_of_a_gpu_are_saved_to_the_arena_and_come_straight_out_of_it(tmp_path: Path, inbox: int) -> None:
    schema = Schema.of(SPEC, chunk_tokens=64, parts=2)
    engine, truth = Engine(schema, LAYOUTS[0], 32, 256), Truth(256, 64)
    engine.compute(truth, states=range(4))
    pools = {name: torch.from_numpy(pool).cuda() for name, pool in engine.memory.pools.items()}
    pages = PagePayloads(schema, replace(engine.memory, pools=pools), payload_copier(pools))
    with serving(settings(tmp_path, memory=64 << 20, inbox=inbox)):
        store = RemoteStore(schema, tmp_path / "kv.sock", workers=4)
        assert store.client.register()
        prompt = store.prompt(np.arange(257), namespace(SPEC))
        points = [64, 128, 192, 256]
        assert store.save(prompt, pages.source(engine.tables), points=points).dropped == 0
        for pool in pools.values():
            pool.fill_(0xA5)
        assert store.load(store.lookup(prompt), pages.sink(engine.tables)) == 256
        source = pages.source(engine.tables)
        for number in pages.writes:
            shard = schema.shards[number]
            for chunk in shard.needs(256):
                assert np.array_equal(source(shard, chunk), truth.payload(shard, chunk)), (shard.tag, chunk)
        store.close()
