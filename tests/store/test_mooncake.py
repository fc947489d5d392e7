"""The Mooncake tier keeps its contract against a real master and store, on loopback TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvweave.store import Tier
from tests.store.contract import TierContract, got, put, value
from tests.store.faults import FaultContract
from tests.store.servers import NO_MOONCAKE, MooncakeMaster

pytestmark = pytest.mark.slow
pytest.importorskip("mooncake.store", reason=NO_MOONCAKE, exc_type=ImportError)

from kvweave.store.mooncake import MooncakeTier  # noqa: E402


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
