"""`kvweave clear`: what a daemon forgets, and that it asks before."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import TierError
from kvweave.server import Disk, RemoteStore
from kvweave.store import DictTier, TierPolicy, TierStack
from kvweave.store.tier import ALL, KeyFilter
from tests.cli.command import Kvweave
from tests.server.models import POINTS, prompt, serving, settings, store
from tests.store.models import truth


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RemoteStore]:
    """Of a daemon with memory and disk, in which two tenants keep a prompt each."""
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))):
        client = store(tmp_path / "kv.sock")
        for tenant in ("team-a", "team-b"):
            client.save(prompt(0, tenant), truth, points=POINTS)
        assert client.flush()
        yield client
        client.close()


@pytest.fixture
def socket(client: RemoteStore, tmp_path: Path) -> tuple[str, str]:
    assert client.lookup(prompt(0, "team-a")).position == 1024
    return "--socket", str(tmp_path / "kv.sock")


def kept(client: RemoteStore) -> list[int]:
    return [client.lookup(prompt(0, tenant)).position for tenant in ("team-a", "team-b")]


class Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_tenant_goes_from_every_tier_and_the_others_stay(
    kvweave: Kvweave, client: RemoteStore, socket: tuple[str, str]
) -> None:
    run = kvweave("clear", "--tenant", "team-a", "--yes", *socket)
    assert (run.code, run.err) == (0, "")
    lines = [line.split() for line in run.out.splitlines()]
    entries = client.report().tiers[0].tier.entries
    assert [["memory", f"{entries}", "done"], ["disk", f"{entries}", "done"]] == lines[-2:]
    assert kept(client) == [0, 1024]


def test_a_model_goes_and_a_wrong_name_is_told_the_right_one(
    kvweave: Kvweave, client: RemoteStore, socket: tuple[str, str]
) -> None:
    run = kvweave("clear", "--model", "hybird", "--yes", *socket)
    assert (run.code, run.out, run.err) == (
        2, "", "kvweave: error: unknown model 'hybird'; did you mean 'hybrid'?\n",
    )  # fmt: skip
    assert kept(client) == [1024, 1024]
    found = kvweave("clear", "--model", "hybrid", "--yes", "--json", *socket).json()
    assert found["entries"] == sum(tier["entries"] for tier in found["tiers"]) > 0
    assert kept(client) == [0, 0]


def test_it_asks_first_and_says_what_it_will_do(
    kvweave: Kvweave, client: RemoteStore, socket: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed in ("n\n", "\n", ""):
        monkeypatch.setattr("sys.stdin", Typed(typed))
        run = kvweave("clear", "--tenant", "team-a", "--model", "hybrid", *socket)
        assert (run.code, run.out) == (1, "")
        assert "Delete everything of tenant 'team-a' of model 'hybrid'? Tiers and their entries: memory (" in run.err
        assert "nothing was deleted" in run.err
    assert kept(client) == [1024, 1024]
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    assert kvweave("clear", *socket).code == 0
    assert kept(client) == [0, 0]


def test_where_nobody_can_be_asked_nothing_goes_without_yes(
    kvweave: Kvweave, client: RemoteStore, socket: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    run = kvweave("clear", *socket)
    assert (run.code, run.out) == (2, "")
    assert "it cannot be asked whether to delete everything: give --yes" in run.err
    assert kept(client) == [1024, 1024]


class Stuck(DictTier):
    """A tier that cannot forget."""

    def clear(self, which: KeyFilter = ALL) -> int:
        raise TierError("it is mounted read-only")


def test_a_tier_that_could_not_is_named_and_the_exit_code_says_so(kvweave: Kvweave, tmp_path: Path) -> None:
    far = TierStack((Stuck("stuck"), TierPolicy(write="back", retries=0)))
    with serving(settings(tmp_path), far):
        run = kvweave("clear", "--yes", "--socket", str(tmp_path / "kv.sock"))
    assert run.code == 1
    assert ["stuck", "0", "it", "is", "mounted", "read-only"] in [line.split() for line in run.out.splitlines()]


def test_a_model_that_nobody_registered_is_no_reason_to_forget_anything(kvweave: Kvweave, tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        run = kvweave("clear", "--yes", "--model", "hybrid", "--socket", str(tmp_path / "kv.sock"))
    assert run.code == 2
    assert "no engine has registered 'hybrid'" in run.err


def test_nobody_there_is_one_line(kvweave: Kvweave, tmp_path: Path) -> None:
    run = kvweave("clear", "--yes", "--socket", str(tmp_path / "nobody"))
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert "no daemon at" in run.err
