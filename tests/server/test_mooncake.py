"""A Mooncake cluster behind a daemon, which lends it memory like every other of its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvweave.server import protocol
from tests.server.models import POINTS, prompt, serving, settings, store, verify
from tests.store.models import truth
from tests.store.servers import NO_MOONCAKE, MooncakeMaster

pytestmark = pytest.mark.slow
pytest.importorskip("mooncake.store", reason=NO_MOONCAKE, exc_type=ImportError)


def test_what_left_memory_is_brought_back_from_the_cluster_and_can_be_cleared(tmp_path: Path) -> None:
    master = MooncakeMaster()
    with master.running(), serving(settings(tmp_path, mooncake=f"127.0.0.1:{master.port}")) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        assert client.flush()
        daemon.state.arena.clear()
        assert client.load(client.lookup(prompt()), verify) == 1024
        assert daemon.report().tiers[1].hits > 0
        assert client.describe().tiers[1].kind == "mooncake"
        cleared = client.client.ask(protocol.Clear(), protocol.ClearReply)
        assert min(tier.entries for tier in cleared.tiers) > 0
        assert client.lookup(prompt()).position == 0
        client.close()
