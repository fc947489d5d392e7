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
