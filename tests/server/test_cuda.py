"""On a GPU: the arena is pinned memory for torch, and what is copied from there is what was stored."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvweave[torch]'")
pytest.importorskip("msgspec", reason="msgspec is not installed: pip install 'kvweave[server]'")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvweave.server import Client  # noqa: E402
from tests.server.models import serving, settings  # noqa: E402


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
