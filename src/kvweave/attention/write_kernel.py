# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""The Triton kernel that writes new rows into pages, quantised as the pages keep them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_plane(
    rows,
    plane,
    scales,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    PER: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One row of one head: quantised with a scale for each PER columns where there are scales, else cast."""
    group, column = tl.arange(0, BLOCKS)[:, None], tl.arange(0, PER)[None, :]
    at = group * PER + column
    x = tl.load(rows + at, mask=at < DIM, other=0.0)
    if LARGEST > 0:
        x = x.to(tl.float32)
        if scales is not None:
            factor = tl.div_rn(tl.max(tl.abs(x), 1), LARGEST)
            factor = tl.where(factor > 0, factor, 1.0)
            tl.store(scales + tl.arange(0, BLOCKS), factor, mask=tl.arange(0, BLOCKS) * PER < DIM)
            x = tl.div_rn(x, factor[:, None])
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        if ROUNDS:
            x = (x + 12582912.0) - 12582912.0  # to the nearest whole number, ties to even
    tl.store(plane + at, x.to(plane.dtype.element_ty), mask=at < DIM)


@triton.jit
def write(
    slots,
    first_rows,
    first_plane,
    first_scales,
    second_rows,
    second_plane,
    second_scales,
    first_row,
    first_row_head,
    first_block,
    first_head,
    first_token,
    first_scale_block,
    first_scale_head,
    first_scale_token,
    second_row,
    second_row_head,
    second_block,
    second_head,
    second_token,
    second_scale_block,
    second_scale_head,
    second_scale_token,
    TOKENS: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    FIRST_PER: tl.constexpr,
    FIRST_LARGEST: tl.constexpr,
    SECOND_DIM: tl.constexpr,
    SECOND_BLOCKS: tl.constexpr,
    SECOND_PER: tl.constexpr,
    SECOND_LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Program (token, head): its rows of one or two planes go to its slot; slots below 0 are skipped."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)  # an arena may have more numbers than int32 counts
    if slot < 0:
        return
    block, offset = slot // TOKENS, slot % TOKENS
    scales = first_scales
    if first_scales is not None:
        scales = first_scales + block * first_scale_block + offset * first_scale_token + head * first_scale_head
    _write_plane(
        first_rows + token * first_row + head * first_row_head,
        first_plane + block * first_block + offset * first_token + head * first_head,
        scales,
        FIRST_DIM,
        FIRST_BLOCKS,
        FIRST_PER,
        FIRST_LARGEST,
        ROUNDS,
    )
    if SECOND_DIM:
        more = second_scales
        if second_scales is not None:
            more = second_scales + block * second_scale_block + offset * second_scale_token + head * second_scale_head
        _write_plane(
            second_rows + token * second_row + head * second_row_head,
            second_plane + block * second_block + offset * second_token + head * second_head,
            more,
            SECOND_DIM,
            SECOND_BLOCKS,
            SECOND_PER,
            SECOND_LARGEST,
            ROUNDS,
        )
