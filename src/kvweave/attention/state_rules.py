"""States updated in place: one token of each row is taken into the row's state, where it lies.

On a CPU in C, float32 only; on a GPU by Triton kernels. `states[slots[i]]` is the state of row i, `states[i]` without
slots. Where there is neither C nor Triton, or tensors are not such, the functions return None, and have changed
nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from kvweave.attention.cpu import MAX_DIM
from kvweave.errors import BadRows

try:
    from kvweave.attention import _native
except ImportError:  # no C compiler was there
    _native = None  # type: ignore[assignment]
try:
    from triton import next_power_of_2

    from kvweave.attention import state_kernels
except ImportError:
    state_kernels = None  # type: ignore[assignment]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
VALUE_BLOCK, CHANNEL_BLOCK, STATE_BLOCK = 32, 256, 4096
"""Columns of a state, channels of a convolution, and numbers of a selective state, of one program on a GPU."""


def gated_delta_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    normalises: bool,
) -> torch.Tensor | None:
    """The outputs `[rows, 1, heads, value dim]` of queries and keys `[rows, 1, heads, key dim]`, values, and logarithms
    of decays and betas `[rows, 1, heads]`; `states` `[states, heads, key dim, value dim]` are updated. Decays may have
    a `key dim`, too (Kimi's delta attention).

    state = decay * state + key (x) beta * (value - decay * state^T key); out = state^T query / sqrt(key dim). With
    `normalises` queries and keys are of length 1.
    """
    given = queries, keys, values, decays, betas, states
    (num_states, heads, key_dim, value_dim), rows = states.shape, len(queries)
    by_key = decays.dim() == 4
    by_head, by_query = (rows, 1, heads), (rows, 1, heads, key_dim)
    shapes = [by_query, by_query, (rows, 1, heads, value_dim), by_query if by_key else by_head, by_head]
    fit = all(tensor.shape == shape for tensor, shape in zip(given[:5], shapes, strict=True))
    if not fit or not _have_code(given) or not _are_slots(slots, rows, states) or max(key_dim, value_dim) > MAX_DIM:
        return None
    if not states[0].is_contiguous() or any(tensor.stride(3) != 1 for tensor in given[:3]):
        return None
    out = queries.new_empty((rows, 1, heads, value_dim))
    strides = [stride for tensor in given[:5] for stride in (tensor.stride(0), tensor.stride(2))]
    strides.append(decays.stride(3) if by_key else 0)
    if states.is_cuda:
        grid = rows, heads, -(-value_dim // VALUE_BLOCK)
        sizes = heads, key_dim, value_dim, next_power_of_2(key_dim), VALUE_BLOCK, normalises, by_key
        if rows:
            state_kernels.delta_rule[grid](*given, slots, out, *strides, states.stride(0), key_dim**-0.5, *sizes)
        return out
    counts = states.stride(0), num_states, rows, heads, key_dim, value_dim, int(normalises)
    record = _record(*given, out, slots, *strides, *counts)
    _check(_native.delta_rule(record, torch.get_num_threads()), slots, states)
    return out


def selective_state(
    states: torch.Tensor,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    rates: torch.Tensor,
    ins: torch.Tensor,
    outs: torch.Tensor,
    skips: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    has_softplus: bool,
) -> torch.Tensor | None:
    """Mamba: the outputs `[rows, heads, dim]` of inputs, likewise; `states` `[states, heads, dim, size]` are updated.

    state = exp(step * rate) * state + step * in * input; out = (state . out + skip * input) * silu(gate). Steps and
    gates are `[rows, heads, dim]`, rates `[heads, dim, size]`, ins and outs `[rows, groups, size]`, skips and biases
    `[heads, dim]`; biases are added to steps, then comes softplus. Without heads (Mamba-1) all lack that dimension,
    and ins and outs lack groups.
    """
    given = [inputs, steps, rates, ins, outs, skips, biases, gates, states]
    if states.dim() == 3:
        axes = (1, 1, 0, 1, 1, 0, 0, 1, 1)
        given = [None if each is None else each.unsqueeze(axis) for each, axis in zip(given, axes, strict=True)]
        states, ins, outs = states.unsqueeze(1), ins.unsqueeze(1), outs.unsqueeze(1)
    (num_states, heads, dim, size), rows, groups = states.shape, len(inputs), ins.shape[1]
    shapes = [*[(rows, heads, dim)] * 2, (heads, dim, size), *[(rows, groups, size)] * 2, *[(heads, dim)] * 2]
    pairs = zip(given, [*shapes, (rows, heads, dim), states.shape], strict=True)
    fit = all(tensor is None or tensor.shape == shape for tensor, shape in pairs) and groups and heads % groups == 0
    if not fit or not _have_code([each for each in given if each is not None]) or not _are_slots(slots, rows, states):
        return None
    if not states[0].is_contiguous() or ins.stride(2) != 1 or outs.stride(2) != 1:
        return None
    out = inputs.new_empty(inputs.shape)
    counts = (3, 3, 3, 2, 2, 2, 2, 3)
    strides = [stride for each, count in zip(given[:-1], counts, strict=True) for stride in _strides(each, count)]
    if states.is_cuda:
        pad, has_one_rate = next_power_of_2(size), strides[8] == 0
        block = min(next_power_of_2(dim), max(1, STATE_BLOCK // pad))
        sizes = heads, dim, size, heads // groups, pad, block, has_softplus, has_one_rate
        if rows:
            grid = rows, heads, -(-dim // block)
            state_kernels.selective_state[grid](*given, out, slots, *strides, states.stride(0), *sizes)
        return out
    numbers = states.stride(0), num_states, rows, heads, dim, size, heads // groups, int(has_softplus)
    record = _record(*given, out, slots, *strides, *numbers)
    _check(_native.selective_state(record, torch.get_num_threads()), slots, states)
    return out


def _strides(tensor: torch.Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def causal_convolution(
    new: torch.Tensor,
    states: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    *,
    has_silu: bool,
) -> torch.Tensor | None:
    """The outputs `[rows, channels, 1]` of new inputs, likewise, after those in `states` `[states, channels, length]`,
    to which they are added; weights are `[channels, size]`."""
    given = (new, states, weights) if bias is None else (new, states, weights, bias)
    (num_states, channels, length), size, rows = states.shape, weights.shape[1], len(new)
    is_whole = states.stride(2) == 1 and weights.is_contiguous() and (bias is None or bias.is_contiguous())
    fit = new.shape == (rows, channels, 1) and len(weights) == channels and (bias is None or bias.shape == (channels,))
    if not _have_code(given) or not is_whole or not fit or not length or not 0 < size <= length + 1:
        return None
    if not _are_slots(slots, rows, states):
        return None
    out = new.new_empty((rows, channels, 1))
    strides = new.stride(0), new.stride(1)
    if states.is_cuda:
        grid = rows, -(-channels // CHANNEL_BLOCK)
        sizes = channels, length, next_power_of_2(length), size, CHANNEL_BLOCK, has_silu
        if rows:
            state_kernels.convolve[grid](
                new, states, slots, weights, bias, out, *strides, states.stride(0), states.stride(1), *sizes
            )
        return out
    bad = _native.convolve_one(
        states.data_ptr(),
        _address(slots),
        num_states,
        states.stride(0),
        states.stride(1),
        new.data_ptr(),
        *strides,
        weights.data_ptr(),
        _address(bias),
        out.data_ptr(),
        rows,
        channels,
        length,
        size,
        has_silu,
    )
    _check(bad, slots, states)
    return out


def _have_code(tensors: Sequence[torch.Tensor]) -> bool:
    if tensors[0].is_cpu:
        return _native is not None and all(each.is_cpu and each.dtype == torch.float32 for each in tensors)
    return state_kernels is not None and all(each.is_cuda and each.dtype in FLOATS for each in tensors)


def _are_slots(slots: torch.Tensor | None, rows: int, states: torch.Tensor) -> bool:
    if slots is None:
        return len(states) == rows
    return (
        slots.shape == (rows,)
        and slots.dtype == torch.int64
        and slots.device == states.device
        and (slots.is_contiguous())
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _record(*numbers: torch.Tensor | int | None) -> bytes:
    """Addresses and numbers, as C reads them."""
    whole = [each if isinstance(each, int) else _address(each) for each in numbers]
    return struct.pack(f"{len(whole)}q", *whole)


def _check(bad: int, slots: torch.Tensor | None, states: torch.Tensor) -> None:
    if bad >= 0 and slots is not None:
        raise BadRows(f"slot {int(slots[bad])} of row {bad} is not among the {len(states)} states")
