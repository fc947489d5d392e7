"""Steps out of the core's tables, and steps at fixed addresses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave import Cache, make_plan
from kvweave.attention import AttentionOptions, StepBuffers, make_step, open_attention
from kvweave.cache import Sequence
from kvweave.errors import BadRows
from kvweave.spec import Chunk, DType, Full, Reach, Window
from kvweave.tensor import GQA, Arena, LayerRequest, assemble
from tests.attention.contract import close
from tests.attention.worlds import Kind, World, wanted

REACHES: list[Reach] = [Full(), Window(24), Chunk(32)]
DIM, HEADS, KV_HEADS = 16, 4, 2


class Model:
    """Layers of all reaches whose rows follow from the tokens; steps are checked against dense tensors."""

    def __init__(self) -> None:
        requests = [
            LayerRequest(layer, heads=KV_HEADS, key_dim=DIM, reach=reach, dtype=DType.FLOAT32)
            for layer, reach in enumerate(REACHES)
        ]
        plan = make_plan(assemble("model", [(GQA(), r) for r in requests]), "4MB", block_tokens=16, kernel_tokens=8)
        self.core, self.arena = Cache(plan), Arena(plan)
        self.layers = [open_attention(self.arena.layer(layer)) for layer in range(len(REACHES))]
        self.by_token, self.by_position = torch.randn(2, 2, 400, KV_HEADS, DIM).unbind()

    def rows(self, layer: int, tokens: list[int]) -> torch.Tensor:
        """Keys and values of a prompt's tokens, `[2, tokens, heads, dim]`."""
        both: torch.Tensor = self.by_token[:, tokens] + self.by_position[:, : len(tokens)]
        return both * (layer + 1)

    def run(self, prompts: dict[Sequence, list[int]], counts: list[int]) -> None:
        """One step, checked layer by layer."""
        sequences = list(prompts)
        self.core.extend(sequences, counts, tokens=None if sum(counts) > 3 else [prompts[s][s.length] for s in prompts])
        step = make_step(self.core, sequences, counts)
        queries = torch.randn(sum(counts), HEADS, DIM)
        for number, layer in enumerate(self.layers):
            dense_rows = [self.rows(number, tokens[: s.length]) for s, tokens in prompts.items()]
            new = torch.cat([rows[:, -count:] for rows, count in zip(dense_rows, counts, strict=True)], dim=1)
            layer.write(new[0], new[1], step.slots[layer.view.tag])
            found = layer.attend(queries, step).split(counts)
            for mine, asked, rows in zip(found, queries.split(counts), dense_rows, strict=True):
                assert torch.allclose(mine, dense(asked, rows[0], rows[1], REACHES[number]), atol=1e-4)
        self.core.commit(sequences)


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: Reach) -> torch.Tensor:
    count, length = len(queries), len(keys)
    positions = np.arange(length - count, length)
    mask = (np.arange(length) <= positions[:, None]) & (np.arange(length) >= reach.tail(positions)[:, None])
    out = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=torch.from_numpy(mask),
        enable_gqa=True,
    )
    return out.transpose(0, 1)


def test_prefills_and_decodes_of_a_running_cache_are_attention_over_all_tokens() -> None:
    torch.manual_seed(0)
    model = Model()
    prompts = [[*range(50)], [*range(100, 217)], [*range(100, 217), 7, 8, 9]]
    answers = [[*range(n, n + 60)] for n in (300, 310, 320)]
    first, second = (model.core.open(prompt) for prompt in prompts[:2])
    full = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    model.run({first: full[0], second: full[1]}, [50, 70])
    model.run({second: full[1]}, [47])
    third = model.core.open(prompts[2])
    assert third.length >= 96, "it starts from what the second has computed"
    model.run({third: full[2]}, [120 - third.length])
    for _ in range(40):
        model.run({third: full[2], first: full[0], second: full[1]}, [1, 1, 1])
    assert (model.core.table("window")[first.row, :3] == 0).all(), "blocks have left the window"


def test_counts_that_are_not_the_last_step_are_refused() -> None:
    model = Model()
    sequence = model.core.open(range(50))
    model.core.extend(sequence, 50)
    with pytest.raises(BadRows, match="49 new tokens"):
        make_step(model.core, [sequence], [49])


def test_buffers_keep_their_addresses_and_pad_with_rows_that_see_nothing() -> None:
    world = World(Kind())
    attention = open_attention(world.view)
    tag = world.view.tag
    buffers = StepBuffers(5, 6, {tag: 60}, "cpu", max_queries=6)
    addresses = [tensor.data_ptr() for tensor in (buffers.step.lengths, buffers.step.tables[tag])]
    for lengths, counts in (([300, 40], [1, 3]), ([7], [6]), ([1, 2, 3, 4, 5], [1] * 5)):
        step = world.step(lengths, counts)
        step = replace(step, slots={tag: torch.arange(sum(counts))})
        loaded = buffers.load(step, sum(counts))
        assert [tensor.data_ptr() for tensor in (loaded.lengths, loaded.tables[tag])] == addresses
        assert loaded.slots[tag].tolist() == [*range(sum(counts)), *[-1] * (6 - sum(counts))]
        queries = torch.randn(6, 8, 64)
        found = attention.attend(queries, loaded, torch.full((6, 8, 64), torch.nan))
        close(found[: sum(counts)], wanted(world, queries[: sum(counts)], step, AttentionOptions()))
        rest = found[sum(counts) : sum(counts) + 5 - len(lengths)]
        assert not rest.any(), "padding gives zeros"


def test_a_step_too_large_for_its_buffers_is_refused() -> None:
    world = World(Kind())
    step = replace(world.step([300, 40], [1, 3]), slots={world.view.tag: torch.zeros(4, dtype=torch.int64)})
    for rows, tokens, width, most in ((1, 4, 60, 3), (2, 3, 60, 3), (2, 4, 5, 3), (2, 4, 60, 2)):
        with pytest.raises(BadRows, match="buffers"):
            StepBuffers(rows, tokens, {world.view.tag: width}, "cpu", most).load(step, 4)


def test_a_step_of_wrong_types_or_lengths_is_refused() -> None:
    step = World(Kind()).step([300, 40], [1, 3])
    with pytest.raises(BadRows, match="int32"):
        replace(step, lengths=step.lengths.long())
    with pytest.raises(BadRows, match="2 lengths, 2 starts"):
        replace(step, query_starts=step.query_starts[:2])
