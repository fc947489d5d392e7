"""States on a CPU, in C: one token of each row is taken into states where they lie. All numbers are float32.

Where C was not built, or tensors are not such, the functions return None, and have changed nothing.
"""

from __future__ import annotations

import torch

from kvweave.attention.cpu import MAX_DIM

try:
    from kvweave.attention import _native
except ImportError:  # no C compiler was there
    _native = None  # type: ignore[assignment]


def gated_delta_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    *,
    normalises: bool,
) -> torch.Tensor | None:
    """The outputs `[rows, 1, heads, value dim]` of queries and keys `[rows, 1, heads, key dim]`, values, and logarithms
    of decays and betas `[rows, 1, heads]`; `states` `[rows, heads, key dim, value dim]` are updated.

    state = decay * state + key (x) beta * (value - decay * state^T key); out = state^T query / sqrt(key dim). With
    `normalises` queries and keys are of length 1.
    """
    given = queries, keys, values, decays, betas, states
    rows, heads, key_dim, value_dim = states.shape
    shapes = [*[(rows, 1, heads, key_dim)] * 2, (rows, 1, heads, value_dim), *[(rows, 1, heads)] * 2, states.shape]
    fit = all(tensor.shape == shape for tensor, shape in zip(given, shapes, strict=True))
    if not fit or not _are_plain(given) or max(key_dim, value_dim) > MAX_DIM:
        return None
    if not states[0].is_contiguous() or any(tensor.stride(3) != 1 for tensor in given[:3]):
        return None
    out = values.new_empty((rows, 1, heads, value_dim))
    strides = [stride for tensor in given[:5] for stride in (tensor.stride(0), tensor.stride(2))]
    sizes = states.stride(0), rows, heads, key_dim, value_dim, int(normalises)
    addresses = tuple(tensor.data_ptr() for tensor in (*given, out))
    _native.delta_rule(addresses, (*strides, *sizes), torch.get_num_threads())
    return out


def causal_convolution(
    new: torch.Tensor, states: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, *, has_silu: bool
) -> torch.Tensor | None:
    """The outputs `[rows, channels, 1]` of new inputs, likewise, after those in `states` `[rows, channels, length]`, to
    which they are added; weights are `[channels, size]`."""
    given = (new, states, weights) if bias is None else (new, states, weights, bias)
    (rows, channels, length), size = states.shape, weights.shape[1]
    is_whole = states.stride(2) == 1 and weights.is_contiguous() and (bias is None or bias.is_contiguous())
    fit = new.shape == (rows, channels, 1) and len(weights) == channels and (bias is None or bias.shape == (channels,))
    if not _are_plain(given) or not is_whole or not fit or not length or not 0 < size <= length + 1:
        return None
    out = new.new_empty((rows, channels, 1))
    _native.convolve_one(
        states.data_ptr(),
        states.stride(0),
        states.stride(1),
        new.data_ptr(),
        new.stride(0),
        new.stride(1),
        weights.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        channels,
        length,
        size,
        has_silu,
    )
    return out


def _are_plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    return _native is not None and all(each.dtype == torch.float32 and each.is_cpu for each in tensors)
