"""Foresight against comparing every request with every earlier one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvweave.sim import Foresight, Geometry, Trace
from tests.sim.plans import GRID, MODELS, STATES, WINDOW, plan_of, trace_of, traces


def common(one: list[int], other: list[int], grid: int) -> int:
    """Whole blocks that two requests have in common at their start."""
    same = 0
    while same < min(len(one), len(other)) // grid and one[: (same + 1) * grid] == other[: (same + 1) * grid]:
        same += 1
    return same


def tokens(trace: Trace) -> list[list[int]]:
    return [trace.tokens(request).tolist() for request in trace.requests]


@given(traces(), st.sampled_from([1, 2, 4]))
def test_the_overlap_is_the_longest_start_that_any_earlier_request_had(trace: Trace, grid: int) -> None:
    words, foresight = tokens(trace), Foresight(trace, grid)
    for number, (request, placed) in enumerate(zip(trace.requests, foresight.requests, strict=True)):
        limit = (request.prompt_tokens - 1) // grid
        longest = max((common(words[number], words[earlier], grid) for earlier in range(number)), default=0)
        assert placed.overlap == min(limit, longest)
        assert placed.limit == limit
        assert [run.start for run in placed.path[1:]] == [run.end for run in placed.path[:-1]]
        assert (placed.path[-1].end if placed.path else 0) == len(words[number]) // grid


@given(traces(), st.sampled_from([1, 4]))
def test_points_are_where_a_later_request_goes_on(trace: Trace, grid: int) -> None:
    words, foresight = tokens(trace), Foresight(trace, grid)
    for number in range(len(words)):
        later = {
            placed.overlap * grid
            for after, placed in enumerate(foresight.requests)
            if after > number and 0 < placed.overlap <= common(words[number], words[after], grid)
        }
        assert foresight.points_after(number) == sorted(later)


def test_requests_of_two_namespaces_share_nothing() -> None:
    from dataclasses import replace

    trace = trace_of([[1] * 9] * 3)
    apart = replace(trace, requests=tuple(replace(r, namespace=str(n % 2)) for n, r in enumerate(trace.requests)))
    assert [placed.overlap for placed in Foresight(apart, 4).requests] == [0, 0, 2]


def test_a_geometry_counts_what_a_plan_keeps() -> None:
    full, window, states = (Geometry.of(plan_of(model)) for model in MODELS.values())
    assert {full.grid, window.grid, states.grid} == {GRID}
    assert full.row_bytes == window.row_bytes == GRID * 16
    assert (full.resumes_anywhere, window.resumes_anywhere, states.resumes_anywhere) == (True, False, False)
    assert states.point_bytes(3) == states.state_bytes == 256
    page = plan_of(WINDOW).stride_bytes("window")
    assert [window.point_bytes(blocks) for blocks in (1, 2, 3, 9)] == [page, 2 * page, 2 * page, 2 * page]


def test_what_is_loaded_are_rows_between_and_what_only_the_end_needs() -> None:
    states, window = Geometry.of(plan_of(STATES)), Geometry.of(plan_of(WINDOW))
    assert states.bytes_to_load(4, 12) == 2 * states.row_bytes + 256
    assert states.bytes_to_load(8, 8) == 0
    page = plan_of(WINDOW).stride_bytes("window")
    assert window.bytes_to_load(0, 40) == 10 * window.row_bytes + 2 * page
    assert window.bytes_to_load(36, 40) == window.row_bytes + page
