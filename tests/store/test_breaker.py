"""The circuit breaker: failures in a row open it, a success between them does not let them add up."""

from __future__ import annotations

from kvweave.store.breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_count_only_in_a_row() -> None:
    breaker = CircuitBreaker(3, 1.0, Clock())
    for _ in range(4):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.passes()
    assert not breaker.is_open


def test_an_open_breaker_lets_one_try_in_each_while_and_a_success_closes_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(3, 1.0, clock)
    for _ in range(5):
        breaker.failed()
    assert [breaker.passes() for _ in range(3)] == [False] * 3
    clock.now = 1.0
    assert [breaker.passes() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert [breaker.passes() for _ in range(3)] == [True] * 3
