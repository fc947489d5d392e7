# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, PLR0912, PLR0915, SIM102
# (Triton reads annotations: arguments have none, constants are in capitals; a kernel is one function)
"""Triton kernels over pages: attention of a tile of query rows, and the merge of its splits.

A tile is BLOCK_M rows of one sequence and one KV head: row m is query m // GROUP, head m % GROUP of those that share
the KV head. Tiles of decodes are counted by sequence; tiles of chunks one after the other, each sequence looked up by a
binary search, so that the grid follows from shapes and the host waits for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tail(position, BACK: tl.constexpr, STEP: tl.constexpr):
    """The first token that a query sees behind the head."""
    back = tl.maximum(position - BACK, 0)
    return back if STEP == 1 else back // STEP * STEP


@triton.jit
def _sequence_of(tile, starts, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that a tile of chunks belongs to: the last whose first tile is not after it."""
    low: tl.int32 = 0
    high: tl.int32 = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _wide(values, like: tl.constexpr):
    """Numbers of a page in the type that is computed with."""
    return values.to(tl.float32).to(like) if values.dtype == tl.int8 else values.to(like)


@triton.jit
def _over_tile(
    most,
    total,
    summed,
    q,
    r,
    start,
    low,
    high,
    position,
    tail,
    blocks,
    key,
    rest,
    value,
    key_scale,
    value_scale,
    key_block,
    key_token,
    rest_block,
    rest_token,
    value_block,
    value_token,
    key_scale_block,
    key_scale_token,
    value_scale_block,
    value_scale_token,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    PER_SCALE: tl.constexpr,
    HEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """The tokens from `start` on join largest score, total and weighted sums. IS_WHOLE: every row sees all of them."""
    LOG2E: tl.constexpr = 1.4426950408889634
    kind: tl.constexpr = q.dtype
    d, dr, dv = tl.arange(0, KEY_PAD), tl.arange(0, REST_PAD), tl.arange(0, VALUE_PAD)
    n = start + tl.arange(0, BLOCK_N)
    # Block 0 is NULL, and its bytes may be NaN: they are masked when they are loaded, since 0 * NaN is NaN.
    if IS_WHOLE:
        block = tl.load(blocks + n // TOKENS).to(tl.int64)
        is_seen = block != 0
    else:
        is_seen = (n < high) & ((n < HEAD) | (n >= low))
        block = tl.load(blocks + n // TOKENS, mask=is_seen, other=0).to(tl.int64)
        is_seen = is_seen & (block != 0)
    offset = n % TOKENS
    k = tl.load(
        key + (block * key_block + offset * key_token)[None, :] + d[:, None],
        mask=is_seen[None, :] & (d < KEY_DIM)[:, None],
        other=0.0,
    )
    if KEY_SCALES > 1:
        where = key_scale + (block * key_scale_block + offset * key_scale_token)[None, :] + (d // PER_SCALE)[:, None]
        factor = tl.load(where, mask=is_seen[None, :] & (d < KEY_DIM)[:, None], other=0.0)
        k = k.to(tl.float32) * factor
    k = _wide(k, kind)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if KEY_SCALES == 1:  # one scale a key: it is applied to the score, one product instead of KEY_DIM
        factor = tl.load(key_scale + block * key_scale_block + offset * key_scale_token, mask=is_seen, other=0.0)
        scores *= factor[None, :]
    if REST_DIM:  # a width that is no power of two is two products (576 = 512 + 64), which pads less
        more = tl.load(
            rest + (block * rest_block + offset * rest_token)[None, :] + dr[:, None],
            mask=is_seen[None, :] & (dr < REST_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(r, _wide(more, kind), scores, input_precision=PRECISION)
    if SOFTCAP:  # softcap * tanh(score / softcap), as a sigmoid; times log2(e), because exp2 is what the hardware has
        scores = (2 * tl.sigmoid(scores * (scale * 2 / softcap)) - 1) * (softcap * LOG2E)
    else:
        scores *= scale * LOG2E
    if IS_WHOLE:
        scores += tl.where(is_seen, 0.0, float("-inf"))[None, :]
    else:
        sees = is_seen[None, :] & ((n[None, :] < HEAD) | (n[None, :] >= tail[:, None])) & (position >= 0)[:, None]
        if CAUSAL:
            sees = sees & (n[None, :] <= position[:, None])
        scores = tl.where(sees, scores, float("-inf"))

    now = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no token: -inf minus -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    share = tl.exp2(most - base)
    total = total * share + tl.sum(weights, 1)
    summed = summed * share[:, None]
    if SHARED:  # a latent is key and value, and is loaded once
        v = tl.trans(k)
        if KEY_SCALES == 1:
            weights *= factor[None, :]
    else:
        v = tl.load(
            value + (block * value_block + offset * value_token)[:, None] + dv[None, :],
            mask=is_seen[:, None] & (dv < VALUE_DIM)[None, :],
            other=0.0,
        )
        if VALUE_SCALES > 1:
            where = value_scale + (block * value_scale_block + offset * value_scale_token)[:, None]
            factor = tl.load(
                where + (dv // PER_SCALE)[None, :], mask=is_seen[:, None] & (dv < VALUE_DIM)[None, :], other=0.0
            )
            v = v.to(tl.float32) * factor
        v = _wide(v, kind)
        if VALUE_SCALES == 1:
            where = value_scale + block * value_scale_block + offset * value_scale_token
            weights *= tl.load(where, mask=is_seen, other=0.0)[None, :]
    return now, total, tl.dot(weights.to(kind), v, summed, input_precision=PRECISION)


@triton.jit(do_not_specialize=["width", "num_rows", "num_tokens"])
def attend(
    queries,
    out,
    sums,
    stats,
    table,
    starts,
    lengths,
    sinks,
    key,
    rest,
    value,
    key_scale,
    value_scale,
    query_token,
    query_head,
    width,
    num_rows,
    num_tokens,
    key_block,
    key_head,
    key_token,
    rest_block,
    rest_head,
    rest_token,
    value_block,
    value_head,
    value_token,
    key_scale_block,
    key_scale_head,
    key_scale_token,
    value_scale_block,
    value_scale_head,
    value_scale_token,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    PER_SCALE: tl.constexpr,
    HEAD: tl.constexpr,
    BACK: tl.constexpr,
    STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DECODE_QUERIES: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one tile over one split of its context.

    Decodes are the sequences of at most DECODE_QUERIES queries; the others are chunks. Key columns are those of `key`
    and of `rest`; SHARED: the values are the columns of `key`. HEAD, BACK and STEP are the band of the reach. With
    splits, weighted sums go to `sums`, largest score and total to `stats`: those of decodes by row, `[splits, num_rows,
    DECODE_QUERIES, HEADS, VALUE_PAD]`, those of chunks by token, `[splits, num_tokens, HEADS, VALUE_PAD]`.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        TILES: tl.constexpr = (DECODE_QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
        row = tile // TILES
        first_m = tile % TILES * BLOCK_M
    else:
        row = _sequence_of(tile, starts, num_rows, GROUP, BLOCK_M)
        first_m = (tile - (tl.load(starts + row) * GROUP // BLOCK_M + row)) * BLOCK_M
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    length = tl.load(lengths + row)
    if (first_m >= count * GROUP) | ((count > DECODE_QUERIES) if IS_DECODE else (count <= DECODE_QUERIES)):
        return

    # the rows of the tile, and what they see together: [0, head tiles) and [tail tile, end)
    m = first_m + tl.arange(0, BLOCK_M)
    is_row = m < count * GROUP
    token = (start + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    position = length - count + m // GROUP
    first_position = length - count + first_m // GROUP
    last_position = length - count + tl.minimum(first_m + BLOCK_M, count * GROUP - 1) // GROUP
    low = _tail(first_position, BACK, STEP)
    high = tl.minimum(last_position + 1 if CAUSAL else length, width * TOKENS)
    head_tiles = (tl.minimum(HEAD, low) + BLOCK_N - 1) // BLOCK_N
    tail_tile = tl.maximum(low // BLOCK_N, head_tiles)
    num_tiles = head_tiles + tl.maximum((high + BLOCK_N - 1) // BLOCK_N - tail_tile, 0)
    if high <= 0:
        num_tiles = 0
    per_split = (num_tiles + tl.num_programs(2) - 1) // tl.num_programs(2)
    first_tile, last_tile = split * per_split, tl.minimum((split + 1) * per_split, num_tiles)
    if IS_DECODE:
        place = ((split * num_rows + row) * DECODE_QUERIES + m // GROUP) * HEADS + head
    else:
        place = (split * num_tokens + token) * HEADS + head
    stat = stats + place.to(tl.int64) * 2
    if IS_SPLIT:
        if first_tile >= last_tile:
            tl.store(stat, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
            tl.store(stat + 1, tl.zeros((BLOCK_M,), tl.float32), mask=is_row)
            return

    d, dr, dv = tl.arange(0, KEY_PAD), tl.arange(0, REST_PAD), tl.arange(0, VALUE_PAD)
    query = queries + token[:, None] * query_token + head[:, None] * query_head
    q = tl.load(query + d[None, :], mask=is_row[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    r = q
    if REST_DIM:
        r = tl.load(query + KEY_DIM + dr[None, :], mask=is_row[:, None] & (dr < REST_DIM)[None, :], other=0.0)
    tail = _tail(position, BACK, STEP)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, VALUE_PAD), tl.float32)
    key += kv_head * key_head
    rest += kv_head * rest_head
    value += kv_head * value_head
    key_scale += kv_head * key_scale_head
    value_scale += kv_head * value_scale_head
    blocks = table + row.to(tl.int64) * width

    # tiles that every row sees whole need no mask: in chunks those between the tails and the diagonal
    masked_until, masked_from = last_tile, last_tile
    if not IS_DECODE:
        last_tail = _tail(last_position, BACK, STEP)
        masked_until = head_tiles + tl.maximum((last_tail + BLOCK_N - 1) // BLOCK_N - tail_tile, 0)
        masked_until = tl.minimum(tl.where(first_position < 0, num_tiles, masked_until), num_tiles)
        whole_end = (first_position + 1 if CAUSAL else high) // BLOCK_N
        masked_from = tl.maximum(head_tiles + whole_end - tail_tile, masked_until)
        masked_from = tl.minimum(masked_from, num_tiles)
        masked_until = tl.minimum(tl.maximum(masked_until, first_tile), last_tile)
        masked_from = tl.minimum(tl.maximum(masked_from, first_tile), last_tile)
    for part in tl.static_range(1 if IS_DECODE else 3):
        begin = first_tile if part == 0 else masked_until if part == 1 else masked_from
        end = masked_until if part == 0 else masked_from if part == 1 else last_tile
        for i in range(begin, end):
            tile_number = tl.where(i < head_tiles, i, i - head_tiles + tail_tile) if HEAD else i + tail_tile
            most, total, summed = _over_tile(
                most,
                total,
                summed,
                q,
                r,
                tile_number * BLOCK_N,
                low,
                high,
                position,
                tail,
                blocks,
                key,
                rest,
                value,
                key_scale,
                value_scale,
                key_block,
                key_token,
                rest_block,
                rest_token,
                value_block,
                value_token,
                key_scale_block,
                key_scale_token,
                value_scale_block,
                value_scale_token,
                scale,
                softcap,
                TOKENS,
                KEY_DIM,
                KEY_PAD,
                REST_DIM,
                REST_PAD,
                VALUE_DIM,
                VALUE_PAD,
                SHARED,
                KEY_SCALES,
                VALUE_SCALES,
                PER_SCALE,
                HEAD,
                CAUSAL,
                SOFTCAP,
                BLOCK_N,
                PRECISION,
                part == 1,
            )

    if IS_SPLIT:
        tl.store(stat, most, mask=is_row)
        tl.store(stat + 1, total, mask=is_row)
        where = sums + place.to(tl.int64)[:, None] * VALUE_PAD + dv[None, :]
        tl.store(where, summed, mask=is_row[:, None])
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            total = tl.where(most == float("-inf"), 0.0, total + tl.exp2(sink - most))
        summed = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        where = out + (token * HEADS + head)[:, None] * VALUE_DIM + dv[None, :]
        tl.store(where, summed.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def merge(
    sums,
    stats,
    out,
    starts,
    sinks,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    DECODE_QUERIES: tl.constexpr,
):
    """The output of some columns of one query and head, out of its splits: of a decode, or with DECODE_QUERIES 0 of
    any token."""
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    if DECODE_QUERIES:
        row, query = tl.program_id(0) // DECODE_QUERIES, tl.program_id(0) % DECODE_QUERIES
        start = tl.load(starts + row)
        count = tl.load(starts + row + 1) - start
        if (query >= count) | (count > DECODE_QUERIES):
            return
        token = (start + query).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_split = split < num_splits
    at = (split.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * HEADS + head
    most = tl.load(stats + at * 2, mask=is_split, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=is_split, other=0.0)
    largest = tl.max(most, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # no split has seen a token: the output is zeros
    share = tl.exp2(most - base)
    part = tl.load(sums + at[:, None] * VALUE_PAD + d[None, :], mask=(total > 0)[:, None], other=0.0)
    whole = tl.sum(total * share, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        whole = tl.where(largest == float("-inf"), 0.0, whole + tl.exp2(sink - base))
    summed = tl.sum(part * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + (token * HEADS + head) * VALUE_DIM + d, summed.to(out.dtype.element_ty), mask=d < VALUE_DIM)
