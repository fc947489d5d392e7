"""A model as the daemon knows it: row ids, headers, sizes and reaches. What is in payloads is the clients' business."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadRequest, KVWeaveError
from kvweave.prefix import joint_hit
from kvweave.server.description import GroupDescription, ModelDescription, ShardDescription
from kvweave.server.protocol import GroupInfo, Register, ShardInfo
from kvweave.server.report import ModelReport, printable
from kvweave.spec import DType, Reach, codec
from kvweave.spec.reach import reach_class
from kvweave.store import Schema
from kvweave.store.blob import blob_bytes, header_bytes
from kvweave.store.keys import SHARD_ID_BYTES
from kvweave.store.shard_group import ShardGroup

MOST = 1 << 40


def registration(number: int, model: str, schema: Schema) -> Register:
    """A schema, as a client says it."""
    shards = [ShardInfo(shard.id, blob_bytes(shard), shard.meta) for shard in schema.shards]
    groups = [GroupInfo(g.tag, g.stop - g.first, codec.to_dict(g.reach)) for g in schema.groups]
    return Register(number, model, schema.chunk_tokens, shards, groups)


class _Role(msgspec.Struct):
    name: str
    rows: int
    shape: list[int]
    dtype: str


class _Meta(msgspec.Struct):
    """What the daemon reads of a row's `meta`."""

    chunk_tokens: int
    layers: list[int]
    roles: list[_Role]
    part: int
    parts: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class RegisteredShard:
    """A row as its blobs' headers describe it, of blobs of `blob_bytes`."""

    meta: bytes
    blob_bytes: int
    chunk_tokens: int

    @property
    def payload_bytes(self) -> int:
        return max(0, self.blob_bytes - header_bytes(self))


