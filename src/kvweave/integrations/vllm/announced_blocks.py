"""Blocks that the engine's events called stored, so that their removal can be announced, too."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvweave.errors import KVWeaveError
from kvweave.integrations.vllm.engine_groups import EngineGroup
from kvweave.store import BaseStore, Operation, Schema
from kvweave.store.keys import SHARD_ID_BYTES, TENANT_BYTES, Bytes
from kvweave.store.removals import FROM_NOW, Removals

MOST_CHUNKS = 1 << 18
"""Chunks whose blocks are remembered. Blocks of older ones are announced as removed: their removal could not be
announced later."""
ASK_EVERY_S = 0.2

RemovedBlocks = dict[int, list[Any]]
"""By the engine's group: hashes of blocks."""


def groups_of_shards(
    schema: Schema, groups: Sequence[EngineGroup], tags: Collection[tuple[str, str]]
) -> dict[bytes, list[int]]:
    """By a shard's id: the engine's groups that have layers of it, where `tags` says which tags a table leads to."""
    return {shard.id: [group.number for group in groups if (group.table, shard.tag) in tags] for shard in schema.shards}


class AnnouncedBlocks:
    """The engine's hashes of blocks, by the chunks of the store that hold their rows."""

    def __init__(self, groups_of_shard: Mapping[bytes, Sequence[int]], most: int = MOST_CHUNKS) -> None:
        """`groups_of_shard`: by a shard's id, the engine's groups whose rows it has."""
        self._groups_of, self._most = groups_of_shard, most
        self._blocks: dict[tuple[int, bytes], list[Any]] = {}
        self._announced: set[tuple[int, Any]] = set()

    def add(self, group: EngineGroup, chunk_tokens: int, prefixes: Bytes, first: int, hashes: Sequence[Any]) -> None:
        """Blocks from number `first` on are announced; `prefixes` are the digests of their prompt's chunks. Of states,
        the chunk at whose end the snapshot was taken."""
        size = group.block_tokens
        for block, name in enumerate(hashes, first):
            chunks = range(block * size // chunk_tokens, -(-(block + 1) * size // chunk_tokens))
            for chunk in chunks[-1:] if group.is_state else chunks:
                held = self._blocks.setdefault((group.number, prefixes[chunk].tobytes()), [])
                if name not in held:
                    held.append(name)
            self._announced.add((group.number, name))

    def removed(self, keys: Iterable[bytes]) -> RemovedBlocks:
        """The blocks that these keys, gone now, were part of; each once."""
        gone: RemovedBlocks = {}
        for key in keys:
            for number in self._groups_of.get(key[-SHARD_ID_BYTES:], ()):
                self._drop((number, key[TENANT_BYTES:-SHARD_ID_BYTES]), gone)
        return gone

    def forgotten(self) -> RemovedBlocks:
        """The blocks of the oldest chunks, where there are more than are remembered."""
        gone: RemovedBlocks = {}
        while len(self._blocks) > self._most:
            self._drop(next(iter(self._blocks)), gone)
        return gone

    def everything(self) -> RemovedBlocks:
        """All blocks: it is not known which are stored."""
        gone: RemovedBlocks = {}
        for place in [*self._blocks]:
            self._drop(place, gone)
        return gone

    def _drop(self, place: tuple[int, bytes], gone: RemovedBlocks) -> None:
        for name in self._blocks.pop(place, ()):
            if (place[0], name) in self._announced:
                self._announced.remove((place[0], name))
                gone.setdefault(place[0], []).append(name)


class RemovalFollower:
    """Asks a store again and again what it has removed. Never waits."""

    def __init__(self, store: BaseStore[Any]) -> None:
        self._store = store
        self._number, self._asked_at = FROM_NOW, time.monotonic()
        self._asked: Operation[Removals] | None = store.submit_removed()

    def take(self) -> Removals | None:
        """The newest answer, once; None: there is none. A store that does not answer is asked again."""
        if self._asked is None:
            if time.monotonic() - self._asked_at >= ASK_EVERY_S:
                self._asked_at, self._asked = time.monotonic(), self._store.submit_removed(self._number)
            return None
        if not self._asked.is_done:
            return None
        asked, self._asked = self._asked, None
        try:
            answer = asked.result(timeout=0)
        except KVWeaveError:
            return None
        self._number = answer.number
        return answer
