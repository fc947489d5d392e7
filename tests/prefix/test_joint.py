"""The joint hit, against brute force."""

from __future__ import annotations

import numpy as np

from kvweave.prefix import Present, joint_hit
from kvweave.spec import Chunk, Full, Reach, SinkWindow, State, Window


def brute_force(groups: list[Present], grid: int, limit: int) -> int:
    """Try every position from the end; look at every token it needs."""
    for position in range(limit // grid * grid, 0, -grid):
        if all(_can_go_on(group, position) for group in groups):
            return position
    return 0


def _can_go_on(group: Present, position: int) -> bool:
    reach, size, blocks, _, tails, tail_start = group
    if not reach.per_token:
        return bool(blocks[position // size - 1])
    needed = [*range(min(reach.head, position)), *range(int(reach.tail(position)), position)]
    partly = [] if tails is None else [token for token in needed if tails[token // size] and token % size >= tail_start]
    return all(blocks[token // size] or token in partly for token in needed)


def _random_reach(rng: np.random.Generator) -> Reach:
    kind = rng.integers(5)
    if kind == 0:
        return Full()
    if kind == 1:
        return Window(int(rng.integers(1, 40)))
    if kind == 2:
        return Chunk(int(rng.integers(1, 30)))
    return SinkWindow(int(rng.integers(1, 12)), int(rng.integers(1, 20))) if kind == 3 else State()


def test_the_joint_hit_equals_brute_force_on_random_groups() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4000):
        sizes = rng.choice([1, 2, 4, 8], rng.integers(1, 6))
        grid, tokens = int(np.lcm.reduce(sizes)), int(rng.integers(1, 12)) * 8
        density = rng.random()
        groups = [Present(_random_reach(rng), int(s), rng.random(tokens // s) < density**0.3) for s in sizes]
        limit = int(rng.integers(0, tokens + 1))
        assert joint_hit(groups, grid, limit) == brute_force(groups, grid, limit)


def test_blocks_of_which_only_the_tail_is_there_equal_brute_force_over_tokens() -> None:
    rng = np.random.default_rng(1)
    for _ in range(4000):
        size, count = int(rng.choice([2, 4, 8])), int(rng.integers(1, 12))
        groups = []
        for _ in range(2):
            blocks = rng.random(count) < 0.7
            tails = blocks | (rng.random(count) < 0.5)
            groups.append(Present(_random_reach(rng), size, blocks, 0, tails, int(rng.integers(1, size))))
        limit = int(rng.integers(0, count * size + 1))
        assert joint_hit(groups, size, limit) == brute_force(groups, size, limit)


def test_two_hundred_thousand_presence_patterns_of_a_window_a_state_and_full_attention() -> None:
    """Drawn from all 2^18 patterns of 6 blocks in three groups, whose hits are computed at once, by needs."""
    count, window = 6, Window(9)
    patterns = np.arange(2**count)
    there = (patterns[:, None] >> np.arange(count)) & 1 == 1
    fine = {}
    for name, reach in (("full", Full()), ("window", window), ("state", State())):
        needs = np.array([[_needed(reach, p, block) for block in range(count)] for p in range(count + 1)])
        fine[name] = (there[:, None, :] | ~needs[None]).all(axis=2)
    together = fine["full"][:, None, None] & fine["window"][None, :, None] & fine["state"][None, None, :]
    together[..., 0] = True
    expected = count - together[..., ::-1].argmax(axis=-1)
    rng = np.random.default_rng(1)
    assert together.shape[:3] == (64, 64, 64)
    for a, b, c in rng.integers(0, 64, (200_000, 3)).tolist():
        groups = [Present(Full(), 4, there[a]), Present(window, 4, there[b]), Present(State(), 4, there[c])]
        assert joint_hit(groups, 4, 4 * count) == 4 * expected[a, b, c]


def _needed(reach: Reach, blocks: int, block: int) -> bool:
    """Whether going on from the end of `blocks` blocks of 4 tokens needs a token of `block`."""
    position = 4 * blocks
    if not reach.per_token:
        return block == blocks - 1
    return any(int(reach.tail(position)) <= token < position for token in range(4 * block, 4 * block + 4))


def test_position_zero_is_always_a_hit_and_the_limit_is_kept() -> None:
    nothing = Present(Full(), 4, np.zeros(8, bool))
    everything = Present(Full(), 4, np.ones(8, bool))
    assert joint_hit([nothing], 4, 32) == 0
    assert joint_hit([everything], 4, 31) == 28
    assert joint_hit([everything], 8, 31) == 24
    assert joint_hit([], 4, 9) == 8


def test_a_minimum_of_each_groups_best_would_be_wrong() -> None:
    """Two trailing groups whose own best positions differ, and whose common one is earlier than both."""
    window = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
    state = np.array([0, 1, 0, 0, 0, 1, 0, 0], bool)
    groups = [Present(Window(5), 4, window), Present(State(), 4, state)]
    assert [joint_hit([group], 4, 32) for group in groups] == [32, 24]
    assert joint_hit(groups, 4, 32) == 8
