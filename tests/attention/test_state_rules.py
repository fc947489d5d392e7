"""States updated in place by C: as the formulas say, for states in pages too; nothing for tensors that do not fit."""

from __future__ import annotations

import pytest
import torch

from kvweave.attention.state_rules import causal_convolution, gated_delta_rule


def delta_inputs(rows: int, heads: int, key_dim: int, value_dim: int) -> list[torch.Tensor]:
    """Rows of states are apart, as pages are."""
    torch.manual_seed(rows)
    queries, keys = torch.randn(2, rows, 1, heads, key_dim)
    values, decays = torch.randn(rows, 1, heads * value_dim + 3), -torch.rand(rows, 1, heads)
    values = values[:, :, : heads * value_dim].unflatten(2, (heads, value_dim))
    states = torch.randn(2 * rows, heads, key_dim, value_dim)[::2]
    return [queries, keys, values, decays, torch.rand(rows, heads, 1).transpose(1, 2), states]


def delta_rule(*given: torch.Tensor, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, values, decays, betas, states = (tensor.double() for tensor in given)
    if normalises:
        queries, keys = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (queries, keys))
    decayed = decays[:, 0, :, None, None].exp() * states
    delta = betas[:, 0, :, None] * (values[:, 0] - torch.einsum("rhkv,rhk->rhv", decayed, keys[:, 0]))
    after = decayed + keys[:, 0, :, :, None] * delta[:, :, None]
    return torch.einsum("rhkv,rhk->rhv", after, queries[:, 0]) / queries.shape[-1] ** 0.5, after


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 4, 64, 64), (3, 2, 6, 11), (2, 1, 128, 32)])
def test_the_gated_delta_rule(sizes: tuple[int, ...], threads: int, normalises: bool) -> None:
    given = delta_inputs(*sizes)
    right, after = delta_rule(*given, normalises=normalises)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = gated_delta_rule(*given, normalises=normalises)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert found.shape == (sizes[0], 1, sizes[1], sizes[3])
    assert torch.allclose(found[:, 0].double(), right, atol=1e-5)
    assert torch.allclose(given[-1].double(), after, atol=1e-5)


@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize(("length", "size"), [(4, 4), (3, 4), (5, 2), (1, 1)])
def test_a_convolution_goes_on_from_its_last_inputs(length: int, size: int, has_silu: bool) -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(3, 6, length + 5), torch.randn(6, size)
    states = torch.zeros(6, 6, length)[::2]
    states.copy_(inputs[:, :, :length])
    for bias in (torch.randn(6), None):
        right = torch.nn.functional.conv1d(inputs, weights[:, None], bias, groups=6)
        right = torch.nn.functional.silu(right) if has_silu else right
        states.copy_(inputs[:, :, :length])
        for end in range(length, length + 5):
            found = causal_convolution(inputs[:, :, end : end + 1], states, weights, bias, has_silu=has_silu)
            assert found is not None
            assert torch.allclose(found[:, :, 0], right[:, :, end + 1 - size], atol=1e-5)
            assert torch.equal(states, inputs[:, :, end + 1 - length : end + 1])


def test_tensors_that_do_not_fit_are_left_as_they_are() -> None:
    given = delta_inputs(2, 2, 8, 8)
    before = given[-1].clone()
    for number, other in ((0, given[0].half()), (2, given[2][:, :, :1]), (4, given[4][:1]), (5, given[5].mT)):
        changed = [*given[:number], other, *given[number + 1 :]]
        assert gated_delta_rule(*changed, normalises=True) is None
    assert torch.equal(given[-1], before)
    states, weights = torch.zeros(2, 6, 4), torch.zeros(6, 4)
    for new in (torch.ones(2, 6, 2), torch.ones(2, 5, 1), torch.ones(2, 6, 1, dtype=torch.bfloat16)):
        assert causal_convolution(new, states, weights, None, has_silu=True) is None
    new = torch.ones(2, 6, 1)
    for state, weight, bias in (
        (states, weights[:5], None),
        (states, weights, torch.ones(5)),
        (states[..., :0], weights[:, :1], None),
        (states, weights[:, :0], None),
    ):
        assert causal_convolution(new, state, weight, bias, has_silu=True) is None
    assert not states.any()
