"""Free pages, and super-pages that move between the groups of a pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.pool import NULL, PoolPages
from kvweave.pool.pages import Stack
from kvweave.spec import Full, State, Window
from tests.cache.plans import group, plan_of


def two_in_one() -> PoolPages:
    """A pool of 6 super-pages, each two pages of `full` or one of `state`."""
    made = plan_of(group("full", Full(), 4), group("state", State(), 32), pools="shared")
    pool = PoolPages(made.pools[0], list(made.groups))
    assert [g.per_super for g in pool.groups.values()] == [2, 1]
    pool.free_supers.keep(np.arange(1, 7, dtype=np.int32))
    pool.num_superpages = 6
    return pool


@given(st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=5), st.integers(0, 5)), max_size=40))
def test_a_stack_gives_back_what_came_last_in_the_order_it_came(steps: list[list[int] | int]) -> None:
    stack, model = Stack(200), list[int]()
    for step in steps:
        if isinstance(step, list):
            stack.push(np.array(step, np.int32))
            model = step + model
        elif step <= len(model):
            assert stack.pop(step).tolist() == model[:step]
            model = model[step:]
        assert stack.all.tolist() == model
        assert stack.size == len(model)


def test_single_pages_come_and_go_like_rows_of_them() -> None:
    stack = Stack(4)
    stack.push(np.array([1, 2], np.int32))
    stack.push_one(3)
    assert [stack.pop_one(), stack.pop_one(), stack.pop_one(), stack.size] == [3, 1, 2, 0]


def test_a_super_page_that_is_empty_again_serves_another_group() -> None:
    pool = two_in_one()
    assert pool.prepare({"full": 12}) == 0
    pages = pool.take("full", 12)
    assert pool.available("state") == 0
    assert pool.prepare({"state": 1}) == 1, "one super-page lacks"
    pool.release("full", pages[:2], gaps=True)
    assert pool.available("state") == 1
    assert pool.prepare({"state": 1}) == 0
    assert pool.take_one("state") == pages[0] // 2
    assert (pool.num_held("full"), pool.num_held("state")) == (10, 1)


def test_a_shared_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = two_in_one()
    pool.prepare({"full": 3})
    pages = pool.take("full", 3)
    pool.share("full", pages[:1])
    assert [pool.release("full", pages, gaps=True), pool.release("full", pages[:1], gaps=True)] == [2, 1]


@pytest.mark.parametrize("kept", [[5, 6, 7], [NULL, NULL, 7], [5, NULL, 7], [NULL, 6, NULL], [NULL] * 3])
def test_nulls_among_a_windows_pages_are_not_freed(kept: list[int]) -> None:
    made = plan_of(group("window", Window(8)), pages=20)
    pool = PoolPages(made.pools[0], list(made.groups))
    pool.prepare({"window": 19})
    pool.take("window", 19)
    there = [page for page in kept if page != NULL]
    assert pool.release("window", np.array(kept, np.int32), gaps=True) == len(there)
    assert sorted(pool.free_supers.all.tolist()) == there
