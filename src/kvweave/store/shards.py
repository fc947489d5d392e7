"""Shards: what is stored under one key for each chunk, independent of block size, kernel layout and tensor parallelism.

A group is split by heads (units of a role's split) into parts, as if that many ranks held it; roles that are not split
are one part of their own. The payload of a part has the same bytes on every rank:

    layer 3: key [tokens, heads, dim] value [tokens, heads, dim]   layer 7: key ... value ...

A rank of any tensor-parallel degree writes the parts that it holds completely, and reads the parts that overlap its
own. For pipeline-parallel ranks a group is split by layers, too. A part of a window may have, beside complete chunks,
their tails (`shard_group`), under keys of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Protocol

import numpy as np

from kvweave.errors import StoreError
from kvweave.spec import LayerCache, ModelSpec, Reach, Role, codec
from kvweave.store.keys import SHARD_ID_BYTES, Bytes, shard_id
from kvweave.store.shard_group import ShardGroup, chunks_needed, tail_start


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """Entries `[start, stop)` of a role's whole first axis, found from index `at` on in some rank's share of it."""

    start: int
    stop: int
    at: int

    def within(self, other: AxisSlice) -> tuple[slice, slice] | None:
        """Where the common entries lie in this slice's share and in the other's; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if start >= stop:
            return None
        mine, theirs = start - self.start + self.at, start - other.start + other.at
        return slice(mine, mine + stop - start), slice(theirs, theirs + stop - start)


def axis_slices(role: Role, ranks: int, rank: int) -> tuple[AxisSlice, ...]:
    """What rank `rank` of `ranks` holds of a role's first axis, one slice for each segment; units that do not divide
    are replicated."""
    if not role.split:
        return (AxisSlice(0, role.shape[0], 0),)
    held, first, at = [], 0, 0
    for segment in role.split:
        shares = math.gcd(segment.units, ranks)
        size = segment.units // shares * segment.width
        start = first + rank * shares // ranks * size
        held.append(AxisSlice(start, start + size, at))
        first, at = first + segment.units * segment.width, at + size
    return tuple(held)


class ShardHeader(Protocol):
    """The part of a shard that its blob headers contain: enough to check blobs without understanding their payloads."""

    @property
    def meta(self) -> bytes: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def is_keyed(self) -> bool:
        """Whether chunks are known by keys alone, and their numbers say nothing: they differ from call to call."""
        ...


@dataclass(frozen=True)
class Shard:
    """One part of one group, over all its layers, or over those of one pipeline stage."""

    tag: str
    reach: Reach
    layers: tuple[int, ...]
    roles: tuple[Role, ...]
    """The roles before they are split."""
    part: int
    parts: int
    chunk_tokens: int
    first_token: int = 0
    """Of a chunk, the first token that has rows here; 0: the chunk is whole."""
    is_keyed: bool = False

    def axis_slices(self, role: Role) -> tuple[AxisSlice, ...]:
        return axis_slices(role, self.parts, self.part)

    def tokens(self, chunk: int) -> tuple[int, int]:
        """The tokens of which a chunk's payload holds rows: first, and one past the last."""
        return chunk * self.chunk_tokens + self.first_token, (chunk + 1) * self.chunk_tokens

    def num_rows(self, role: Role) -> int:
        return (self.chunk_tokens - self.first_token) // role.tokens_per_row if self.reach.per_token else 1

    @cached_property
    def meta(self) -> bytes:
        """A JSON description of the payload, stored in every blob: equal descriptions mean equal layouts."""
        roles = [
            {
                "name": role.name,
                "rows": self.num_rows(role),
                "shape": role.shard(self.parts).shape,
                "dtype": role.dtype,
                "of": role.shape,
                "cuts": [(axis_slice.start, axis_slice.stop) for axis_slice in self.axis_slices(role)],
                "fields": [(part.name, part.shape, part.dtype) for part in role.parts],
            }
            for role in self.roles
        ]
        facts = {"tag": self.tag, "state": not self.reach.per_token, "layers": self.layers, "roles": roles}
        facts |= {"part": self.part, "parts": self.parts, "chunk_tokens": self.chunk_tokens}
        facts |= {"first_token": self.first_token} if self.first_token else {}
        facts |= {"keyed": True} if self.is_keyed else {}
        return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def id(self) -> bytes:
        return shard_id(self.meta)

    @cached_property
    def payload_bytes(self) -> int:
        return len(self.layers) * sum(self.num_rows(role) * role.shard(self.parts).row_bytes for role in self.roles)

    def fields(self) -> Iterator[tuple[int, Role, slice]]:
        """Layer, role, and the bytes of its rows in the payload."""
        start = 0
        for layer in self.layers:
            for role in self.roles:
                stop = start + self.num_rows(role) * role.shard(self.parts).row_bytes
                yield layer, role, slice(start, stop)
                start = stop

    def needs(self, position: int) -> list[int]:
        """The chunks that are needed to resume at `position`, in order."""
        needed: list[int] = chunks_needed(self.reach, self.chunk_tokens, position).tolist()
        return needed

    def held_by(self, ranks: int, rank: int) -> bool:
        """Whether this rank writes the part: it holds all of it, and no lower rank does."""
        writers = (r for r in range(ranks) if all(self._covers(role, ranks, r) for role in self.roles))
        return next(writers, None) == rank

    def touches(self, ranks: int, rank: int) -> bool:
        """Whether the rank needs any of the part."""
        pairs = (zip(self.axis_slices(role), axis_slices(role, ranks, rank), strict=True) for role in self.roles)
        return any(mine.within(held) for pair in pairs for mine, held in pair)

    def _covers(self, role: Role, ranks: int, rank: int) -> bool:
        pairs = zip(self.axis_slices(role), axis_slices(role, ranks, rank), strict=True)
        return all(held.start <= mine.start and mine.stop <= held.stop for mine, held in pairs)


