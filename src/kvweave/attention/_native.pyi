def attend(
    layer: bytes,
    queries: int,
    query_token: int,
    query_head: int,
    dtype: int,
    out: int,
    starts: int,
    lengths: int,
    table: int,
    num_rows: int,
    width: int,
    heads: int,
    threads: int,
    /,
) -> int: ...
def write_rows(targets: bytes, keys: int, values: int, slots: int, count: int, /) -> int: ...
def delta_rule(record: bytes, threads: int, /) -> int: ...
def selective_state(record: bytes, threads: int, /) -> int: ...
def convolve_one(
    states: int,
    slots: int,
    num_states: int,
    state_row: int,
    state_channel: int,
    new: int,
    new_row: int,
    new_channel: int,
    weights: int,
    bias: int,
    out: int,
    rows: int,
    channels: int,
    length: int,
    size: int,
    has_silu: int,
    /,
) -> int: ...
