"""A model as the daemon knows it: ids, headers and sizes of its shards, and the reaches of its groups. The daemon
does not interpret payloads."""

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
from kvweave.store.keys import SHARD_ID_BYTES, shard_id
from kvweave.store.shard_group import ShardGroup, Use, uses

MOST = 1 << 40


def registration(number: int, model: str, schema: Schema) -> Register:
    """The request that registers a schema."""
    shards = [ShardInfo(shard.id, blob_bytes(shard), shard.meta) for shard in schema.shards]
    groups = [GroupInfo(g.tag, g.stop - g.first, codec.to_dict(g.reach)) for g in schema.groups]
    return Register(number, model, schema.chunk_tokens, shards, groups)


class _Role(msgspec.Struct):
    name: str
    rows: int
    shape: list[int]
    dtype: str


class _Meta(msgspec.Struct):
    """The fields of a shard's `meta` that the daemon reads."""

    chunk_tokens: int
    layers: list[int]
    roles: list[_Role]
    part: int
    parts: int
    first_token: int = 0
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class RegisteredShard:
    """A shard as far as its blob headers describe it."""

    meta: bytes
    blob_bytes: int
    chunk_tokens: int
    is_keyed: bool = False

    @property
    def payload_bytes(self) -> int:
        return max(0, self.blob_bytes - header_bytes(self))


class RegisteredModel:
    """A registered schema, shared by all connections that registered the same."""

    def __init__(self, request: Register) -> None:
        self.model, self.chunk_tokens = printable(request.model), request.chunk_tokens
        self.digest = digest(request)
        self.sizes = np.array([shard.blob_bytes for shard in request.shards], np.int64)
        self.ids = np.frombuffer(b"".join(shard.id for shard in request.shards), np.uint8).reshape(-1, SHARD_ID_BYTES)
        self.num_bytes = sum(len(shard.meta) for shard in request.shards)
        self.users = 0
        """Number of connections that use it."""
        self.counts: Counter[str] = Counter()
        metas = [_meta(shard, request.chunk_tokens) for shard in request.shards]
        self.shards = [
            RegisteredShard(shard.meta, shard.blob_bytes, request.chunk_tokens, meta.keyed)
            for shard, meta in zip(request.shards, metas, strict=True)
        ]
        self._described = [_described(shard, meta) for shard, meta in zip(request.shards, metas, strict=True)]
        self._groups = [*_groups(request, [meta.first_token for meta in metas])]

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
        """Pieces `[n, 2]` that are needed to resume at `position`, of the wanted shards, shard by shard: tails where
        they are `present` (`[shards, chunks]`) and complete chunks are not."""
        each = (group.needs(position, present) for group in self._groups)
        pieces = np.concatenate([np.empty((0, 2), np.int64), *each])
        return pieces if wanted is None else pieces[np.isin(pieces[:, 0], wanted)]

    def uses(self, present: NDArray[np.bool_], pieces: NDArray[np.int64]) -> tuple[Use, Use]:
        """What a lookup uses whose hit needs these pieces."""
        return uses(self._groups, present, pieces)

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


def digest(request: Register) -> bytes:
    """Equal for equal registrations, whatever number the client gave them."""
    facts = hashlib.sha256(f"{request.model}\0{request.chunk_tokens}".encode())
    for shard in request.shards:
        facts.update(shard.id + shard.blob_bytes.to_bytes(8, "little"))
    facts.update(json.dumps([[g.tag, g.num_shards, g.reach] for g in request.groups], sort_keys=True).encode())
    return facts.digest()[:8]


def _meta(shard: ShardInfo, chunk_tokens: int) -> _Meta:
    """What a shard says of itself. Raises `BadRequest` if its id is not the digest of its `meta`."""
    if shard_id(shard.meta) != shard.id:
        raise BadRequest(f"shard {shard.id.hex()} has another digest: this is a schema of another version of kvweave")
    try:
        meta = msgspec.json.decode(shard.meta, type=_Meta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"shard {shard.id.hex()} cannot be read: {error}") from None
    if meta.chunk_tokens != chunk_tokens:
        raise BadRequest(f"shard {shard.id.hex()} is of chunks of {meta.chunk_tokens} tokens, not {chunk_tokens}")
    if shard.blob_bytes != (size := _blob_bytes(shard, meta)):
        raise BadRequest(f"shard {shard.id.hex()} describes blobs of {size} bytes, but says {shard.blob_bytes}")
    return meta


def _described(shard: ShardInfo, meta: _Meta) -> tuple[tuple[int, ...], ShardDescription]:
    """The layers and the description of a shard."""
    roles = tuple(f"{role.name} {[role.rows, *role.shape]} {role.dtype}" for role in meta.roles)
    return tuple(meta.layers), ShardDescription(shard.id.hex(), meta.part, meta.parts, shard.blob_bytes, roles)


def _blob_bytes(shard: ShardInfo, meta: _Meta) -> int:
    """Bytes of header and payload, computed from `meta` as clients do."""
    try:
        bits = sum(role.rows * math.prod(role.shape) * DType(role.dtype).bits for role in meta.roles)
    except ValueError as error:
        raise BadRequest(f"shard {shard.id.hex()} cannot be read: {error}") from None
    return header_bytes(RegisteredShard(shard.meta, 0, meta.chunk_tokens)) + len(meta.layers) * bits // 8


def _groups(request: Register, first_tokens: list[int]) -> Iterator[ShardGroup]:
    start = 0
    for group in request.groups:
        firsts = first_tokens[start : start + group.num_shards]
        parts, tail = len(firsts) - sum(map(bool, firsts)), firsts[-1] if firsts else 0
        if firsts not in ([0] * parts, [0] * parts + [tail] * parts) or not 0 <= tail < request.chunk_tokens:
            raise BadRequest(f"group {group.tag!r}: shards that begin at tokens {firsts} are no chunks and their tails")
        yield ShardGroup(group.tag, _reach(group), request.chunk_tokens, start, parts, tail)
        start += group.num_shards
    if start != len(request.shards):
        raise BadRequest(f"groups of {start} shards in all, but there are {len(request.shards)}")


def _reach(group: GroupInfo) -> Reach:
    fields = {name: value for name, value in group.reach.items() if name != "kind"}
    if any(isinstance(value, int) and value > MOST for value in fields.values()):
        raise BadRequest(f"group {group.tag!r}: a reach beyond {MOST} tokens")
    try:
        return codec.from_dict(reach_class(str(group.reach.get("kind"))), fields, f"group {group.tag!r}")
    except KVWeaveError as error:
        raise BadRequest(str(error)) from None
