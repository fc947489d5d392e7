"""Nothing is allocated by a number that somebody gave without a look at what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvweave import host_memory
from kvweave.errors import OutOfMemory
from kvweave.host_memory import available_bytes, check_memory

GIB = 1 << 30


def machine(root: Path, available: int, group: str = "0::/\n", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_groups_has_what_it_says(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 8 * GIB)) == 8 * GIB


def test_a_group_around_the_process_allows_less(tmp_path: Path) -> None:
    root = machine(
        tmp_path, 8 * GIB, "0::/a/b\n",
        a__memory_max=f"{2 * GIB}\n", a__memory_current=f"{GIB}\n",
        a__memory_stat=f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n",
        a__b__memory_max="max\n", a__b__memory_current="5\n",
    )  # fmt: skip
    assert available_bytes(root) == GIB + GIB // 2, "its page cache can be given back"


def test_an_older_kernels_group_is_read_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path, 8 * GIB, "5:cpu,cpuacct:/x\n4:memory:/x\n",
        memory__x__memory_limit_in_bytes=f"{GIB}\n", memory__x__memory_usage_in_bytes=f"{GIB // 2}\n",
    )  # fmt: skip
    assert available_bytes(root) == GIB // 2


def test_where_nobody_knows_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes(tmp_path) is None
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    check_memory("arena", 1 << 60)


def test_more_than_there_is_less_a_margin_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4 * GIB)
    check_memory("arena", 3 * GIB)
    with pytest.raises(OutOfMemory, match=r"arena: cannot allocate \d+ bytes \(4.00 GiB .* 256.00 MiB stay free"):
        check_memory("arena", 4 * GIB - (200 << 20))


def test_tiers_arenas_and_pools_all_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvweave.plan import Place
    from kvweave.server.shared_arena import SharedArena
    from kvweave.store import MemoryTier
    from kvweave.tensor.memory import Memory

    monkeypatch.setattr(host_memory, "available_bytes", lambda: 64 << 20)
    for make in (
        lambda: MemoryTier("1GiB"),
        lambda: SharedArena(1 << 30),
        lambda: Memory().take(1 << 30, Place.HOST, "pool 'full'"),
        lambda: Memory("cpu").take(1 << 30, Place.DEVICE, "pool 'full'"),
    ):
        with pytest.raises(OutOfMemory, match=r"64.00 MiB of host memory"):
            make()


def test_pools_of_one_plan_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvweave import Layer, LayerCache, ModelSpec, Role, make_plan
    from kvweave.plan import Place, PoolRequest
    from kvweave.spec import DType, Full, Window
    from kvweave.tensor import Arena

    kept = (Role("key", (1, 64), DType.BFLOAT16), Role("value", (1, 64), DType.BFLOAT16))
    layers = (Layer((LayerCache("full", Full(), kept),)), Layer((LayerCache("window", Window(64), kept),)))
    pools = {tag: PoolRequest(pages=5000, place=Place.HOST) for tag in ("full", "window")}
    made = make_plan(ModelSpec("m", layers), "1MB", own_pools=pools)
    sizes = [pool.num_bytes for pool in made.pools]
    assert min(sizes) > 1 << 20
    monkeypatch.setattr(host_memory, "available_bytes", lambda: int(1.5 * max(sizes)))
    with pytest.raises(OutOfMemory, match="pool 'window'"):
        Arena(made)
