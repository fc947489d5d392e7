"""Steps at fixed addresses: the same as those made of the core's tables, padded, wherever sequences come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvweave import Cache, make_plan
from kvweave.attention import UNKNOWN_ID, FixedStep, StepBuffers, StepSize, make_step
from kvweave.cache import Sequence
from kvweave.errors import BadRows
from kvweave.spec import DType, Full, Reach, Window
from kvweave.tensor import GQA, LayerRequest, assemble


def core(rows: int = 8) -> Cache:
    """Full attention and a window, two kernel blocks to a page."""
    reaches: tuple[Reach, ...] = (Full(), Window(24))
    requests = [LayerRequest(n, heads=2, key_dim=16, reach=r, dtype=DType.FLOAT32) for n, r in enumerate(reaches)]
    plan = make_plan(assemble("model", [(GQA(), r) for r in requests]), "4MB", block_tokens=16, kernel_tokens=8)
    return Cache(plan, rows=rows, max_tokens=512)


def check(cache: Cache, fixed: FixedStep, sequences: list[Sequence], counts: list[int], size: StepSize) -> None:
    """What a fixed step says of its tokens is what the core says, and the rest is padding."""
    step, used, rows = make_step(cache, sequences, counts), sum(counts), len(counts)
    assert fixed.step.query_starts[: rows + 1].tolist() == step.query_starts.tolist()
    assert fixed.step.lengths.tolist() == [*step.lengths.tolist(), *[0] * (size.rows - rows)]
    assert fixed.step.query_starts[-1] == size.tokens
    assert (fixed.step.query_starts.diff() >= 0).all()
    for tag, slots in step.slots.items():
        assert fixed.step.slots[tag].tolist() == [*slots.tolist(), *[-1] * (size.tokens - used)]
        table = step.tables[tag]
        assert torch.equal(fixed.step.tables[tag][:rows, : table.shape[1]], table)
    wanted = [p for s, c in zip(sequences, counts, strict=True) for p in range(s.length - c, s.length)]
    assert fixed.positions[:used].tolist() == wanted
    assert fixed.last[:rows].tolist() == (np.cumsum(counts) - 1).tolist()


def test_random_lives_give_the_steps_of_the_core() -> None:
    cache, rng = core(), random.Random(0)
    buffers = StepBuffers(cache, "cpu", 64, 8, 512)
    running: list[Sequence] = []
    ids = np.arange(64)
    for _ in range(300):
        if len(running) < 6 and rng.random() < 0.3:
            running.append(cache.open([rng.randrange(3) for _ in range(rng.randint(1, 150))]))
        if running and rng.random() < 0.1:
            cache.close(running.pop(rng.randrange(len(running))))
        chosen = rng.sample(running, rng.randint(0, len(running)))
        counts = [max(1, min(rng.choice([1, 1, 9]), s.num_prompt - s.length)) for s in chosen]
        if not chosen or any(s.length + 10 > 500 for s in chosen):
            continue
        tokens = None if any(s.length < s.num_prompt for s in chosen) else [1] * sum(counts)
        cache.extend(chosen, counts, tokens=tokens)
        used = sum(counts)
        size = StepSize(8, 8) if used == len(counts) else StepSize(64, 7)
        buffers.load(chosen, counts, ids[:used], size)
        fixed = buffers.step(size)
        check(cache, fixed, chosen, counts, size)
        assert fixed.ids[:used].tolist() == ids[:used].tolist()
        told = [[1] * max(0, s.length - max(s.num_tokens, s.num_prompt)) for s in chosen]
        for sequence, new in zip(chosen, told, strict=True):
            cache.commit(sequence, tokens=new or None)


def test_tokens_that_only_the_device_knows_are_those_noted_for_their_sequence() -> None:
    cache = core()
    buffers = StepBuffers(cache, "cpu", 8, 8, 512)
    first, second = (cache.open([n] * 5) for n in (1, 2))
    cache.extend([first, second], 5)
    buffers.note_tokens([second, first], torch.tensor([77, 88]))
    cache.extend([first, second], 1)
    buffers.load([first, second], [1, 1], np.array([UNKNOWN_ID, 5]), StepSize(4, 4))
    assert buffers.step(StepSize(4, 4)).ids[:2].tolist() == [88, 5]


def test_rows_written_before_the_buffers_were_made_are_there() -> None:
    cache = core()
    sequence = cache.open(range(40))
    cache.extend(sequence, 40)
    for tag in ("full", "window"):
        cache.take_changed_rows(tag)
    buffers = StepBuffers(cache, "cpu", 64, 2, 512)
    buffers.load([sequence], [40], np.arange(40), StepSize(64, 2))
    check(cache, buffers.step(StepSize(64, 2)), [sequence], [40], StepSize(64, 2))


def test_a_row_that_waits_is_not_cut_to_the_length_of_those_that_run() -> None:
    """A table follows whole, whichever sequence the step is of when the change is seen."""
    cache = core()
    long, short = cache.open(range(200)), cache.open([7] * 5)
    cache.extend(long, 200)
    buffers = StepBuffers(cache, "cpu", 64, 4, 512)
    cache.extend(short, 5)
    buffers.load([short], [5], np.arange(5), StepSize(16, 4))
    cache.commit(long)
    cache.extend(long, 1, tokens=[3])
    buffers.load([long], [1], np.arange(1), StepSize(2, 2))
    check(cache, buffers.step(StepSize(2, 2)), [long], [1], StepSize(2, 2))


def test_a_cache_with_more_rows_than_it_had_outgrows_its_buffers() -> None:
    cache = core(rows=2)
    buffers = StepBuffers(cache, "cpu", 8, 8, 512)
    assert not buffers.are_outgrown
    kept = [cache.open([n]) for n in range(3)]
    assert buffers.are_outgrown
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, StepSize(1, 1)), (5, StepSize(4, 2)), (5, StepSize(128, 2)), (5, StepSize(8, 16)), (5, StepSize(8, 1))],
    ids=["tokens", "few tokens", "more tokens than there is room for", "rows", "no row for the padding"],
)
def test_a_step_that_does_not_fit_is_refused(count: int, size: StepSize) -> None:
    cache = core()
    sequence = cache.open(range(5))
    cache.extend(sequence, 5)
    buffers = StepBuffers(cache, "cpu", 64, 8, 512 if count > 1 else 4)
    with pytest.raises(BadRows, match="do not fit"):
        buffers.load([sequence], [count], np.arange(count), size)
