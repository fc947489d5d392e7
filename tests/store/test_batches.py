"""Batches: everything once, in order, and never more than was said but for what alone is more."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvweave.store.batches import BATCH_BYTES, batches


@given(st.lists(st.integers(0, 12)), st.integers(0, 20))
def test_all_items_come_in_order_and_no_batch_has_more_than_was_said(sizes: list[int], most: int) -> None:
    made = [*batches(enumerate(sizes), lambda item: item[1], most)]
    assert [item for batch in made for item in batch] == [*enumerate(sizes)]
    assert all(sum(size for _, size in batch) <= most for batch in made if len(batch) > 1)
    for batch, following in pairwise(made):
        assert sum(size for _, size in batch) + following[0][1] > most


def test_unless_said_otherwise_a_batch_is_worth_a_threads_turn() -> None:
    assert [len(batch) for batch in batches(range(40), lambda _: BATCH_BYTES // 16)] == [16, 16, 8]
