"""Fixed policies: the order in which points are evicted."""

from __future__ import annotations

from kvweave.policy.policy import HIT_WEIGHT, WeightedLRU
from kvweave.pool.group import paged_groups
from tests.cache.plans import full_plan
from tests.policy.test_adaptive import a_point


def test_what_was_hit_ages_more_slowly_but_ages() -> None:
    order = WeightedLRU(paged_groups(full_plan()))

    def goes_first(age_of_hit: int, age_of_other: int) -> bool:
        """Whether the point that was hit is evicted before the other one."""
        now, hit, other = 10_000, a_point(hits=1), a_point()
        hit.last_used, other.last_used = now - age_of_hit, now - age_of_other
        values = [order.value((0, 0, point), True, now) for point in (hit, other)]
        return bool(values[0] < values[1])

    assert not goes_first(100, 100)
    assert not goes_first(int(HIT_WEIGHT * 90), 100)
    assert goes_first(int(HIT_WEIGHT * 110), 100)
