"""States updated in place by C, on a GPU by Triton: as the formulas say, in pages too; nothing for tensors that do not
fit."""

from __future__ import annotations

import pytest
import torch

from kvweave.attention.state_rules import causal_convolution, gated_delta_rule, selective_state
from kvweave.errors import BadRows

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))
on_devices = pytest.mark.parametrize("device", ["cpu", GPU])


def delta_inputs(rows: int, heads: int, key_dim: int, value_dim: int, by_key: bool = False) -> list[torch.Tensor]:
    """Rows of states are apart, as pages are; with a decay for each head, or for each of its keys."""
    torch.manual_seed(rows)
    queries, keys = torch.randn(2, rows, 1, heads, key_dim)
    values = torch.randn(rows, 1, heads * value_dim + 3)
    decays = -torch.rand(rows, 1, heads, key_dim) if by_key else -torch.rand(rows, 1, heads)
    values = values[:, :, : heads * value_dim].unflatten(2, (heads, value_dim))
    states = torch.randn(2 * rows, heads, key_dim, value_dim)[::2]
    return [queries, keys, values, decays, torch.rand(rows, heads, 1).transpose(1, 2), states]


def delta_rule(*given: torch.Tensor, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, values, decays, betas, states = (tensor.double() for tensor in given)
    if normalises:
        queries, keys = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (queries, keys))
    decayed = (decays if decays.dim() == 4 else decays[..., None])[:, 0, :, :, None].exp() * states
    delta = betas[:, 0, :, None] * (values[:, 0] - torch.einsum("rhkv,rhk->rhv", decayed, keys[:, 0]))
    after = decayed + keys[:, 0, :, :, None] * delta[:, :, None]
    return torch.einsum("rhkv,rhk->rhv", after, queries[:, 0]) / queries.shape[-1] ** 0.5, after


