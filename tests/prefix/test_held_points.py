from __future__ import annotations

import numpy as np

from kvweave.cache import Cache
from kvweave.pool import GroupPages
from kvweave.prefix import Kind, Node, Point
from kvweave.prefix.held_points import LOOKED_AT, MOST_AT_ONCE, PATIENCE, QUEUED_ANYWAY, HeldPoints
from kvweave.spec import SinkWindow
from tests.cache.plans import group, plan_of

NODE = Node(1, None, 0, np.empty(0, np.int32), [])


def pages_of_window() -> GroupPages:
    """Pages 1 to 300, which a point of the tree needs and a table references."""
    cache = Cache(plan_of(group("window", SinkWindow(4, 8)), pages=400))
    (pages,) = cache.state.pages
    cache.state.pools[0].prepare([300])
    pages.enter_cache(pages.allocate(300))
    return pages


def point_of(first: int, last: int) -> Point:
    point = Point(NODE, 4, Kind.PROMPT, ())
    point.first_page, point.last_page = first, last
    return point


def release(pages: GroupPages, *numbers: int) -> None:
    pages.release(np.array(numbers, np.int32))


def test_a_point_is_held_while_tables_name_its_first_and_its_last_page() -> None:
    pages = pages_of_window()
    held, point = HeldPoints(pages), point_of(1, 2)
    assert held.holds(point)
    release(pages, 1)
    assert not held.holds(point)
    assert held.holds(point_of(2, 3))
    release(pages, 3)
    assert not held.holds(point_of(2, 3))


def test_a_point_that_was_let_in_is_not_held_again() -> None:
    held, point = HeldPoints(pages_of_window()), point_of(1, 2)
    point.held = QUEUED_ANYWAY
    assert not held.holds(point)


def test_points_are_found_when_a_table_lets_go_of_either_page_whoever_left_before() -> None:
    pages = pages_of_window()
    held, points = HeldPoints(pages), [point_of(2 * i + 1, 2 * i + 2) for i in range(100)]
    for point in points:
        held.add(point)
    for point in points[:50]:
        held.remove(point)
    assert held.unheld() == []
    release(pages, 1, 121, 182)
    assert {id(point) for point in held.unheld()} == {id(points[60]), id(points[90])}
    assert sorted(point.held for point in held.points) == list(range(50))
    assert all(held.points[point.held] is point for point in points[50:])


def test_of_many_points_a_part_is_looked_at_until_some_are_found() -> None:
    pages = pages_of_window()
    held, points = HeldPoints(pages), [point_of(1, 2) for _ in range(3 * LOOKED_AT)]
    points[LOOKED_AT + 10], points[-1] = point_of(3, 4), point_of(5, 6)
    for point in points:
        held.add(point)
    release(pages, 3, 5)
    assert held.unheld() == [points[LOOKED_AT + 10], points[-1]]
    release(pages, 1)
    assert held.unheld() == points[:MOST_AT_ONCE]


def test_points_are_looked_for_now_and_again() -> None:
    pages = pages_of_window()
    held, point = HeldPoints(pages), point_of(1, 2)
    held.add(point)
    release(pages, *range(1, PATIENCE + 1))
    assert held.poll() == []
    release(pages, PATIENCE + 1)
    assert held.poll() == [point]
    assert held.poll() == [], "nothing was released since"


def test_the_ends_of_a_window_lie_behind_its_head() -> None:
    pages = pages_of_window()
    upper = Node(2, None, 0, np.zeros(16, np.int32), [np.array([1, 2, 3, 4], np.int32)])
    point = Point(Node(3, upper, 16, np.zeros(4, np.int32), [np.array([5], np.int32)]), 20, Kind.PROMPT, ())
    assert HeldPoints(pages).holds(point)
    assert (point.first_page, point.last_page) == (4, 5)
    short = Point(upper, 4, Kind.PROMPT, ())
    assert HeldPoints(pages).holds(short)
    assert (short.first_page, short.last_page) == (1, 1), "within the head"
