"""The Mooncake tier keeps its contract against a real master and store, on loopback TCP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvweave.errors import TierError
from kvweave.store import Tier
from kvweave.store.tier import ABSENT
from tests.store.contract import TierContract, got, key, put, value
from tests.store.faults import FaultContract
from tests.store.servers import NO_MOONCAKE, MooncakeMaster

pytestmark = pytest.mark.slow
pytest.importorskip("mooncake.store", reason=NO_MOONCAKE, exc_type=ImportError)

from kvweave.store.mooncake_tier import NO_ROOM, MooncakeTier  # noqa: E402


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    with master.running():
        yield master


@pytest.fixture(scope="module")
def cluster(master: MooncakeMaster) -> Iterator[MooncakeTier]:
    tier = MooncakeTier(f"127.0.0.1:{master.port}", host="127.0.0.1", segment="64MiB", buffer="32MiB")
    yield tier
    tier.close()


class TestMooncake(TierContract, FaultContract):
    @pytest.fixture
    def tier(self, cluster: MooncakeTier) -> Tier:
        cluster.clear()
        return cluster

    def test_closing_twice_is_fine(self, tier: Tier) -> None:
        pytest.skip("all tests share one client, which is closed at their end: joining a cluster takes long")


def test_clearing_leaves_what_others_keep_in_the_cluster(cluster: MooncakeTier) -> None:
    cluster.clear()
    assert cluster._store.put("somebody's", b"value") == 0
    put(cluster, 1, 2)
    assert cluster.clear() == 2
    assert got(cluster, 1) is None
    assert cluster._store.get("somebody's") == b"value"
    put(cluster, 1)
    assert got(cluster, 1) == value(1)


class Counted:
    """A client of the cluster that says how often each of its verbs was used."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, Counter[str]()

    def __getattr__(self, verb: str) -> Any:
        self.asked[verb] += 1
        return getattr(self._store, verb)


def test_values_go_and_come_in_batches(cluster: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 values of 1 MiB, in batches of at most 16 MiB."""
    cluster.clear()
    line, size, numbers = Counted(cluster._store), 1 << 20, range(24)
    monkeypatch.setattr(cluster, "_store", line)
    assert put(cluster, *numbers, length=size) == [True] * 24
    buffers = [np.zeros(size, np.uint8) for _ in range(25)]
    assert cluster.get([key(n) for n in range(25)], buffers) == [size] * 24 + [ABSENT]
    assert all(buffers[n].tobytes() == value(n, size) for n in numbers)
    assert cluster.delete([key(n) for n in range(25)]) == 24
    assert line.asked == {"put_batch": 2, "batch_get_buffer": 2, "batch_is_exist": 1, "batch_remove": 1}


def test_a_cluster_that_does_not_answer_is_an_error_and_no_miss(
    cluster: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Counted(cluster._store)
    monkeypatch.setattr(cluster, "_store", line)
    monkeypatch.setattr(line, "batch_get_buffer", lambda keys: [None] * len(keys), raising=False)
    monkeypatch.setattr(line, "batch_is_exist", lambda keys: [-900] * len(keys), raising=False)
    monkeypatch.setattr(line, "batch_remove", lambda keys, _: [-900] * len(keys), raising=False)
    with pytest.raises(TierError, match="-900"):
        got(cluster, 1)
    with pytest.raises(TierError, match="1 of 1 were not deleted"):
        cluster.delete([key(1)])


def test_a_batch_that_the_cluster_refuses_is_tried_value_by_value(
    cluster: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.clear()
    line = Counted(cluster._store)
    monkeypatch.setattr(cluster, "_store", line)
    monkeypatch.setattr(line, "put_batch", lambda *_: NO_ROOM, raising=False)
    assert put(cluster, 1, 2, 1) == [True] * 3
    assert (got(cluster, 1), got(cluster, 2)) == (value(1), value(2))
    monkeypatch.setattr(line, "put", lambda key, _: NO_ROOM if key.endswith("4") else 0, raising=False)
    assert put(cluster, 3, 4, 5) == [True, False, True]
    monkeypatch.setattr(line, "put", lambda *_: -900, raising=False)
    with pytest.raises(TierError, match="-900"):
        put(cluster, 6)
