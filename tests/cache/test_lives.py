"""Random lives of sequences on random plans, against a simulated device and brute-force oracles."""

from __future__ import annotations

import pytest

from tests.cache.lives import Life


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
