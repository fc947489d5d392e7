"""Pages under an engine's own keys: what vLLM's offloading asks of a tier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvweave.integrations.keyed_pages import KeyedPool, page_schema
from kvweave.integrations.vllm.page_store import PageJob, PageStore
from kvweave.store import DictTier, Namespace, Store, TierPolicy, TierStack

ROWS, BYTES = 8, 96
KEYS = [bytes([number]) * 36 for number in range(ROWS)]


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


@pytest.fixture
def store(tier: DictTier) -> Iterator[Store]:
    with Store(page_schema([KeyedPool("page", BYTES)]), TierStack((tier, TierPolicy(inline=True)))) as made:
        yield made


def pages(seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (ROWS, BYTES), np.uint8)


def ended(made: PageStore) -> PageJob:
    made.drain()
    (job,) = made.take_ended()
    return job


def has(made: PageStore, key: bytes) -> bool:
    while (found := made.has(key, "r")) is None:
        made.ask()
        time.sleep(0.001)
    return found


def test_what_was_saved_is_found_and_loaded_into_other_rows(store: Store) -> None:
    writer, reader = (PageStore(store, Namespace("m"), pages(seed)) for seed in (0, 1))
    assert not has(writer, KEYS[0])
    writer.save(1, KEYS[:3], [4, 2, 7])
    assert ended(writer)[:3] == (1, 3, 3)
    assert [has(reader, key) for key in KEYS[:4]] == [True, True, True, False]
    reader.load(2, KEYS[:3], [0, 1, 2])
    assert ended(reader)[:3] == (2, 3, 3)
    expected = pages(1)
    expected[:3] = pages(0)[[4, 2, 7]]
    np.testing.assert_array_equal(reader._pages, expected)
    assert not reader.is_busy


def test_a_page_is_found_whatever_its_place_among_the_keys_of_a_job(store: Store) -> None:
    made = PageStore(store, Namespace("m"), pages())
    made.save(1, KEYS[:3], range(3))
    ended(made)
    made.load(2, [KEYS[2], KEYS[0]], [6, 7])
    assert ended(made)[:3] == (2, 2, 2)
    np.testing.assert_array_equal(made._pages[6:], pages()[[2, 0]])


def test_a_page_that_is_gone_ends_the_load_before_it(store: Store, tier: DictTier) -> None:
    made = PageStore(store, Namespace("m"), pages())
    made.save(1, KEYS[:4], range(4))
    ended(made)
    tier.delete([made._prompt([KEYS[2]]).keys(store.schema.ids)[0]])
    made.load(2, KEYS[:4], range(4, 8))
    assert ended(made)[:3] == (2, 4, 2)
    np.testing.assert_array_equal(made._pages[4:6], pages()[:2])


def test_a_save_that_is_not_kept_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DictTier, "put", lambda self, keys, blobs: [False] * len(keys))
    made = PageStore(store, Namespace("m"), pages())
    made.save(1, KEYS[:2], [0, 1])
    assert ended(made)[:3] == (1, 2, 0)


def test_an_answer_that_a_request_never_took_is_not_the_next_ones(store: Store) -> None:
    made = PageStore(store, Namespace("m"), pages())
    assert made.has(KEYS[0], "first") is None
    made.ask()
    made.save(1, KEYS[:1], [0])
    ended(made)
    assert has(made, KEYS[0])
    made.forget("first")
    assert made.has(KEYS[0], "first") is None
    made.forget("first")
    made.forget("r")
    made.ask()
    assert not made._answers


def test_keys_of_a_step_are_asked_for_in_one_lookup(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = Store.submit_lookup

    def counted(self: Store, prompts: Any, **more: Any) -> Any:
        asked.append(prompts)
        return real(self, prompts, **more)

    monkeypatch.setattr(Store, "submit_lookup", counted)
    made = PageStore(store, Namespace("m"), pages())
    made.save(1, [KEYS[1], KEYS[4]], [1, 4])
    ended(made)
    for _ in range(2):
        assert {made.has(key, request) for request in ("a", "b") for key in KEYS} == {None}
    made.ask()
    made.ask()
    while (found := [made.has(key, "a") for key in KEYS]) == [None] * ROWS:
        time.sleep(0.001)
    assert found == [number in (1, 4) for number in range(ROWS)]
    assert [made.has(key, "b") for key in KEYS] == found
    assert len(asked) == 1
    assert [made.has(key, "a") for key in KEYS[:1]] == [False], "a request that asks again is not told to wait"


def test_a_lookup_that_fails_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a tier that is broken")

    made = PageStore(store, Namespace("m"), pages())
    monkeypatch.setattr(Store, "_lookup_all", fails)
    assert not has(made, KEYS[0])


def test_namespaces_share_nothing(store: Store) -> None:
    made = PageStore(store, Namespace("m"), pages())
    made.save(1, KEYS[:1], [0])
    ended(made)
    assert has(made, KEYS[0])
    for other in (Namespace("other"), Namespace("m", weights="x"), Namespace("m", tenant="t")):
        assert not has(PageStore(store, other, pages()), KEYS[0])
