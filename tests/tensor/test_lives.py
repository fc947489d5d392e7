"""Random lives of sequences over real memory: every row of every layer and role is read back as it was written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.cache import Cache, Sequence
from kvweave.errors import CannotTruncate, NeverFits, OutOfPages
from kvweave.plan import Plan
from kvweave.tensor import Arena, carry_out
from tests.tensor.engine import Engine
from tests.tensor.models import lives

PLANS = lives()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_read_back_as_it_was_written(name: str, seed: int) -> None:
    with Arena(PLANS[name]) as arena:
        assert live(PLANS[name], arena, random.Random(seed)) > 0, "no prefix was ever hit: the test tests too little"


def live(made: Plan, arena: Arena, chance: random.Random) -> int:
    """Open, compute, fork, step back and close at random; returns the tokens that were found in the cache."""
    cache = Cache(made, rows=4)
    engine, sequences, hits = Engine(cache, arena), list[Sequence](), 0
    longest = 2 * cache.grid + cache.grid // 2
    stem = [chance.randrange(2) for _ in range(longest)]
    leave(engine, stem)
    for _ in range(25):
        action = chance.choice(("open", "open", "run", "run", "run", "fork", "truncate", "close"))
        if action == "open" and len(sequences) < 4:
            prompt = stem[: chance.choice((3, longest - 2, longest))] + [chance.randrange(2, 9)] * 3
            sequences.append(cache.open(prompt))
            hits += sequences[-1].num_cached
        elif sequences:
            act(engine, sequences, chance.randrange(len(sequences)), action, chance)
    for sequence in sequences:
        cache.close(sequence)
    return hits + leave(engine, [*stem, 7, 7])


def leave(engine: Engine, prompt: list[int]) -> int:
    """Compute a prompt and close it, so that others find it; returns the tokens found of others."""
    first = engine.cache.open(prompt)
    while first.length < len(prompt):
        engine.run(first, min(first.stop or len(prompt), len(prompt)) - first.length)
    engine.cache.close(first)
    return first.num_cached


def act(engine: Engine, sequences: list[Sequence], index: int, action: str, chance: random.Random) -> None:
    cache, sequence = engine.cache, sequences[index]
    left = sequence.num_prompt - sequence.length
    n = chance.randrange(1, 2 * cache.grid)
    try:
        if action == "run":
            n = min(n, left) if left > 0 else min(n, 20)
            engine.run(sequence, n, None if left > 0 else np.arange(n) % 3)
        elif action == "fork" and len(sequences) < 4 and left <= 0:
            made, copies = cache.fork(sequence)
            carry_out(engine.arena, copies)
            sequences += made
        elif action == "truncate" and left < 0:
            carry_out(engine.arena, cache.truncate(sequence, sequence.length - 1))
    except CannotTruncate:
        return
    except (OutOfPages, NeverFits):
        action = "close"
    if action == "close":
        cache.close(sequences.pop(index))
