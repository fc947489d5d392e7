"""Holders of pages counted in C equal those counted in numpy, whatever the pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.pool.holders import REFERENCES, TREE, NumpyHolders

native = pytest.importorskip("kvweave.pool._native", reason="the part in C was not compiled")

SIZE = 2
PAGES = 6
Runs = list[tuple[str, list[int]]]
runs = st.lists(
    st.tuples(
        st.sampled_from(["share", "enter", "release", "leave", "prune"]),
        st.lists(st.integers(0, PAGES - 1), max_size=5),
    ),
    max_size=30,
)


class Side:
    """Counts of one implementation, and pages that became free, in order."""

    def __init__(self, functions: object, per_superpage: int) -> None:
        self.functions, self.size = functions, per_superpage
        self.holders = np.ones(PAGES, np.int64)  # each was allocated for a table
        self.holders[0] = 0
        self.evictable_in = np.zeros(PAGES // SIZE if per_superpage > 1 else 0, np.int64)

    def run(self, name: str, pages: list[int]) -> tuple[object, ...]:
        given = np.array(pages, np.int32)
        outs = [np.full(len(given), -1, np.int32)] if name in ("release", "leave") else []
        more = [] if name in ("enter", "prune") else [self.evictable_in, self.size]
        found = getattr(self.functions, name)(self.holders, given, *more, *outs)
        gone = outs[0][: found[0]].tolist() if outs else []
        return found, gone, given.tolist(), self.holders.tolist(), self.evictable_in.tolist()


def possible(name: str, pages: list[int], holders: np.ndarray) -> list[int]:
    """Those of `pages` whose holders can be asked for it: nobody lets go of what it does not hold, the tree takes only
    what tables name, and a point that goes names each page once."""
    if name == "prune":
        return pages
    pages = list(dict.fromkeys(pages)) if name == "leave" else pages
    left, fine = {page: int(holders[page]) for page in pages}, []
    for page in pages:
        named = left[page] & REFERENCES
        enough = {"share": left[page], "enter": named, "release": named, "leave": left[page] >= TREE}
        if page == 0 or enough[name]:
            left[page] += {"share": 1, "enter": TREE, "release": -1, "leave": -TREE}[name]
            fine.append(page)
    return fine


@given(runs, st.sampled_from([1, SIZE]))
def test_counts_in_c_and_in_numpy_are_equal_after_any_calls(calls: Runs, per_superpage: int) -> None:
    ours, oracle = Side(native, per_superpage), Side(NumpyHolders, per_superpage)
    for name, pages in calls:
        fine = possible(name, pages, oracle.holders)
        assert ours.run(name, fine) == oracle.run(name, fine)


def test_evictable_pages_are_those_that_the_tree_alone_holds() -> None:
    for functions in (native, NumpyHolders):
        side = Side(functions, SIZE)
        assert side.run("enter", [3, 4])[0] == 2
        assert side.run("release", [3, 0, 4, 5])[:2] == ((1, 2), [5])
        assert side.evictable_in.tolist() == [0, 1, 1]
        assert side.run("share", [4])[0] == 1
        assert side.run("leave", [3, 4])[:2] == ((1, 2), [3])
        assert side.evictable_in.tolist() == [0, 0, 0]
        assert side.holders[[3, 4, 5]].tolist() == [1, 1, 1]  # free pages wait for their next table


def test_a_page_in_two_runs_of_the_tree_is_evictable_and_gone_once() -> None:
    for functions in (native, NumpyHolders):
        side = Side(functions, SIZE)
        calls = (("enter", [3, 3]), ("release", [3]), ("share", [3]), ("release", [3]), ("leave", [3]), ("leave", [3]))
        found = [side.run(name, pages)[:2] for name, pages in calls]
        assert found == [(1, []), ((0, 1), []), (1, []), ((0, 1), []), ((0, 0), []), ((1, 1), [3])]
        assert side.holders[3] == 1  # that of its next table
        assert not side.evictable_in.any()


def test_a_page_that_two_rows_release_in_one_call_loses_both_references() -> None:
    for functions in (native, NumpyHolders):
        side = Side(functions, SIZE)
        side.run("share", [3, 4])
        assert side.run("release", [3, 4, 3])[:2] == ((1, 0), [3]), "one row has page 4 still"
        side.run("enter", [4])
        side.run("share", [4])
        assert side.run("release", [4, 4])[:2] == ((0, 1), []), "the tree alone has it, once"
        assert side.evictable_in.tolist() == [0, 0, 1]


def test_pages_that_leave_the_tree_are_null_where_it_named_them() -> None:
    for functions in (native, NumpyHolders):
        side = Side(functions, SIZE)
        side.run("enter", [3, 4])
        side.run("enter", [4])
        assert side.run("leave", [3, 0, 4])[2] == [0, 0, 4]
        assert side.run("prune", [3, 0, 4])[2] == [0, 0, 4]


@pytest.mark.parametrize("pages", [[PAGES], [-1], [2, 1000]])
def test_a_page_without_a_counter_is_an_index_error_and_counts_nothing(pages: list[int]) -> None:
    side = Side(native, SIZE)
    with pytest.raises(IndexError, match="no counter"):
        side.run("share", pages)
    assert side.holders.sum() == PAGES - 1
