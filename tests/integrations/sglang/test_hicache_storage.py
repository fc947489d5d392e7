"""The storage backend against SGLang's real classes: its factory, its host pools, its hashes, its own file backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.sglang.host_pools import (
    PAGE,
    attached,
    import_sglang,
    mamba_pool,
    mha_pool,
    mla_pool,
    storage_config,
)

pytestmark = pytest.mark.slow
TOKENS = list(range(100, 124))


@pytest.fixture(scope="module")
def sgl() -> Any:
    return import_sglang()


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    return {"store": f"{tmp_path / 'store'}:50MiB"}


@pytest.fixture
def backend(sgl: Any, place: dict[str, str]) -> Iterator[Any]:
    made = attached(sgl, place, {"kv": mha_pool(sgl), "mamba": mamba_pool(sgl)})
    yield made
    made.close()


def page_hashes(
    sgl: Any, tokens: list[int] = TOKENS, salt: str | None = None, extra_key: str | None = None
) -> list[str]:
    """As SGLang's controllers make them."""
    return list(sgl.get_storage_hash_str(sgl.RadixKey(tokens, extra_key=extra_key, cache_salt=salt), page_size=PAGE))


def indices(*pages: int, size: int = PAGE) -> Any:
    import torch

    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_come_back_into_other_places_after_a_restart(sgl: Any, place: dict[str, str], layout: str) -> None:
    written, keys = mha_pool(sgl, layout), page_hashes(sgl)
    backend = attached(sgl, place, {"kv": written})
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys[:4], indices(5, 1, 3, 0)) == [True] * 4
    backend.close()

    read = mha_pool(sgl, layout, seed=1)
    backend = attached(sgl, place, {"kv": read})
    assert backend.batch_exists(keys) == 4
    assert backend.exists(keys[3])
    before = read.kv_buffer.clone()
    assert backend.batch_get_v1(keys[:5], indices(0, 1, 2, 3, 4)) == [True] * 4 + [False]
    for page, origin in enumerate((5, 1, 3, 0)):
        assert read.get_data_page(page * PAGE).equal(written.get_data_page(origin * PAGE))
    for page in (4, 5):
        assert read.get_data_page(page * PAGE).equal(_page_of(before, read, page))
    backend.close()


def _page_of(buffer: Any, pool: Any, page: int) -> Any:
    """A page as it was in an earlier copy of a pool's memory."""
    now, pool.kv_buffer = pool.kv_buffer, buffer
    found = pool.get_data_page(page * PAGE)
    pool.kv_buffer = now
    return found


def test_states_and_latents_come_back_to_the_bit(sgl: Any, place: dict[str, str]) -> None:
    latents, states, keys = mla_pool(sgl), mamba_pool(sgl), page_hashes(sgl)
    backend = attached(sgl, place, {"kv": latents, "mamba": states}, is_mla_model=True)
    transfers = [
        sgl.PoolTransfer(sgl.PoolName.KV, host_indices=indices(2, 4), keys=keys[:2]),
        sgl.PoolTransfer(sgl.PoolName.MAMBA, host_indices=indices(7, size=1), keys=keys[1:2]),
    ]
    assert backend.batch_set_v2(transfers) == {"kv": [True, True], "mamba": [True]}
    backend._store.flush()  # the disk has it
    expected = [latents.get_data_page(16).clone(), states.get_data_page(7).clone()]
    latents.kv_buffer.zero_(), [buffer.zero_() for buffer in states.kv_buffer]
    transfers[0].host_indices, transfers[1].host_indices = indices(0, 1), indices(3, size=1)
    assert backend.batch_get_v2(transfers) == {"kv": [True, True], "mamba": [True]}
    assert latents.get_data_page(4).equal(expected[0])
    assert states.get_data_page(3).equal(expected[1])
    backend.close()


def test_the_set_of_restorable_lengths_is_that_of_the_file_backend(sgl: Any, tmp_path: Path, backend: Any) -> None:
    """SGLang's own answer, for random pages of both pools."""
    config = storage_config(sgl, {"file_storage_path": str(tmp_path / "files")})
    pools = {sgl.PoolName.KV: backend.mem_pool_host, sgl.PoolName.MAMBA: backend.registered_pools[sgl.PoolName.MAMBA]}
    random = np.random.default_rng(16)
    for case in range(12):
        peer = sgl.HiCacheFile(config)
        peer.registered_pools = pools
        keys = page_hashes(sgl, [case, *TOKENS[1:]])
        for name, size, chance in ((sgl.PoolName.KV, PAGE, 0.9), (sgl.PoolName.MAMBA, 1, 0.6)):
            kept = [page for page in range(6) if random.random() < chance]
            for page in kept:
                transfer = sgl.PoolTransfer(name, host_indices=indices(page, size=size), keys=[keys[page]])
                assert [*peer.batch_set_v2([transfer]).values()] == [*backend.batch_set_v2([transfer]).values()]
        backend._store.flush()
        for trailing in (1, 2):
            wanted = sgl.PoolTransfer(
                sgl.PoolName.MAMBA, keys=keys[:trailing], hit_policy=sgl.PoolHitPolicy.TRAILING_PAGES
            )
            for transfers in ([wanted], [sgl.PoolTransfer(sgl.PoolName.MAMBA)], None):
                ours, theirs = (each.batch_exists_v2(keys, transfers) for each in (backend, peer))
                assert ours.kv_hit_pages == theirs.kv_hit_pages
                assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
                assert theirs.extra_pool_hit_pages.items() <= ours.extra_pool_hit_pages.items()


