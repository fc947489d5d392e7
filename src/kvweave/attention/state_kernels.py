# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""Triton kernels that take one token of each row into its state, in place; numbers are float32 while they compute."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _unit(numbers, scale, NORMALISES: tl.constexpr):
    return numbers * (scale * tl.rsqrt(tl.sum(numbers * numbers, 0) + 1e-6)) if NORMALISES else numbers * scale


@triton.jit
def delta_rule(
    queries,
    keys,
    values,
    decays,
    betas,
    states,
    slots,
    out,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    decay_row,
    decay_head,
    beta_row,
    beta_head,
    state_row,
    scale,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    """Program (row, head, block of value columns): those columns of the head's state `[key dim, value dim]`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    k, v = tl.arange(0, KEY_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = k < KEY_DIM, v < VALUE_DIM
    query = tl.load(queries + row * query_row + head * query_head + k, mask=is_key, other=0.0).to(tl.float32)
    key = tl.load(keys + row * key_row + head * key_head + k, mask=is_key, other=0.0).to(tl.float32)
    value = tl.load(values + row * value_row + head * value_head + v, mask=is_value, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(decays + row * decay_row + head * decay_head).to(tl.float32))
    beta = tl.load(betas + row * beta_row + head * beta_head).to(tl.float32)
    where = states + slot * state_row + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    there = is_key[:, None] & is_value[None, :]
    state = tl.load(where, mask=there, other=0.0).to(tl.float32) * decay
    query, key = _unit(query, scale, NORMALISES), _unit(key, 1.0, NORMALISES)
    delta = (value - tl.sum(state * key[:, None], 0)) * beta
    state += key[:, None] * delta[None, :]
    tl.store(where, state.to(states.dtype.element_ty), mask=there)
    result = tl.sum(state * query[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + v, result, mask=is_value)


@triton.jit
def convolve(
    new,
    states,
    slots,
    weights,
    bias,
    out,
    new_row,
    new_channel,
    state_row,
    state_channel,
    channels,
    LENGTH: tl.constexpr,
    LENGTH_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Program (row, block of channels): the last inputs of each channel, the new one among them, times its weights."""
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    channel, place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LENGTH_PAD)[None, :]
    is_channel = channel < channels
    x = tl.load(new + row * new_row + channel * new_channel, mask=is_channel, other=0.0)
    where = states + slot * state_row + channel[:, None] * state_channel + place
    there = is_channel[:, None] & (place < LENGTH)
    before = tl.load(where, mask=there, other=0.0)
    after = tl.load(where + 1, mask=is_channel[:, None] & (place < LENGTH - 1), other=0.0)
    after = tl.where(place == LENGTH - 1, x.to(after.dtype)[:, None], after)
    used = place - (LENGTH + 1 - SIZE)
    weight = tl.load(weights + channel[:, None] * SIZE + used, mask=there & (used >= 0), other=0.0)
    total = tl.sum(before.to(tl.float32) * weight.to(tl.float32), 1)
    last = tl.load(weights + channel * SIZE + SIZE - 1, mask=is_channel, other=0.0)
    total += last.to(tl.float32) * x.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_SILU:
        total = total / (1 + tl.exp(-total))
    tl.debug_barrier()  # other threads have read what is overwritten now
    tl.store(where, after, mask=there)
    tl.store(out + row * channels + channel, total.to(out.dtype.element_ty), mask=is_channel)
