"""Block tables: pages and kernel blocks, always in step."""

from __future__ import annotations

import numpy as np

from kvweave.pool import NULL
from kvweave.spec import Full, State
from kvweave.table import GroupTable
from tests.cache.plans import group, plan_of


def table_of(kernel_tokens: int) -> GroupTable:
    made = plan_of(group("full", Full()), blocks=8, kernel_tokens=kernel_tokens)
    return GroupTable(made.groups[0], num_rows=2, max_tokens=64, num_pages=100)


def test_pages_one_by_one_are_what_they_are_all_at_once() -> None:
    for kernel_tokens in (8, 2):
        one, all_at_once = table_of(kernel_tokens), table_of(kernel_tokens)
        for page in (7, 3, 9):
            one.append_one(1, page)
        all_at_once.append(1, np.array([7, 3, 9], np.int32))
        assert one.pages.tolist() == all_at_once.pages.tolist()
        assert one.kernels.tolist() == all_at_once.kernels.tolist()
        assert one.blocks.tolist() == [0, 3]


def test_kernel_blocks_follow_their_pages_and_null_stays_null() -> None:
    table = table_of(kernel_tokens=2)
    table.append(0, np.array([5, 6], np.int32))
    assert table.kernels[0, :9].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, NULL]
    table.erase(0, 0, 1)
    assert table.kernels[0, :8].tolist() == [NULL] * 4 + [24, 25, 26, 27]
    assert table.slots(0, 8, 12, cp_rank=0).tolist() == [48, 49, 50, 51]


def test_a_table_that_grows_keeps_what_it_holds() -> None:
    table = table_of(kernel_tokens=2)
    table.append(1, np.array([5, 6], np.int32))
    table.grow(num_rows=4, width=50)
    assert table.pages.shape == (4, 50)
    assert table.pages[1, :3].tolist() == [5, 6, NULL]
    assert table.kernels[1, :9].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, NULL]


def test_a_cleared_row_is_as_new() -> None:
    table = table_of(kernel_tokens=2)
    table.append(1, np.array([5, 6], np.int32))
    table.shared[1] = 1
    table.clear(1)
    assert not table.pages.any()
    assert not table.kernels.any()
    assert (int(table.blocks[1]), int(table.shared[1]), int(table.first[1])) == (0, 0, 0)


def test_states_have_one_column() -> None:
    made = plan_of(group("state", State()))
    assert GroupTable(made.groups[0], num_rows=2, max_tokens=64, num_pages=100).pages.shape == (2, 1)