@dataclass(frozen=True)
class Schema:
    """All shards of a model, for chunks of `chunk_tokens` tokens and at most `parts` parts a group."""

    shards: tuple[Shard, ...]
    chunk_tokens: int
    parts: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        chunk_tokens: int = 256,
        parts: int = 8,
        stages: Sequence[int] = (),
        tails: bool = False,
        keyed: bool = False,
    ) -> Schema:
        """`parts` must be a multiple of every tensor-parallel degree that writes: 8 serves 1, 2, 4 and 8.

        `stages` are the first layers of pipeline stages: no shard has layers of two of them, so that a rank with the
        layers of some stages writes shards of its own. Without, each shard has all layers of its group.

        With `tails`, of the chunk in which a window begins the rest may be stored, for engines that have freed what
        lies before. Complete chunks have the same keys with and without. `keyed`: see `ShardHeader`.
        """
        if chunk_tokens < 1 or parts < 1:
            raise StoreError(f"chunk_tokens and parts must be at least 1, got {chunk_tokens} and {parts}")
        shards = tuple(
            shard
            for cache, layers in spec.groups().values()
            if layers
            for shard in _with_tails([*_shards(cache, _by_stage(layers, stages), chunk_tokens, parts)], tails=tails)
        )
        shards = tuple(replace(shard, is_keyed=True) for shard in shards) if keyed else shards
        if not shards:
            raise StoreError(f"model {spec.model_type!r} keeps nothing: there is nothing to store")
        return cls(shards, chunk_tokens, parts)

    @cached_property
    def ids(self) -> Bytes:
        return np.frombuffer(b"".join(shard.id for shard in self.shards), np.uint8).reshape(-1, SHARD_ID_BYTES)

    @cached_property
    def digest(self) -> bytes:
        """8 bytes by which two schemas are told apart."""
        facts = self.ids.tobytes() + self.chunk_tokens.to_bytes(8, "little")
        return hashlib.sha256(b"kvweave schema 1\0" + facts).digest()[:8]

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """The groups, in the order of their shards."""
        groups, first = [], 0
        for tag, run in groupby(self.shards, key=lambda shard: shard.tag):
            shards = [*run]
            parts = sum(not shard.first_token for shard in shards)
            groups.append(ShardGroup(tag, shards[0].reach, self.chunk_tokens, first, parts, shards[-1].first_token))
            first += len(shards)
        return tuple(groups)

    def written_by(self, ranks: int, rank: int) -> tuple[int, ...]:
        """The shards that a rank writes; together the ranks write all of them."""
        orphans = [shard for shard in self.shards if not any(shard.held_by(ranks, r) for r in range(ranks))]
        if orphans:
            need = math.lcm(self.parts, ranks)
            raise StoreError(f"group {orphans[0].tag!r}: no rank of {ranks} holds one of its parts; take parts={need}")
        return tuple(i for i, shard in enumerate(self.shards) if shard.held_by(ranks, rank))

    def read_by(self, ranks: int, rank: int) -> tuple[int, ...]:
        """The shards of which a rank needs any part."""
        return tuple(i for i, shard in enumerate(self.shards) if shard.touches(ranks, rank))


def _by_stage(layers: tuple[int, ...], stages: Sequence[int]) -> list[tuple[int, ...]]:
    """The layers of a group, stage by stage."""
    starts = sorted(stages)
    return [tuple(run) for _, run in groupby(layers, key=lambda layer: bisect_right(starts, layer))]


def _shards(cache: LayerCache, stages: list[tuple[int, ...]], chunk_tokens: int, most: int) -> Iterator[Shard]:
    if cache.reach.per_token and chunk_tokens % (unit := math.lcm(*(role.tokens_per_row for role in cache.roles))):
        raise StoreError(f"group {cache.tag!r}: chunks of {chunk_tokens} tokens split its rows of {unit}")
    stored = [role for role in cache.roles if role.alias_of is None]
    split, whole = (tuple(r for r in stored if bool(r.split) is wanted) for wanted in (True, False))
    parts = math.lcm(*(math.gcd(segment.units, most) for role in split for segment in role.split))
    for layers in stages:
        if whole:
            yield Shard(cache.tag, cache.reach, layers, whole, 0, 1, chunk_tokens)
        for part in range(parts) if split else ():
            yield Shard(cache.tag, cache.reach, layers, split, part, parts, chunk_tokens)


def _with_tails(shards: list[Shard], *, tails: bool) -> list[Shard]:
    """A group's shards, and behind them those of its tails, if it has any."""
    reach, size = shards[0].reach, shards[0].chunk_tokens
    unit = math.lcm(*(role.tokens_per_row for shard in shards for role in shard.roles))
    first = tail_start(reach, size, unit) if tails else 0
    return [*shards, *(replace(shard, first_token=first) for shard in shards if first)]


def model_digest(spec: ModelSpec) -> str:
    """A hash of what a model keeps, independent of block sizes, kernels and page layouts."""
    facts = [
        (tag, layers, codec.to_dict(cache.reach), [(r.name, r.shape, r.dtype, r.tokens_per_row) for r in cache.roles])
        for tag, (cache, layers) in spec.groups().items()
    ]
    return hashlib.sha256(json.dumps([spec.model_type, facts]).encode()).hexdigest()