class RegisteredModel:
    """A registered schema, shared by all connections that registered the same."""

    def __init__(self, said: Register) -> None:
        self.model, self.chunk_tokens = printable(said.model), said.chunk_tokens
        self.digest = digest(said)
        self.sizes = np.array([shard.blob_bytes for shard in said.shards], np.int64)
        self.ids = np.frombuffer(b"".join(shard.id for shard in said.shards), np.uint8).reshape(-1, SHARD_ID_BYTES)
        self.shards = [RegisteredShard(shard.meta, shard.blob_bytes, said.chunk_tokens) for shard in said.shards]
        self.num_bytes = sum(len(shard.meta) for shard in said.shards)
        self.users = 0
        """Connections that have it registered now."""
        self.counts: Counter[str] = Counter()
        metas = [_meta(shard, said.chunk_tokens) for shard in said.shards]
        self._described = [_described(shard, meta) for shard, meta in zip(said.shards, metas, strict=True)]
        self._groups = [*_groups(said, [meta.first_token for meta in metas])]

    @property
    def num_shards(self) -> int:
        return len(self.sizes)

    @property
    def shard_ids(self) -> list[bytes]:
        return [shard.tobytes() for shard in self.ids]

    def position(self, present: NDArray[np.bool_], limit: int) -> int:
        """The joint hit over `[shards, chunks]`."""
        return joint_hit([group.presence(present) for group in self._groups], self.chunk_tokens, limit)

    def needs(self, position: int, wanted: NDArray[np.int64] | None, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Pieces `[n, 2]`: what going on from `position` needs of the wanted rows, row by row; tails where they are
        `present` (`[shards, chunks]`) and whole chunks are not."""
        each = (group.needs(position, present) for group in self._groups)
        pieces = np.concatenate([np.empty((0, 2), np.int64), *each])
        return pieces if wanted is None else pieces[np.isin(pieces[:, 0], wanted)]

    def report(self) -> ModelReport:
        numbers = {name: self.counts[name] for name in ("lookups", "tokens_asked", "tokens_found")}
        return ModelReport(self.model, self.digest.hex(), **numbers)

    def describe(self) -> ModelDescription:
        groups = tuple(self._group(group) for group in self._groups)
        return ModelDescription(self.model, self.digest.hex(), self.chunk_tokens, groups)

    def _group(self, group: ShardGroup) -> GroupDescription:
        words = " ".join(str(value) for value in codec.to_dict(group.reach).values())
        described = self._described[group.first : group.stop]
        return GroupDescription(group.tag, words, described[0][0], tuple(shard for _, shard in described))


def digest(said: Register) -> bytes:
    """Equal registrations, equal digests, whatever number a client gave them."""
    facts = hashlib.sha256(f"{said.model}\0{said.chunk_tokens}".encode())
    for shard in said.shards:
        facts.update(shard.id + shard.blob_bytes.to_bytes(8, "little"))
    facts.update(json.dumps([[g.tag, g.num_shards, g.reach] for g in said.groups], sort_keys=True).encode())
    return facts.digest()[:8]


def _meta(shard: ShardInfo, chunk_tokens: int) -> _Meta:
    """What a row says of itself. An id that is not the digest of that is somebody else's."""
    if hashlib.sha256(b"kvweave row 1\0" + shard.meta).digest()[:SHARD_ID_BYTES] != shard.id:
        raise BadRequest(f"row {shard.id.hex()} has another digest: this is a schema of another version of kvweave")
    try:
        meta = msgspec.json.decode(shard.meta, type=_Meta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"row {shard.id.hex()} does not say what it is: {error}") from None
    if meta.chunk_tokens != chunk_tokens:
        raise BadRequest(f"row {shard.id.hex()} is of chunks of {meta.chunk_tokens} tokens, not {chunk_tokens}")
    if shard.blob_bytes != (size := _blob_bytes(shard, meta)):
        raise BadRequest(f"row {shard.id.hex()} describes blobs of {size} bytes, but says {shard.blob_bytes}")
    return meta


def _described(shard: ShardInfo, meta: _Meta) -> tuple[tuple[int, ...], ShardDescription]:
    """A row's layers, and the rest."""
    roles = tuple(f"{role.name} {[role.rows, *role.shape]} {role.dtype}" for role in meta.roles)
    return tuple(meta.layers), ShardDescription(shard.id.hex(), meta.part, meta.parts, shard.blob_bytes, roles)


def _blob_bytes(shard: ShardInfo, meta: _Meta) -> int:
    """Header and payload, as everybody who knows the row reckons them."""
    try:
        bits = sum(role.rows * math.prod(role.shape) * DType(role.dtype).bits for role in meta.roles)
    except ValueError as error:
        raise BadRequest(f"row {shard.id.hex()} does not say what it is: {error}") from None
    return header_bytes(RegisteredShard(shard.meta, 0, meta.chunk_tokens)) + len(meta.layers) * bits // 8


def _groups(said: Register, first_tokens: list[int]) -> Iterator[ShardGroup]:
    start = 0
    for group in said.groups:
        firsts = first_tokens[start : start + group.num_shards]
        parts, tail = len(firsts) - sum(map(bool, firsts)), firsts[-1] if firsts else 0
        if firsts not in ([0] * parts, [0] * parts + [tail] * parts) or not 0 <= tail < said.chunk_tokens:
            raise BadRequest(f"group {group.tag!r}: rows from the tokens {firsts} on are no chunks and their tails")
        yield ShardGroup(group.tag, _reach(group), said.chunk_tokens, start, parts, tail)
        start += group.num_shards
    if start != len(said.shards):
        raise BadRequest(f"groups of {start} rows in all, but there are {len(said.shards)}")


def _reach(group: GroupInfo) -> Reach:
    fields = {name: value for name, value in group.reach.items() if name != "kind"}
    if any(isinstance(value, int) and value > MOST for value in fields.values()):
        raise BadRequest(f"group {group.tag!r}: a reach beyond {MOST} tokens")
    try:
        return codec.from_dict(reach_class(str(group.reach.get("kind"))), fields, f"group {group.tag!r}")
    except KVWeaveError as error:
        raise BadRequest(str(error)) from None
