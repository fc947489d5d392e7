"""Steps out of the core's tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave import Cache, make_plan
from kvweave.attention import make_step, open_attention
from kvweave.cache import Sequence
from kvweave.errors import BadRows
from kvweave.spec import Chunk, DType, Full, Reach, Window
from kvweave.tensor import GQA, Arena, LayerRequest, assemble
from tests.attention.worlds import Kind, World

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


def test_a_step_of_wrong_types_or_lengths_is_refused() -> None:
    step = World(Kind()).step([300, 40], [1, 3])
    with pytest.raises(BadRows, match="int32"):
        replace(step, lengths=step.lengths.long())
    with pytest.raises(BadRows, match="2 lengths, 2 starts"):
        replace(step, query_starts=step.query_starts[:2])
