"""Free pages, and super-pages that move between the groups of a pool."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvweave.pool import NULL, Obtainable, PagePool
from kvweave.pool.group import paged_groups
from kvweave.pool.pages import PageStack
from kvweave.spec import Full, LayerCache, State, Window
from tests.cache.plans import group, plan_of


def pool_of(*caches: LayerCache, **more: Any) -> PagePool:
    made = plan_of(*caches, **more)
    return PagePool(made.pools[0], paged_groups(made))


def two_in_one() -> PagePool:
    """A pool of 6 super-pages, each two pages of `full` or one of `state`."""
    pool = pool_of(group("full", Full(), 4), group("state", State(), 32), pools="shared")
    assert [pages.per_superpage for pages in pool.groups] == [2, 1]
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


def test_pages_that_others_reference_too_are_not_reclaimable() -> None:
    pages = pool_of(group("window", Window(6)), pages=9).groups[0]
    own, shared = pages.allocate(2).tolist()
    pages.share(np.array([shared], np.int32))
    assert pages.referenced_only_by(np.array([own, shared], np.int32)).tolist() == [own]
    assert pages.referenced_only_by(np.array([shared, own, shared], np.int32)).tolist() == sorted([own, shared])


def test_single_pages_come_and_go_like_rows_of_them() -> None:
    stack = PageStack(4)
    stack.push(np.array([1, 2], np.int32))
    stack.push_one(3)
    assert [stack.take_out(0), stack.take_out(0), stack.take_out(0), stack.size] == [3, 1, 2, 0]


def test_a_super_page_that_is_empty_again_serves_another_group() -> None:
    pool = two_in_one()
    assert pool.prepare([12, 0])
    full, state = pool.groups
    pages = full.allocate(12)
    assert pool.available(state) == 0
    assert pool.lack([0, 1]) > 0
    assert not pool.prepare([0, 1]), "one super-page lacks"
    full.free(pages[:2])
    assert pool.available(state) == 1
    assert pool.prepare([0, 1])
    assert state.allocate_apart(is_needed=True) == pages[0] // 2
    assert (full.num_allocated, state.num_allocated) == (10, 1)


def test_what_could_be_had_counts_evictable_pages_by_super_page() -> None:
    pool = two_in_one()
    pool.prepare([12, 0])
    full, _ = pool.groups
    pages = full.allocate(12)
    full.count_evictable([pages[[0, 2]]], 1)  # one page of each of two super-pages
    assert Obtainable(pool, {}).covers([2, 0])
    assert not Obtainable(pool, {}).covers([0, 1]), "no super-page would be empty"
    full.count_evictable([pages[[1]]], 1)
    assert Obtainable(pool, {}).covers([0, 1])
    assert Obtainable(pool, {}).covers([1, 1])
    assert not Obtainable(pool, {}).covers([2, 1])
    assert Obtainable(pool, {0: pages[[3]]}).covers([2, 1]), "with a page that can be reclaimed"


def window_pool() -> PagePool:
    pool = pool_of(group("window", Window(8)), pages=20)
    pool.prepare([19])
    return pool


def test_a_page_that_two_rows_release_in_one_call_loses_both_references() -> None:
    pool = window_pool()
    (window,) = pool.groups
    pages = window.allocate(3)
    window.share(pages[:1])
    window.release(pages[[0, 1, 0]])
    assert sorted(pool.free_superpages.all[:2].tolist()) == sorted(pages[:2].tolist())
    assert window.num_allocated == 1
    assert window.holders[pages].tolist() == [1, 1, 1], "two wait for their next table, one is still held"


def test_a_cached_page_is_evictable_when_no_table_names_it() -> None:
    pool = window_pool()
    (window,) = pool.groups
    pages = window.allocate(2)
    window.enter_cache(pages)
    assert (window.num_cached, window.num_evictable) == (2, 0)
    window.release(pages)
    assert (window.num_allocated, window.num_evictable) == (2, 2)
    window.share(pages[:1])
    assert window.num_evictable == 1
    assert window.leave_cache(pages.copy()) == 2
    assert (window.num_allocated, window.num_cached, window.num_evictable, window.num_evicted) == (1, 0, 0, 1)
    window.release(pages[:1])
    assert window.num_allocated == 0


def test_a_page_that_two_points_need_stays_until_both_are_gone() -> None:
    pool = window_pool()
    (window,) = pool.groups
    pages = window.allocate(1)
    window.enter_cache(pages)
    window.enter_cache(pages)
    window.release(pages)
    assert (window.num_cached, window.num_evictable) == (1, 1)
    assert window.leave_cache(pages) == 0
    assert (window.num_cached, window.num_evictable) == (1, 1)
    assert window.leave_cache(pages) == 1
    assert (window.num_allocated, window.num_cached, window.num_evictable) == (0, 0, 0)


def test_free_pages_of_a_group_are_available_to_it_once() -> None:
    pool = two_in_one()
    pool.prepare([4, 0])
    assert [pool.available(pages) for pages in pool.groups] == [12, 6]


def test_pages_that_a_group_wants_itself_are_not_given_to_another() -> None:
    pool = two_in_one()
    pool.prepare([12, 0])
    assert pool.lack([12, 1]) > 0
    assert not Obtainable(pool, {}).covers([12, 1])
    assert not pool.prepare([12, 1])
    assert pool.prepare([10, 1])
    assert len(pool.groups[0].allocate(10)) == 10


def test_live_states_and_snapshots_are_in_super_pages_apart() -> None:
    pool = pool_of(group("full", Full(), 32), group("state", State(), 4), pools="shared")
    _, state = pool.groups
    assert state.per_superpage > 1
    pool.prepare([0, 2 * state.per_superpage])
    live = [state.allocate_apart(is_needed=True)]
    snapshot = state.allocate_apart(is_needed=False)
    state.count_evictable_one(snapshot, 1)
    live.append(state.allocate_apart(is_needed=True))
    of = state.per_superpage
    assert live[0] // of == live[1] // of != snapshot // of


def test_window_pages_that_a_prompt_needs_for_long_are_where_others_are_needed() -> None:
    pool = pool_of(group("full", Full(), 16), group("window", Window(8), 4), pools="shared")
    _, window = pool.groups
    of = window.per_superpage
    assert of == 4
    pool.prepare([0, 3 * of])
    first, second, third = window.allocate(3 * of).reshape(3, of)
    window.release(third[1:])
    window.release(second[:1])
    window.release(first[:3])
    free = window.free_pages.all.tolist()
    taken = window.allocate_run(3, 2)
    assert taken[2] == second[0], "the one that stays"
    left = [page for page in free if page != second[0]]
    assert taken[:2].tolist() == left[:2], "those that go soon are taken from the top"
    assert window.free_pages.all.tolist() == left[2:]
    assert window.num_allocated == 8


def test_all_free_pages_can_be_had_for_a_run() -> None:
    pool = pool_of(group("full", Full(), 16), group("window", Window(8), 4), pools="shared")
    _, window = pool.groups
    pool.prepare([0, 4])
    assert sorted(window.allocate_run(4, -3).tolist()) == [4, 5, 6, 7]


def test_a_page_that_several_rows_release_at_once_becomes_evictable_once() -> None:
    pool = window_pool()
    (window,) = pool.groups
    pages = window.allocate(1)
    window.share(pages)
    window.enter_cache(pages)
    window.release(pages[[0, 0]])
    assert (window.num_allocated, window.num_evictable) == (1, 1)


def test_a_page_that_two_points_need_is_not_evictable_while_a_table_names_it() -> None:
    pool = window_pool()
    (window,) = pool.groups
    pages = window.allocate(1)
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
    pool.prepare([12, 0])
    full, _ = pool.groups
    pages = full.allocate(12)
    full.count_evictable([pages[[0]]], 1)
    assert not Obtainable(pool, {0: pages[[2]]}).covers([0, 1])
    assert Obtainable(pool, {0: pages[[1]]}).covers([0, 1])


def test_of_super_pages_that_could_be_empty_a_group_keeps_those_it_wants() -> None:
    pool = two_in_one()
    pool.prepare([12, 0])
    assert not Obtainable(pool, {}).covers([10, 2])
    assert Obtainable(pool, {}).covers([8, 2])


def test_super_pages_are_taken_from_the_group_that_does_not_want_them() -> None:
    pool = pool_of(group("a", Full(), 4), group("b", Full(), 4), group("state", State(), 32), pools="shared")
    a, _, state = pool.groups
    assert [pages.per_superpage for pages in pool.groups] == [2, 2, 1]
    pool.free_superpages.replace(np.arange(1, 7, dtype=np.int32))
    assert pool.prepare([8, 4, 0])
    assert pool.prepare([8, 0, 1])
    assert len(a.allocate(8)) == 8
    assert state.allocate_apart(is_needed=True) > NULL
