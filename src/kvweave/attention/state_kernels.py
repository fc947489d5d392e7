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
    decay_key,
    state_row,
    scale,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALISES: tl.constexpr,
    DECAYS_BY_KEY: tl.constexpr,
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
    decay = decays + row * decay_row + head * decay_head
    if DECAYS_BY_KEY:
        decay = tl.exp(tl.load(decay + k * decay_key, mask=is_key, other=0.0).to(tl.float32))[:, None]
    else:
        decay = tl.exp(tl.load(decay).to(tl.float32))
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
def selective_state(
    inputs,
    steps,
    rates,
    ins,
    outs,
    skips,
    biases,
    gates,
    states,
    out,
    slots,
    input_row,
    input_head,
    input_dim,
    step_row,
    step_head,
    step_dim,
    rate_head,
    rate_dim,
    rate_size,
    in_row,
    in_group,
    out_row,
    out_group,
    skip_head,
    skip_dim,
    bias_head,
    bias_dim,
    gate_row,
    gate_head,
    gate_dim,
    state_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTPLUS: tl.constexpr,
    ONE_RATE: tl.constexpr,
):
    """Program (row, head, block of its numbers): their states, SIZE each. ONE_RATE: the numbers of a state decay
    alike."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    d, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE_PAD)
    is_dim, is_size = d < DIM, n < SIZE
    x = tl.load(inputs + row * input_row + head * input_head + d * input_dim, mask=is_dim, other=0.0).to(tl.float32)
    step = tl.load(steps + row * step_row + head * step_head + d * step_dim, mask=is_dim, other=0.0).to(tl.float32)
    if biases is not None:
        step += tl.load(biases + head * bias_head + d * bias_dim, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_SOFTPLUS:
        step = tl.where(step > 20, step, tl.log(1 + tl.exp(tl.minimum(step, 20.0))))
    where = states + slot * state_row + head * DIM * SIZE + d[:, None] * SIZE + n[None, :]
    there = is_dim[:, None] & is_size[None, :]
    state = tl.load(where, mask=there, other=0.0).to(tl.float32)
    rate = rates + head * rate_head + d * rate_dim
    if ONE_RATE:
        state *= tl.exp(step * tl.load(rate, mask=is_dim, other=0.0).to(tl.float32))[:, None]
    else:
        each = tl.load(rate[:, None] + n[None, :] * rate_size, mask=there, other=0.0).to(tl.float32)
        state *= tl.exp(step[:, None] * each)
    group = head // PER_GROUP
    into = tl.load(ins + row * in_row + group * in_group + n, mask=is_size, other=0.0).to(tl.float32)
    back = tl.load(outs + row * out_row + group * out_group + n, mask=is_size, other=0.0).to(tl.float32)
    state += (step * x)[:, None] * into[None, :]
    tl.store(where, state.to(states.dtype.element_ty), mask=there)
    result = tl.sum(state * back[None, :], 1)
    if skips is not None:
        result += x * tl.load(skips + head * skip_head + d * skip_dim, mask=is_dim, other=0.0).to(tl.float32)
    if gates is not None:
        gate = tl.load(gates + row * gate_row + head * gate_head + d * gate_dim, mask=is_dim, other=0.0).to(tl.float32)
        result *= gate / (1 + tl.exp(-gate))
    tl.store(out + (row * HEADS + head) * DIM + d, result.to(out.dtype.element_ty), mask=is_dim)


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
