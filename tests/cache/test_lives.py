"""Random lives of sequences on random plans, against a simulated device and brute-force oracles."""

from __future__ import annotations

import pytest

from kvweave.plan import make_plan
from kvweave.spec import Full, Layer, ModelSpec, State, Window
from tests.cache.lives import Life
from tests.cache.plans import group


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_in_random_lives_every_row_is_right_the_books_balance_and_no_refusal_was_without_need(first: int) -> None:
    happened: dict[str, int] = {}
    for seed in range(first, first + 25):
        life = Life(seed)
        life.run(60)
        for what, count in life.counts.items():
            happened[what] = happened.get(what, 0) + count
    assert happened["refused"] > 10, "short of pages now and then"
    assert min(happened[what] for what in ("step", "commit", "accept", "fork", "truncate", "load", "rematch")) > 10


@pytest.mark.parametrize("here", [("full",), ("window",), ("state",), ("full", "state"), ("window", "state")])
def test_in_lives_of_a_rank_whose_other_layers_are_elsewhere_the_books_balance(here: tuple[str, ...]) -> None:
    caches = [group("full", Full()), group("window", Window(8)), group("state", State())]
    layers = tuple(Layer((cache,)) for cache in caches if cache.tag in here)
    spec = ModelSpec("stage", layers, placeholders=tuple(cache for cache in caches if cache.tag not in here))
    for seed in range(10):
        Life(seed, plan=make_plan(spec, 6_000, block_tokens=4)).run(60)
