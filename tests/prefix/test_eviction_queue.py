"""The queue of resume points in the order of a policy's keys."""

from __future__ import annotations

import random

import numpy as np

from kvweave.prefix.eviction_queue import BUCKET, EvictionQueue
from kvweave.prefix.node import Kind, Node, Point


def test_points_leave_in_any_order_and_the_smallest_key_is_always_first() -> None:
    rng, queue = random.Random(0), EvictionQueue(is_tips=True)
    node = Node(0, None, 0, np.empty(0, np.int32), [])
    waiting: dict[tuple[int, int], Point] = {}

    def add(arrival: int) -> None:
        point, key = Point(node, 0, Kind.PROMPT, ()), rng.randrange(BUCKET)
        queue.add(point, key)
        waiting[key, arrival] = point

    for arrival in range(3 * BUCKET):
        add(arrival)
    for arrival in range(3 * BUCKET, 5 * BUCKET):
        for entry in rng.sample(sorted(waiting), min(2, len(waiting))):
            queue.remove(waiting.pop(entry))
        if arrival % 2:
            add(arrival)
        first = queue.first()
        assert (None if first is None else first[2]) is (waiting[min(waiting)] if waiting else None)
        assert queue.size == len(waiting)


def test_points_on_both_sides_of_where_a_bucket_was_split_are_found() -> None:
    queue, node = EvictionQueue(is_tips=True), Node(0, None, 0, np.empty(0, np.int32), [])
    points = [Point(node, 0, Kind.PROMPT, ()) for _ in range(BUCKET + 1)]
    for key, point in enumerate(points):
        queue.add(point, key)
    for point in reversed(points):
        queue.remove(point)
    assert queue.first() is None


def test_a_sample_is_spread_evenly_over_all_points() -> None:
    queue, node = EvictionQueue(is_tips=True), Node(0, None, 0, np.empty(0, np.int32), [])
    points = [Point(node, 0, Kind.PROMPT, ()) for _ in range(3 * BUCKET)]
    for key, point in enumerate(points):
        queue.add(point, key)
    for each in (1, 2, 7, 1000):
        assert queue.every(each) == points[::each]
