"""What is left of a budget bounds every wait; nothing is left of one that was cancelled."""

from __future__ import annotations

from kvweave.store.operations import CancellableBudget
from kvweave.store.tier_stack import UNLIMITED, Budget


def test_a_wait_is_as_long_as_the_shorter_of_both() -> None:
    assert UNLIMITED.within(5.0) == 5.0
    assert Budget.of(10.0).within(5.0) == 5.0
    assert 0.0 < Budget.of(0.5).within(5.0) <= 0.5
    assert Budget.of(-1.0).within(5.0) == 0.0


def test_nothing_is_left_of_a_budget_that_was_cancelled() -> None:
    for seconds in (None, 10.0):
        budget = CancellableBudget(Budget.of(seconds).until)
        assert not budget.is_spent
        budget.cancelled.set()
        assert budget.is_spent
        assert (budget.left_s, budget.within(5.0)) == (0.0, 0.0)
