"""States updated in place: one token of each row is taken into the row's state, where it lies.

On a CPU in C, float32 only; on a GPU by Triton kernels. `states[slots[i]]` is the state of row i, `states[i]` without
slots. Where there is neither C nor Triton, or tensors are not such, the functions return None, and have changed
nothing.
"""

from __future__ import annotations

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
VALUE_BLOCK, CHANNEL_BLOCK = 32, 256
"""Columns of a state, and channels of a convolution, of one program on a GPU."""


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
    of decays and betas `[rows, 1, heads]`; `states` `[states, heads, key dim, value dim]` are updated.

    state = decay * state + key (x) beta * (value - decay * state^T key); out = state^T query / sqrt(key dim). With
    `normalises` queries and keys are of length 1.
    """
    given = queries, keys, values, decays, betas, states
    (num_states, heads, key_dim, value_dim), rows = states.shape, len(queries)
    shapes = [*[(rows, 1, heads, key_dim)] * 2, (rows, 1, heads, value_dim), *[(rows, 1, heads)] * 2]
    fit = all(tensor.shape == shape for tensor, shape in zip(given[:5], shapes, strict=True))
    if not fit or not _have_code(given) or not _are_slots(slots, rows, states) or max(key_dim, value_dim) > MAX_DIM:
        return None
    if not states[0].is_contiguous() or any(tensor.stride(3) != 1 for tensor in given[:3]):
        return None
    out = queries.new_empty((rows, 1, heads, value_dim))
    strides = [stride for tensor in given[:5] for stride in (tensor.stride(0), tensor.stride(2))]
    if states.is_cuda:
        grid = rows, heads, -(-value_dim // VALUE_BLOCK)
        sizes = heads, key_dim, value_dim, next_power_of_2(key_dim), VALUE_BLOCK, normalises
        if rows:
            state_kernels.delta_rule[grid](*given, slots, out, *strides, states.stride(0), key_dim**-0.5, *sizes)
        return out
    counts = states.stride(0), num_states, rows, heads, key_dim, value_dim, int(normalises)
    addresses = (*map(_address, given), out.data_ptr(), _address(slots))
    _check(_native.delta_rule(addresses, (*strides, *counts), torch.get_num_threads()), slots, states)
    return out


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


def _have_code(tensors: tuple[torch.Tensor, ...]) -> bool:
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


def _check(bad: int, slots: torch.Tensor | None, states: torch.Tensor) -> None:
    if bad >= 0 and slots is not None:
        raise BadRows(f"slot {int(slots[bad])} of row {bad} is not among the {len(states)} states")