def test_salts_and_adapters_share_nothing(sgl: Any, backend: Any) -> None:
    mine = page_hashes(sgl, salt="a", extra_key="lora-1")
    assert all(backend.batch_set_v1(mine, indices(*range(6))))
    backend._store.flush()
    assert backend.batch_exists(mine) == 6
    assert backend.batch_get_v1(mine[3:], indices(0, 1, 2)) == [True] * 3
    others: list[dict[str, Any]] = [
        {},
        {"salt": "b", "extra_key": "lora-1"},
        {"salt": "a", "extra_key": "lora-2"},
        {"salt": "a"},
    ]
    assert [backend.batch_exists(page_hashes(sgl, **other)) for other in others] == [0, 0, 0, 0]


def test_another_rank_layout_model_or_tenant_shares_nothing(sgl: Any, place: dict[str, str]) -> None:
    keys = page_hashes(sgl)
    first = attached(sgl, place, {"kv": mha_pool(sgl)})
    assert all(first.batch_set_v1(keys, indices(*range(6))))
    first.close()

    def found(layout: str = "layer_first", settings: Any = place, **facts: Any) -> int:
        made = attached(sgl, settings, {"kv": mha_pool(sgl, layout)}, **facts)
        number = made.batch_exists(keys)
        made.close()
        return int(number)

    assert found() == 6
    assert found("page_first") == 0
    assert found(tp_size=2, tp_rank=1) == found(pp_size=2) == found(model="other") == 0
    assert found(settings={**place, "tenant": "t"}) == found(settings={**place, "weights": "w"}) == 0


def test_a_damaged_page_ends_a_load_before_it(sgl: Any, tmp_path: Path, backend: Any) -> None:
    import torch

    keys = page_hashes(sgl)
    backend.mem_pool_host.kv_buffer.fill_(0.0)
    for page in range(6):
        flat = torch.full_like(backend.mem_pool_host.get_data_page(0), page + 1.5)
        backend.mem_pool_host.set_from_flat_data_page(page * PAGE, flat)
    assert all(backend.batch_set_v1(keys, indices(*range(6))))
    backend._store.flush()
    pattern = np.full(16, 3.5, np.float32).tobytes()
    (file,) = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and pattern in path.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(pattern)] ^= 1
    file.write_bytes(content)
    assert backend.batch_get_v1(keys, indices(*range(6))) == [True, True, False, False, False, False]


def test_what_is_wrong_is_a_miss_and_the_engine_goes_on(sgl: Any, backend: Any, monkeypatch: Any) -> None:
    keys = page_hashes(sgl)
    assert backend.batch_set_v1(keys, indices(0)) == [False] * 6
    late = sgl.PoolTransfer(sgl.PoolName.SWA, host_indices=indices(0), keys=keys[:1])
    assert backend.batch_set_v2([late]) == {"swa": [False]}
    assert all(backend.batch_set_v1(keys, indices(*range(6))))
    assert not backend.clear()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    for name in ("load", "_lookup_all", "_save"):
        monkeypatch.setattr(backend._store, name, broken)
    assert backend.batch_get_v1(keys, indices(*range(6))) == backend.batch_set_v1(keys, indices(*range(6)))
    assert backend.batch_exists(keys) == 0


def test_settings_are_checked_by_name(sgl: Any) -> None:
    from kvweave.errors import KVWeaveError

    for wrong in ({"stor": "x"}, {"store": "x", "socket": "y"}, {}, {"store": 1}):
        with pytest.raises(KVWeaveError):
            attached(sgl, wrong, {"kv": mha_pool(sgl)})


def test_ranks_at_one_daemon_share_latents_and_no_split_heads(sgl: Any, tmp_path: Path) -> None:
    from tests.server.models import serving, settings

    with serving(settings(tmp_path)) as daemon:
        place, keys = {"socket": str(daemon.settings.socket)}, page_hashes(sgl)
        for make, is_mla_model, expected in ((mla_pool, True, 6), (mha_pool, False, 0)):
            pools = [make(sgl, seed=rank) for rank in range(2)]
            ranks = [
                attached(sgl, place, {"kv": pool}, tp_rank=rank, tp_size=2, is_mla_model=is_mla_model)
                for rank, pool in enumerate(pools)
            ]
            assert all(ranks[0].batch_set_v1(keys, indices(*range(6))))
            assert ranks[1].batch_exists(keys) == expected
            assert ranks[1].batch_get_v1(keys[2:4], indices(0, 1)) == [bool(expected)] * 2
            if expected:
                assert pools[1].get_data_page(0).equal(pools[0].get_data_page(2 * PAGE))
            for rank in ranks:
                rank.close()
