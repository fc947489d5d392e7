"""Every reach against the sets of tokens that its attention reads, and a kind of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import make_plan
from kvweave.errors import SpecError, UnknownName
from kvweave.spec import (
    Chunk,
    DType,
    Full,
    Layer,
    LayerCache,
    ModelSpec,
    Reach,
    Role,
    SinkWindow,
    State,
    Window,
    register_reach,
)
from kvweave.spec.reach import REACHES, reach_class, tokens_needed
from tests import strategies


def attended(reach: Reach, query: int) -> set[int]:
    """The tokens that the query at a position reads, itself among them, as the attention masks have it."""
    match reach:
        case Full():
            return set(range(query + 1))
        case Window(tokens):
            return {key for key in range(query + 1) if query - key < tokens}
        case Chunk(tokens):
            return {key for key in range(query + 1) if key // tokens == query // tokens}
        case SinkWindow(sinks, tokens):
            return {key for key in range(query + 1) if key < sinks or query - key < tokens}
    raise AssertionError(f"no mask for {reach}")


def needed(reach: Reach, position: int) -> set[int]:
    """[0, head) and [tail(p), p)."""
    return set(range(min(reach.head, position))) | set(range(reach.tail(position), position))


per_token = strategies.reaches.filter(lambda reach: reach.per_token)


@given(per_token, st.integers(0, 300))
def test_going_on_from_a_position_needs_what_its_query_reads_of_the_past(reach: Reach, position: int) -> None:
    assert needed(reach, position) == attended(reach, position) - {position}


@given(strategies.reaches, st.integers(0, 300))
def test_tokens_needed_counts_the_head_and_the_tail_once(reach: Reach, position: int) -> None:
    assert tokens_needed(reach, position) == len(needed(reach, position))


@given(strategies.reaches)
def test_the_tail_never_comes_back(reach: Reach) -> None:
    tails = [reach.tail(position) for position in range(300)]
    assert all(0 <= tail <= position for position, tail in enumerate(tails))
    assert tails == sorted(tails)


@given(strategies.reaches)
def test_positions_may_come_as_an_array(reach: Reach) -> None:
    positions = np.arange(300)
    assert reach.tail(positions).tolist() == [reach.tail(position) for position in range(300)]


@given(per_token)
def test_the_span_is_the_most_that_a_query_reads(reach: Reach) -> None:
    most = max(len(attended(reach, query)) for query in range(300))
    assert reach.span == (None if most == 300 else most)


def test_a_state_needs_the_one_snapshot_at_its_position() -> None:
    assert [State().tail(position) for position in (0, 1, 2, 77)] == [0, 0, 1, 76]
    assert tokens_needed(State(), 0) == 0
    assert tokens_needed(State(), 77) == State.span == 1


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Window(0), "tokens must be at least 1, got 0"),
        (lambda: Chunk(-3), "tokens must be at least 1, got -3"),
        (lambda: SinkWindow(0, 4), "sinks must be at least 1, got 0"),
        (lambda: SinkWindow(4, 0), "tokens must be at least 1, got 0"),
        (lambda: Window(2.5), "tokens must be at least 1, got 2.5"),  # type: ignore[arg-type]
    ],
)
def test_a_reach_of_nothing_is_named_with_its_field_and_number(build: Any, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        build()


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown reach 'windw'; did you mean 'window'\?"):
        reach_class("windw")


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(SpecError, match=r"reach 'window' is registered already, by Window"):
        register_reach(Window)


@dataclass(frozen=True, slots=True)
class Halving:
    """A kind that we never heard of: reads the second half of the past, and the first `sinks` tokens."""

    sinks: int
    kind: ClassVar[str] = "halving"
    per_token: ClassVar[bool] = True
    span: ClassVar[None] = None

    @property
    def head(self) -> int:
        return self.sinks

    def tail(self, position: Any) -> Any:
        return position // 2


@pytest.fixture
def halving() -> Iterator[type[Halving]]:
    register_reach(Halving)
    yield Halving
    del REACHES["halving"]


def test_a_users_own_reach_goes_to_json_and_back_and_is_planned(halving: type[Halving]) -> None:
    cache = LayerCache("odd", halving(8), (Role("key", (4, 16), DType.BFLOAT16),))
    spec = ModelSpec("mine", (Layer((cache,)),))
    data = spec.to_dict()
    assert data["caches"][0]["reach"] == {"kind": "halving", "sinks": 8}
    assert ModelSpec.from_dict(data) == spec
    made = make_plan(spec, 10**6)
    # at position 99 of blocks of 16: block 0 for the sinks, blocks 3 to 6 for [49, 100)
    assert made.group("odd").num_blocks_held(100) == 1 + 4
    assert type(made).from_dict(made.to_dict()) == made


def test_a_reach_that_is_not_registered_is_unknown_to_json(halving: type[Halving]) -> None:
    data = ModelSpec("mine", (Layer((LayerCache("odd", halving(8), (Role("key", (4,), DType.INT8),)),)),)).to_dict()
    del REACHES["halving"]
    try:
        with pytest.raises(UnknownName, match="unknown reach 'halving'"):
            ModelSpec.from_dict(data)
    finally:
        REACHES["halving"] = halving
