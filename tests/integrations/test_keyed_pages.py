"""Pages under keys of an engine's own, in a daemon: a page's place among the keys of a call says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvweave.integrations.keyed_pages import KeyedPool, page_prompt, page_schema, promised
from kvweave.server import RemoteStore
from kvweave.store import Namespace, Shard
from kvweave.store.keys import Bytes
from tests.server.models import serving, settings

KEYS = [bytes([number]) * 32 for number in range(4)]
SCHEMA = page_schema([KeyedPool("kv", 64), KeyedPool("mamba", 96)])


def page(shard: Shard, key: bytes) -> Bytes:
    return np.full(shard.payload_bytes, key[0] + shard.payload_bytes, np.uint8)


def test_pages_of_two_pools_are_read_in_another_order_than_they_were_written(tmp_path: Path) -> None:
    read: dict[tuple[str, int], bytes] = {}

    def sink(shard: Shard, chunk: int, payload: Bytes) -> None:
        read[shard.tag, chunk] = payload.tobytes()

    with serving(settings(tmp_path)) as daemon, RemoteStore(SCHEMA, daemon.settings.socket, model="m") as store:
        saved = store.save(page_prompt(KEYS, Namespace("m")), lambda shard, chunk: page(shard, KEYS[chunk]))
        assert saved.stored == 8
        backwards: Any = page_prompt(KEYS[::-1], Namespace("m"))
        assert store.load(promised(store, backwards), sink, shards=[1]) == 4
    shard = SCHEMA.shards[1]
    assert read == {(shard.tag, at): page(shard, key).tobytes() for at, key in enumerate(KEYS[::-1])}
