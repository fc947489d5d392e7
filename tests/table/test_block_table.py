"""Block tables: pages and kernel blocks, always in step."""

from __future__ import annotations

import numpy as np

from kvweave.pool import NULL
from kvweave.pool.group import paged_groups
from kvweave.spec import Full
from kvweave.table import BlockTable, spread
from tests.cache.plans import group, plan_of


def table_of(kernel_tokens: int) -> BlockTable:
    made = plan_of(group("full", Full()), blocks=8, kernel_tokens=kernel_tokens)
    return BlockTable(paged_groups(made)[0], num_rows=2, width=8)


def append(table: BlockTable, row: int, *pages: int) -> None:
    table.append(np.array([row]), np.array([len(pages)]), np.array(pages, np.int32))


def test_pages_one_by_one_are_what_they_are_all_at_once() -> None:
    for kernel_tokens in (8, 2):
        one, all_at_once, many = (table_of(kernel_tokens) for _ in range(3))
        for slot, page in enumerate((7, 3, 9)):
            one.write(1, slot, np.array([page], np.int32))
        append(all_at_once, 1, 7, 3, 9)
        append(many, 1, 7)
        many.append(np.array([0, 1]), np.array([1, 2]), np.array([4, 3, 9], np.int32))
        assert one.pages[1].tolist() == all_at_once.pages[1].tolist() == many.pages[1].tolist()
        assert one.kernels[1].tolist() == all_at_once.kernels[1].tolist() == many.kernels[1].tolist()
        assert many.blocks.tolist() == [1, 3]


def test_changed_rows_are_told_once() -> None:
    table = table_of(kernel_tokens=8)
    append(table, 1, 7)
    assert table.take_changed().tolist() == [1]
    assert table.take_changed().tolist() == []
    table.erase(1, 0, 1)
    table.write_many(np.array([0]), np.array([3]), np.array([5], np.int32))
    assert table.take_changed().tolist() == [0, 1]
    table.erase(0, 3, 3)
    assert table.take_changed().tolist() == [], "nothing was erased"


def test_kernel_blocks_follow_their_pages_and_null_stays_null() -> None:
    table = table_of(kernel_tokens=2)
    append(table, 0, 5, 6)
    assert table.kernels[0, :9].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, NULL]
    table.erase(0, 0, 1)
    assert table.kernels[0, :8].tolist() == [NULL] * 4 + [24, 25, 26, 27]
    assert table.slots(np.zeros(4, np.int64), np.arange(8, 12), cp_rank=0).tolist() == [48, 49, 50, 51]


def test_a_table_with_more_rows_keeps_what_it_holds() -> None:
    table = table_of(kernel_tokens=2)
    append(table, 1, 5, 6)
    table.add_rows(2)
    assert table.pages.shape == (4, 8)
    assert table.pages[1, :3].tolist() == [5, 6, NULL]
    assert table.kernels[1, :9].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, NULL]


def test_a_cleared_row_is_as_new() -> None:
    table = table_of(kernel_tokens=2)
    append(table, 1, 5, 6)
    table.first[1] = 1
    table.clear(1)
    assert not table.pages.any()
    assert not table.kernels.any()
    assert (int(table.blocks[1]), int(table.first[1])) == (0, 0)


def test_as_many_pages_as_rows_need_not_be_one_each() -> None:
    table = table_of(kernel_tokens=8)
    table.append(np.array([0, 1]), np.array([0, 2]), np.array([5, 6], np.int32))
    assert table.pages[:, :2].tolist() == [[NULL, NULL], [5, 6]]


def test_every_way_of_writing_tells_the_row_also_after_rows_were_added() -> None:
    table = table_of(kernel_tokens=8)
    table.write_state(1, 7)
    table.add_rows(2)
    assert table.take_changed().tolist() == [1]
    assert (int(table.pages[1, 0]), int(table.blocks[1])) == (7, 1)
    table.write(3, 0, np.array([5], np.int32))
    assert table.take_changed().tolist() == [3]


def test_as_many_numbers_as_rows_need_not_be_one_a_row() -> None:
    rows, numbers = spread(np.array([3, 1, 2]), np.array([5, 7, 9]), np.array([2, 0, 1]))
    assert (rows.tolist(), numbers.tolist()) == ([3, 3, 2], [5, 6, 9])
