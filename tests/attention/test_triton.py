"""Triton kernels keep the contract: on a GPU, or (tiny, slow) by Triton's interpreter with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from kvweave.attention import AttentionOptions, Step, open_attention
from kvweave.spec import Full, Reach, SinkWindow, Window
from tests.attention.contract import KINDS, AttentionContract, close
from tests.attention.worlds import Kind, World, wanted

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no GPU here")


class TestTriton(AttentionContract):
    backend = "triton"
    device = "cpu" if INTERPRETED else "cuda"

    def world(self, kind: Kind, *how: Any, **more: Any) -> World:
        if INTERPRETED and kind.dtype == "bfloat16":
            pytest.skip("Triton's interpreter multiplies bfloat16 as if they were whole numbers")
        return super().world(kind, *how, **more)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@needs_gpu
@pytest.mark.parametrize("kind", ["bfloat16", "fp8 with scales", "latent, bfloat16"])
@pytest.mark.parametrize("reach", [Full(), Window(1000), SinkWindow(64, 500)], ids=str)
def test_long_and_short_rows_side_by_side(kind: str, reach: Reach) -> None:
    world = World(KINDS[kind], pages=400, device="cuda")
    lengths = [40_000, 1, 9_000, 17, 25_000, 5_000, 300, 0]
    for counts in ([1] * 8, [1, 1, 2000, 17, 1, 3, 300, 1]):
        step = world.step(lengths, counts)
        queries = world.queries(step)
        options = AttentionOptions(reach=reach, value_dim=128 if "latent" in kind else None)
        found = open_attention(world.view, options).attend(queries, step)
        close(found, wanted(world, queries, step, options))


@needs_gpu
def test_a_captured_step_follows_its_tensors() -> None:
    world = World(KINDS["bfloat16"], device="cuda")
    tag, attention = world.view.tag, open_attention(world.view, AttentionOptions())
    assert attention.name == "triton"
    zeros = partial(torch.zeros, dtype=torch.int32, device="cuda")
    fixed = Step(zeros(9), zeros(8), {tag: zeros(8, 64)}, {tag: zeros(8, dtype=torch.int64)}, 1)
    fixed.query_starts.copy_(torch.arange(9))
    fixed.slots[tag].fill_(-1)
    queries, keys, values = (torch.randn(8, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    out = torch.empty_like(queries)

    def act() -> None:
        attention.write(keys, values, fixed.slots[tag])
        attention.attend(queries, fixed, out)

    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    for lengths in ([300, 7, 64], [1], [90, 500, 41, 33, 700, 12, 5, 6]):
        count = len(lengths)
        step = world.step(lengths, [1] * count)
        table = step.tables[tag]
        last = [int(table[row, (length - 1) // 16]) * 16 + (length - 1) % 16 for row, length in enumerate(lengths)]
        fixed.lengths.zero_()
        fixed.slots[tag].fill_(-1)
        fixed.lengths[:count] = step.lengths
        fixed.slots[tag][:count] = torch.tensor(last, device="cuda")
        fixed.tables[tag][:count, : table.shape[1]] = table
        graph.replay()
        close(out[:count], wanted(world, queries[:count], step, AttentionOptions()))
        assert not out[count:].any(), "rows of padding are zeros"
