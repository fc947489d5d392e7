"""Free pages, and super-pages that move between the groups of a pool."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvweave.pool import NULL, PagePool, PageStack
from kvweave.spec import Full, State, Window
from tests.cache.plans import group, plan_of


def two_in_one() -> PagePool:
    """A pool of 6 super-pages, each two pages of `full` or one of `state`."""
    made = plan_of(group("full", Full(), 4), group("state", State(), 32), pools="shared")
    pool = PagePool(made.pools[0], list(made.groups))
    assert [g.per_superpage for g in pool.groups.values()] == [2, 1]
    pool.free_superpages.replace(np.arange(1, 7, dtype=np.int32))
    pool.num_superpages = 6
    return pool


@given(st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=5), st.integers(0, 5)), max_size=40))
def test_a_stack_gives_back_what_came_last_in_the_order_it_came(steps: list[list[int] | int]) -> None:
    stack, model = PageStack(200), list[int]()
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
    stack = PageStack(4)
    stack.push(np.array([1, 2], np.int32))
    stack.push_one(3)
    assert [stack.pop_one(), stack.pop_one(), stack.pop_one(), stack.size] == [3, 1, 2, 0]


def test_a_super_page_that_is_empty_again_serves_another_group() -> None:
    pool = two_in_one()
    assert pool.prepare({"full": 12})
    pages = pool.allocate("full", 12)
    assert pool.available("state") == 0
    assert not pool.is_ready({"state": 1})
    assert not pool.prepare({"state": 1}), "one super-page lacks"
    pool.free("full", pages[:2])
    assert pool.available("state") == 1
    assert pool.prepare({"state": 1})
    assert pool.allocate_one("state") == pages[0] // 2
    assert (pool.num_allocated("full"), pool.num_allocated("state")) == (10, 1)


def test_what_could_be_had_counts_evictable_pages_by_super_page() -> None:
    pool = two_in_one()
    pool.prepare({"full": 12})
    pages = pool.allocate("full", 12)
    full = pool.groups["full"]
    full.count_evictable(pages[[0, 2]], 1)  # one page of each of two super-pages
    assert pool.could_be_ready({"full": 2}, {})
    assert not pool.could_be_ready({"state": 1}, {}), "no super-page would be empty"
    full.count_evictable(pages[[1]], 1)
    assert pool.could_be_ready({"state": 1}, {})
    assert pool.could_be_ready({"state": 1, "full": 1}, {})
    assert not pool.could_be_ready({"state": 1, "full": 2}, {})
    assert pool.could_be_ready({"state": 1, "full": 2}, {"full": pages[[3]]}), "with a page that can be reclaimed"


def window_pool() -> PagePool:
    made = plan_of(group("window", Window(8)), pages=20)
    pool = PagePool(made.pools[0], list(made.groups))
    pool.prepare({"window": 19})
    return pool


def test_a_page_that_two_rows_release_in_one_call_loses_both_references() -> None:
    pool = window_pool()
    pages, window = pool.allocate("window", 3), pool.groups["window"]
    window.share(pages[:1])
    assert sorted(window.release(pages[[0, 1, 0]]).tolist()) == sorted(pages[:2].tolist())
    assert window.holders[pages].tolist() == [1, 1, 1], "two wait for their next table, one is still held"


def test_a_cached_page_is_evictable_when_no_table_names_it() -> None:
    pool = window_pool()
    pages, window = pool.allocate("window", 2), pool.groups["window"]
    assert window.enter_cache(pages) == 2
    assert window.num_evictable == 0
    assert window.release(pages).tolist() == []
    assert window.num_evictable == 2
    window.share(pages[:1])
    assert window.num_evictable == 1
    gone, num_left = window.leave_cache(pages.copy())
    assert (gone.tolist(), num_left, window.num_evictable) == ([pages[1]], 2, 0)
    assert window.release(pages[:1]).tolist() == [pages[0]]


def test_a_page_that_two_runs_of_the_tree_hold_stays_until_both_are_gone() -> None:
    pool = window_pool()
    pages, window = pool.allocate("window", 1), pool.groups["window"]
    assert (window.enter_cache(pages), window.enter_cache(pages)) == (1, 0)
    window.release(pages)
    assert window.num_evictable == 1
    gone, num_left = window.leave_cache(pages)
    assert (len(gone), num_left, window.num_evictable) == (0, 0, 1)
    gone, num_left = window.leave_cache(pages)
    assert (len(gone), num_left, window.num_evictable) == (1, 1, 0)


def test_free_pages_of_a_group_are_available_to_it_once() -> None:
    pool = two_in_one()
    pool.prepare({"full": 4})
    assert pool.available("full") == 12
    assert pool.available("state") == 6


def test_pages_that_a_group_wants_itself_are_not_given_to_another() -> None:
    pool = two_in_one()
    pool.prepare({"full": 12})
    assert not pool.is_ready({"full": 12, "state": 1})
    assert not pool.could_be_ready({"full": 12, "state": 1}, {})
    assert not pool.prepare({"full": 12, "state": 1})
    assert pool.prepare({"full": 10, "state": 1})
    assert len(pool.allocate("full", 10)) == 10


def test_live_states_and_snapshots_are_in_super_pages_apart() -> None:
    made = plan_of(group("full", Full(), 32), group("state", State(), 4), pools="shared")
    pool = PagePool(made.pools[0], list(made.groups))
    state = pool.groups["state"]
    assert state.per_superpage > 1
    pool.prepare({"state": 2 * state.per_superpage})
    live = [pool.allocate_apart("state", is_needed=True)]
    snapshot = pool.allocate_apart("state", is_needed=False)
    state.count_evictable_one(snapshot, 1)
    live.append(pool.allocate_apart("state", is_needed=True))
    of = state.per_superpage
    assert live[0] // of == live[1] // of != snapshot // of


def test_a_page_that_several_rows_release_at_once_becomes_evictable_once() -> None:
    pool = window_pool()
    pages, window = pool.allocate("window", 1), pool.groups["window"]
    window.share(pages)
    window.enter_cache(pages)
    assert window.release(pages[[0, 0]]).tolist() == []
    assert window.num_evictable == 1


def test_a_page_in_two_runs_of_the_tree_is_not_evictable_while_a_table_names_it() -> None:
    pool = window_pool()
    pages, window = pool.allocate("window", 1), pool.groups["window"]
    window.enter_cache(pages)
    window.enter_cache(pages)
    window.release(pages)
    window.share(pages)
    assert window.num_evictable == 0


def test_a_number_taken_out_of_a_stack_is_gone_and_the_others_stay() -> None:
    stack = PageStack(4)
    stack.push(np.array([1, 2, 3, 4], np.int32))
    assert stack.take_out(2) == 3
    assert sorted(stack.all.tolist()) == [1, 2, 4]


def test_a_super_page_that_eviction_and_reclaiming_would_empty_together_could_be_had() -> None:
    pool = two_in_one()
    pool.prepare({"full": 12})
    pages = pool.allocate("full", 12)
    pool.groups["full"].count_evictable(pages[[0]], 1)
    assert not pool.could_be_ready({"state": 1}, {"full": pages[[2]]})
    assert pool.could_be_ready({"state": 1}, {"full": pages[[1]]})


def test_of_super_pages_that_could_be_empty_a_group_keeps_those_it_wants() -> None:
    pool = two_in_one()
    pool.prepare({"full": 12})
    assert not pool.could_be_ready({"full": 10, "state": 2}, {})
    assert pool.could_be_ready({"full": 8, "state": 2}, {})


def test_super_pages_are_taken_from_the_group_that_does_not_want_them() -> None:
    made = plan_of(group("a", Full(), 4), group("b", Full(), 4), group("state", State(), 32), pools="shared")
    pool = PagePool(made.pools[0], list(made.groups))
    assert [g.per_superpage for g in pool.groups.values()] == [2, 2, 1]
    pool.free_superpages.replace(np.arange(1, 7, dtype=np.int32))
    assert pool.prepare({"a": 8, "b": 4})
    assert pool.prepare({"a": 8, "state": 1})
    assert len(pool.allocate("a", 8)) == 8
    assert pool.allocate_one("state") > NULL