def in_pages(states: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of which some, in another order, are these states, on a device; and their slots."""
    slots = torch.randperm(2 * len(states) + 1)[: len(states)]
    pages = torch.randn(2 * len(states) + 1, *states.shape[1:])
    pages[slots] = states
    return pages.to(device), slots.to(device)


def others(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return pages[[page for page in range(len(pages)) if page not in slots.tolist()]]


@on_devices
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("sizes", [(1, 4, 64, 64), (3, 2, 6, 11), (2, 1, 128, 40)])
def test_the_gated_delta_rule(
    sizes: tuple[int, int, int, int], by_key: bool, threads: int, normalises: bool, device: str
) -> None:
    given = delta_inputs(*sizes, by_key)
    right, after = delta_rule(*given, normalises=normalises)
    pages, slots = in_pages(given[-1], device)
    given = [tensor.to(device) for tensor in given]
    before, kept = torch.get_num_threads(), others(pages, slots)
    torch.set_num_threads(threads)
    try:
        found = gated_delta_rule(*given, normalises=normalises)
        by_slot = gated_delta_rule(*[*given[:-1], pages, slots], normalises=normalises)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert by_slot is not None
    assert found.shape == (sizes[0], 1, sizes[1], sizes[3])
    for out, states in ((found, given[-1]), (by_slot, pages[slots])):
        assert torch.allclose(out[:, 0].double().cpu(), right, atol=1e-4, rtol=1e-4)
        assert torch.allclose(states.double().cpu(), after, atol=1e-4, rtol=1e-4)
    assert torch.equal(others(pages, slots), kept)


@on_devices
@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize(("length", "size"), [(4, 4), (3, 4), (5, 2), (1, 1)])
def test_a_convolution_goes_on_from_its_last_inputs(length: int, size: int, has_silu: bool, device: str) -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(3, 6, length + 5), torch.randn(6, size)
    for bias in (torch.randn(6), None):
        right = torch.nn.functional.conv1d(inputs, weights[:, None], bias, groups=6)
        right = torch.nn.functional.silu(right) if has_silu else right
        states = torch.zeros(6, 6, length)[::2].copy_(inputs[:, :, :length]).to(device)
        pages, slots = in_pages(states.cpu(), device)
        kept = others(pages, slots)
        for end in range(length, length + 5):
            new, there = (
                inputs[:, :, end : end + 1].to(device),
                (weights.to(device), None if bias is None else bias.to(device)),
            )
            found = causal_convolution(new, states, *there, has_silu=has_silu)
            by_slot = causal_convolution(new, pages, there[0], there[1], slots, has_silu=has_silu)
            for out, now in ((found, states), (by_slot, pages[slots])):
                assert out is not None
                assert torch.allclose(out[:, :, 0].cpu(), right[:, :, end + 1 - size], atol=1e-5)
                assert torch.equal(now.cpu(), inputs[:, :, end + 1 - length : end + 1])
        assert torch.equal(others(pages, slots), kept)


def selection_inputs(rows: int, heads: int, dim: int, size: int, groups: int) -> list[torch.Tensor]:
    """States, which are apart as pages are; inputs, steps, rates, ins, outs, skips, biases, gates."""
    torch.manual_seed(dim)
    states = torch.randn(2 * rows, heads, dim, size)[::2]
    inputs, gates = torch.randn(2, rows, heads, dim)
    steps = torch.randn(rows, heads, 1).expand(rows, heads, dim)
    rates = -torch.rand(heads, dim, size) if groups == 1 else -torch.rand(heads)[:, None, None].expand(heads, dim, size)
    ins, outs = torch.randn(2, rows, groups, size)
    return [states, inputs, steps, rates, ins, outs, *torch.randn(2, heads, dim), gates]


def selection(given: list[torch.Tensor], has_softplus: bool) -> tuple[torch.Tensor, torch.Tensor]:
    states, inputs, steps, rates, ins, outs, skips, biases, gates = (tensor.double() for tensor in given)
    steps = torch.nn.functional.softplus(steps + biases) if has_softplus else steps + biases
    ins, outs = (x.repeat_interleave(states.shape[1] // x.shape[1], 1) for x in (ins, outs))
    after = (steps[..., None] * rates).exp() * states + steps[..., None] * ins[:, :, None] * inputs[..., None]
    out = (after * outs[:, :, None]).sum(-1) + skips * inputs
    return out * torch.nn.functional.silu(gates), after


@on_devices
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_softplus", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 150, 16, 1), (3, 4, 6, 11, 2), (2, 2, 64, 128, 2), (2, 1, 3, 35, 1)])
def test_a_selective_state(sizes: tuple[int, ...], has_softplus: bool, threads: int, device: str) -> None:
    given = selection_inputs(*sizes)
    right, after = selection(given, has_softplus)
    pages, slots = in_pages(given[0], device)
    there = [given[0].clone().to(device), *(tensor.to(device) for tensor in given[1:])]
    before, kept = torch.get_num_threads(), others(pages, slots)
    torch.set_num_threads(threads)
    try:
        found = selective_state(*there, has_softplus=has_softplus)
        by_slot = selective_state(*[pages, *there[1:], slots], has_softplus=has_softplus)
    finally:
        torch.set_num_threads(before)
    for out, states in ((found, there[0]), (by_slot, pages[slots])):
        assert out is not None
        assert torch.allclose(out.double().cpu(), right, atol=1e-4, rtol=1e-4)
        assert torch.allclose(states.double().cpu(), after, atol=1e-4, rtol=1e-4)
    assert torch.equal(others(pages, slots), kept)
    if sizes[1] == 1:  # as Mamba-1 gives them
        pages, slots = in_pages(given[0].squeeze(1), device)
        flat = [pages, *(tensor.squeeze(1 if tensor.shape[:2] == (sizes[0], 1) else 0) for tensor in there[1:])]
        out = selective_state(*[*flat, slots], has_softplus=has_softplus)
        assert out is not None
        assert torch.allclose(out.double().cpu(), right.squeeze(1), atol=1e-4, rtol=1e-4)
        assert torch.allclose(pages[slots].double().cpu(), after.squeeze(1), atol=1e-4, rtol=1e-4)


@on_devices
def test_a_selective_state_needs_neither_skips_nor_biases_nor_gates(device: str) -> None:
    given = selection_inputs(2, 2, 8, 16, 2)
    zero = [*given[:6], torch.zeros(2, 8), torch.zeros(2, 8), torch.full((2, 2, 8), 1e4)]
    right, after = selection(zero, True)
    there = [tensor.to(device) for tensor in given]
    out = selective_state(*there[:6], has_softplus=True)
    assert out is not None
    assert torch.allclose(out.double().cpu() * 1e4, right, rtol=1e-4, atol=1e-1)
    assert torch.allclose(there[0].double().cpu(), after, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_numbers_of_a_model_may_be_bfloat16_and_many() -> None:
    given = [tensor.cuda() for tensor in delta_inputs(40, 32, 128, 128)]
    for number in (0, 1, 2, 4):
        given[number] = given[number].bfloat16()
    right, after = delta_rule(*given, normalises=True)
    found = gated_delta_rule(*given, normalises=True)
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert (found[:, 0].double() - right).abs().max() < 1e-2 * right.abs().max()
    assert torch.allclose(given[-1].double(), after, atol=1e-4)
    inputs, weights = torch.randn(40, 8192, 5).cuda().bfloat16(), torch.randn(8192, 4).cuda().bfloat16()
    states = inputs[:, :, :4].clone()
    out = causal_convolution(inputs[:, :, 4:], states, weights, None, has_silu=False)
    assert out is not None
    sums = (inputs[:, :, 1:].double() * weights.double()).sum(-1)
    assert (out[:, :, 0].double() - sums).abs().max() < 1e-2 * sums.abs().max()
    assert torch.equal(states, inputs[:, :, 1:])


@pytest.mark.parametrize("slots", [[0, 5], [-1, 0]])
def test_slots_that_are_not_there_are_refused_and_nothing_is_changed(slots: list[int]) -> None:
    given = delta_inputs(2, 2, 8, 8)
    pages, there = torch.ones(5, 2, 8, 8), torch.tensor(slots)
    with pytest.raises(BadRows, match="5 states"):
        gated_delta_rule(*[*given[:-1], pages, there], normalises=True)
    convolved = torch.ones(5, 6, 4)
    with pytest.raises(BadRows, match="5 states"):
        causal_convolution(torch.ones(2, 6, 1), convolved, torch.ones(6, 4), None, there, has_silu=True)
    selected, states = selection_inputs(2, 1, 3, 4, 1), torch.ones(5, 1, 3, 4)
    with pytest.raises(BadRows, match="5 states"):
        selective_state(*[states, *selected[1:], there], has_softplus=True)
    assert (states == 1).all()
    assert (pages == 1).all()
    assert (convolved == 1).all()


def test_tensors_that_do_not_fit_are_left_as_they_are() -> None:
    given = delta_inputs(2, 2, 8, 8)
    before = given[-1].clone()
    for number, other in ((0, given[0].half()), (2, given[2][:, :, :1]), (4, given[4][:1]), (5, given[5].mT)):
        changed = [*given[:number], other, *given[number + 1 :]]
        assert gated_delta_rule(*changed, normalises=True) is None
        assert gated_delta_rule(*[*given, torch.zeros(2, dtype=torch.int32)], normalises=True) is None
        assert gated_delta_rule(*[*given, torch.zeros(3, dtype=torch.int64)], normalises=True) is None
    assert torch.equal(given[-1], before)
    selected = selection_inputs(2, 2, 3, 4, 2)
    for number, other in ((1, selected[1].half()), (2, selected[2][:1]), (4, selected[4][:, :, :3]), (0, given[0].mT)):
        assert selective_state(*[*selected[:number], other, *selected[number + 1 :]], has_softplus=True) is None
    assert selective_state(*[*selected, torch.zeros(2, dtype=torch.int32)], has_softplus=True) is None
    assert torch.equal(selected[0], selection_inputs(2, 2, 3, 4, 2)[0])
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
