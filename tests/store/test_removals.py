"""Keys that tiers removed: what a store says is gone is what no tier has any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvweave.errors import TierError
from kvweave.integrations.keyed_pages import KeyedPool, page_prompt, page_schema, promised
from kvweave.server import RemoteStore
from kvweave.store import BaseStore, DictTier, DiskTier, MemoryTier, Namespace, Store, TierPolicy, TierStack
from kvweave.store.blocking_store import discard
from kvweave.store.removals import FROM_NOW, RemovalLog
from kvweave.store.tier import ALL
from tests.server.models import serving, settings

SCHEMA = page_schema([KeyedPool("kv", 4096)])
NAMES = [bytes([number]) * 32 for number in range(64)]
ROOM = 10 * 8192
"""Ten blobs: a sector of header, a sector of payload."""


def keys(*numbers: int) -> set[bytes]:
    return {*page_prompt([NAMES[number] for number in numbers], Namespace("m")).keys(SCHEMA.ids)}


def save(store: BaseStore[Any], *numbers: int) -> None:
    for number in numbers:
        prompt = page_prompt([NAMES[number]], Namespace("m"))
        store.save(prompt, lambda _, __: np.full(4096, 7, np.uint8))


def removed(store: BaseStore[Any], after: int) -> tuple[int, set[bytes]]:
    found = store.submit_removed(after).result(10)
    assert found.complete
    return found.number, {*found.keys}


def test_a_log_says_what_came_after_a_number_until_it_has_forgotten_it() -> None:
    log = RemovalLog(most=4)
    assert log.since(FROM_NOW) == (0, [], True)
    log.add([b"a", b"b", b"c"])
    assert log.since(1) == (3, [b"b", b"c"], True)
    log.add([b"d", b"e"])
    assert log.since(1) == (5, [b"b", b"c", b"d", b"e"], True)
    assert not log.since(0).complete
    assert not log.since(6).complete


def test_what_is_evicted_deleted_or_cleared_is_removed_and_what_another_tier_has_is_not(tmp_path: Path) -> None:
    near, far = MemoryTier(ROOM), DiskTier(tmp_path, 4 * ROOM)
    through = TierPolicy(inline=True)
    with Store(SCHEMA, TierStack((near, through), (far, through))) as store:
        number, gone = removed(store, FROM_NOW)
        assert not gone
        save(store, *range(20))
        number, gone = removed(store, number)
        assert near.stats().evicted >= 10
        assert not gone
        far.delete([*keys(3, 19)])
        number, gone = removed(store, number)
        assert gone == keys(3)  # 19 is in memory
        near.clear(ALL)
        number, gone = removed(store, number)
        assert gone == keys(19)


def test_a_damaged_blob_is_removed(tmp_path: Path) -> None:
    with Store(SCHEMA, TierStack((DiskTier(tmp_path, ROOM), TierPolicy(inline=True)))) as store:
        number, _ = removed(store, FROM_NOW)
        save(store, 0, 1)
        (file,) = tmp_path.glob("blobs-0")
        content = bytearray(file.read_bytes())
        content[content.index(bytes([7]) * 4096)] ^= 1
        file.write_bytes(content)
        assert store.load(promised(store, page_prompt(NAMES[:1], Namespace("m"))), discard) == 0
        assert removed(store, number)[1] == keys(0)


def test_a_daemon_says_what_left_its_arena(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=ROOM)) as daemon, RemoteStore(SCHEMA, daemon.settings.socket) as store:
        number, gone = removed(store, FROM_NOW)
        assert not gone
        save(store, *range(12))
        number, gone = removed(store, number)
        assert gone == keys(0, 1)
        assert removed(store, number) == (number, set())


def test_after_another_start_of_the_daemon_nothing_is_known_to_be_there(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=ROOM)) as daemon:
        store = RemoteStore(SCHEMA, daemon.settings.socket)
        number, _ = removed(store, FROM_NOW)
    with serving(settings(tmp_path, memory=ROOM)):
        assert not store.submit_removed(number).result(10).complete
        store.close()


@pytest.mark.parametrize("most", [1, 3])
def test_a_write_that_a_tier_refuses_is_removed(most: int) -> None:
    """Whoever queued it may have said that it is stored."""
    log = RemovalLog()
    stack = TierStack((MemoryTier(4096), TierPolicy(inline=True)))
    with Store(SCHEMA, stack) as store:
        stack.follow_removals(log)
        save(store, *range(most))
    assert {*log.since(0).keys} == keys(*range(most))


class Hanging(DictTier):
    """Answers lookups when it is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fine = True

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        if not self.is_fine:
            raise TierError("no answer")
        return super().contains(keys)


def hanging_stack() -> tuple[Hanging, TierStack]:
    tier = Hanging()
    return tier, TierStack((tier, TierPolicy(retries=0, failures=100)))


def test_what_a_tier_behind_a_daemon_does_not_say_is_not_known_to_be_gone(tmp_path: Path) -> None:
    tier, stack = hanging_stack()
    wish = settings(tmp_path, memory=ROOM)
    with serving(wish, stack) as daemon, RemoteStore(SCHEMA, daemon.settings.socket) as store:
        number, _ = removed(store, FROM_NOW)
        save(store, *range(12))
        assert store.flush()
        tier.delete([*keys(0)])
        tier.is_fine = False
        assert removed(store, number) == (number, set())
        tier.is_fine = True
        assert removed(store, number)[1] == keys(0)


def test_what_an_embedded_tier_does_not_say_is_not_known_to_be_gone() -> None:
    tier, stack = hanging_stack()
    near = TierStack((MemoryTier(ROOM), TierPolicy(inline=True)), (tier, TierPolicy(retries=0, failures=100)))
    stack.close()
    with Store(SCHEMA, near) as store:
        number, _ = removed(store, FROM_NOW)
        save(store, *range(12))
        tier.delete([*keys(0)])
        tier.is_fine = False
        assert removed(store, number) == (number, set())
        tier.is_fine = True
        assert removed(store, number)[1] == keys(0)
