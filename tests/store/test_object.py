"""The object tier keeps its contract over a local folder and in memory; servers elsewhere speak the same protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import TierError
from kvweave.store import Tier
from tests.store.contract import KeepingContract, TierContract, key, put
from tests.store.faults import FaultContract

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvweave[object]'")

from kvweave.store.objects import ObjectTier  # noqa: E402


class TestFolder(TierContract, KeepingContract, FaultContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(f"file://{tmp_path}")

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Tier]:
        return lambda: ObjectTier(f"file://{tmp_path}")


class TestMemory(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return ObjectTier(obstore.store.MemoryStore())


def test_tenants_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}")
    put(tier, 7)
    path = next(path for path in tmp_path.rglob("*") if path.is_file())
    assert path.relative_to(tmp_path).parts == (key(7)[:8].hex(), key(7)[8:40].hex(), key(7)[40:].hex())


def test_a_bucket_that_is_not_there_is_a_tier_error() -> None:
    account = {"access_key_id": "a", "secret_access_key": "b", "region": "x", "endpoint": "http://127.0.0.1:9"}
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True}}
    tier = ObjectTier("s3://nobody/here", **account, **options)
    with pytest.raises(TierError):
        tier.contains([key(1)])
