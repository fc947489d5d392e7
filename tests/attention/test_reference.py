"""The reference keeps the contract, and equals torch's own attention on dense tensors."""

from __future__ import annotations

import pytest
import torch

from kvweave.attention import AttentionOptions, open_attention
from kvweave.spec import Window
from kvweave.tensor.tokens import read_tokens
from tests.attention.contract import AttentionContract
from tests.attention.worlds import Kind, World


class TestReference(AttentionContract):
    backend = "reference"


@pytest.mark.parametrize("window", [None, 30])
def test_the_reference_is_torch_on_gathered_rows(window: int | None) -> None:
    world = World(Kind())
    step = world.step([200, 75], [1, 75])
    queries = world.queries(step)
    options = AttentionOptions(reach=Window(window) if window else None)
    found = open_attention(world.view, options, "reference").attend(queries, step)
    (table,) = step.tables.values()
    for row, (first, count, length) in enumerate([(0, 1, 200), (1, 75, 75)]):
        tokens = torch.arange(length)
        rows = read_tokens(world.view, table[row][tokens // 16].long() * 16 + tokens % 16)
        positions = torch.arange(length - count, length)[:, None]
        mask = (tokens <= positions) & (tokens > positions - (window or 1000))
        right = torch.nn.functional.scaled_dot_product_attention(
            queries[first : first + count].transpose(0, 1),
            rows["key"].transpose(0, 1),
            rows["value"].transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        assert torch.allclose(found[first : first + count], right.transpose(0, 1), atol=1e-5)
