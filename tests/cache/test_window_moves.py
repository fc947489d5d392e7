"""Where windows let go of blocks equals a walk over all positions, whatever the windows."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.cache.window_moves import WindowMoves
from kvweave.pool import PagedGroup
from kvweave.pool.group import paged_groups
from kvweave.spec import Chunk, Reach, SinkWindow, Window
from tests.cache.plans import group, plan_of

GRID = 8
MAX_TOKENS = 1003
REACHES: list[tuple[Reach, ...]] = [
    (Window(20),),
    (Window(3), Window(61)),
    (Window(61), Window(3)),
    (Chunk(24), Window(200)),
    (SinkWindow(9, 30), Chunk(40)),
]


def windows_of(reaches: tuple[Reach, ...]) -> list[PagedGroup]:
    caches = [group(f"g{i}", reach) for i, reach in enumerate(reaches)]
    made = plan_of(*caches, blocks={cache.tag: GRID >> i for i, cache in enumerate(caches)})
    return paged_groups(made)


def moves_at(windows: list[PagedGroup], position: int) -> bool:
    return any(each.first_block(position) > each.first_block(position - GRID) for each in windows)


@pytest.mark.parametrize("reaches", REACHES)
def test_the_next_move_is_the_first_position_of_the_grid_at_which_a_window_needs_less(
    reaches: tuple[Reach, ...],
) -> None:
    windows = windows_of(reaches)
    moves = WindowMoves(windows, GRID, MAX_TOKENS)
    for position in range(MAX_TOKENS + 1):
        after = position // GRID * GRID + GRID
        while after <= MAX_TOKENS and not moves_at(windows, after):
            after += GRID
        assert moves.next(position) == after


@pytest.mark.parametrize("reaches", REACHES)
def test_many_rows_are_looked_up_as_one_is(reaches: tuple[Reach, ...]) -> None:
    windows = windows_of(reaches)
    numbers, moves = np.array([0, 1, 7, 40, MAX_TOKENS // GRID, 2]), WindowMoves(windows, GRID, MAX_TOKENS)
    first_blocks, after = moves.look_up(numbers)
    assert after.tolist() == [moves.next(number * GRID) for number in numbers.tolist()]
    for each, first in zip(windows, first_blocks, strict=True):
        assert first.tolist() == [each.first_block(number * GRID) for number in numbers.tolist()]
