"""The protocol between client and daemon: small typed messages in msgpack, each preceded by its length.

    length (4, little-endian)   request id (4)   message: an array, its name first

Every request gets exactly one reply, in order; `Failed` is one. The reply carries the id of its request, so that a late
reply is never taken for that of another. Offsets in the arena are sent as arrays of bytes.

The first request is `Hello`. Neither it nor its reply has an id, and its first field is the version. Both hold for
every version of the protocol, so that different versions can recognise each other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kvweave.errors import BadRequest, LeaseExpired, OverLimit, Refused, ServerError
from kvweave.server.description import Description
from kvweave.server.report import Report, TierCleared
from kvweave.server.settings import NAME_LENGTH

VERSION = 7
LENGTH_BYTES = ID_BYTES = 4
MESSAGE_BYTES = 4 << 20
"""The longest message: the digests of 32 million tokens in chunks of 256."""

MOST_PIECES = 1 << 13
"""Pieces in one message, at most: that many are served in some milliseconds."""
NOT_IN_ARENA = -1
"""In place of an offset: not in the arena."""
PRESENT, WRITING, NO_ROOM = -1, -2, -3

Number = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=NAME_LENGTH)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]


class Message(Struct, frozen=True, array_like=True, tag=str.lower):
    """Base of all messages."""


# ---- requests


class Hello(Message, frozen=True):
    """The first message. `arena`: whether to pass the arena's file descriptor with the reply."""

    version: int
    digest: bytes
    name: Name = ""
    token: Name = ""
    arena: bool = True


class Ping(Message, frozen=True):
    """Asks for a reply, and nothing else."""


class ShardInfo(Struct, frozen=True, array_like=True):
    """One part of one group: its id is the digest of `meta`, which describes it."""

    id: Digest
    blob_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    meta: Annotated[bytes, Meta(max_length=1 << 20)]


class GroupInfo(Struct, frozen=True, array_like=True):
    """The next `num_shards` shards belong to this group; the reach is a JSON object."""

    tag: Name
    num_shards: Annotated[int, Meta(ge=1, le=4096)]
    reach: dict[str, str | int]


class Register(Message, frozen=True):
    """Registers a model's schema, under a number chosen by the client."""

    schema: Number
    model: Name
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    shards: Annotated[list[ShardInfo], Meta(min_length=1, max_length=4096)]
    groups: Annotated[list[GroupInfo], Meta(min_length=1, max_length=4096)]


class Open(Message, frozen=True):
    """Opens a prompt, under a number chosen by the client, with the digests of its prefixes: they are sent only
    once."""

    sequence: Number
    schema: Number
    tenant: Digest
    num_tokens: Number
    prefixes: bytes


class Close(Message, frozen=True):
    """Closes sequences."""

    sequences: list[Number]


class Lookup(Message, frozen=True):
    """Asks for the longest prefix at which every group can resume. With a lease (not 0), blobs of `shards` stay in
    the arena."""

    sequence: Number
    lease: Number
    shards: bytes | None = None
    budget_s: float | None = None


class Fetch(Message, frozen=True, tag="bring"):
    """Asks for the places of these pieces, under a lease (not 0); those of backing tiers are fetched first."""

    sequence: Number
    lease: Number
    pieces: bytes
    budget_s: float | None = None


class PinLeases(Message, frozen=True, tag="pin"):
    """Keeps these leases until they are released, or the connection ends."""

    leases: list[Number]


class Release(Message, frozen=True):
    """Releases these leases; unknown and expired ones are ignored."""

    leases: list[Number]


class Reserve(Message, frozen=True):
    """Reserves places to write these pieces, under a number. `waits`: for room, if no piece has any; one that does not
    asks again when it has committed what it is writing."""

    sequence: Number
    reservation: Number
    pieces: bytes
    budget_s: float | None = None
    waits: bool = True


class CopyIn(Message, frozen=True):
    """Asks the daemon to copy all blobs of a reservation out of the connection's inbox, where they lie in the order of
    `pieces`. Only where there are inboxes; there nothing can be committed without it."""

    sequence: Number
    reservation: Number
    pieces: bytes


class Commit(Message, frozen=True):
    """Makes the blobs of a reservation visible. `abandon`: frees its places instead."""

    reservation: Number
    abandon: bool = False
    budget_s: float | None = None


class Damaged(Message, frozen=True):
    """Reports damaged pieces. The daemon checks them, and deletes those that are."""

    sequence: Number
    pieces: bytes


class Flush(Message, frozen=True):
    """Asks for a reply when everything committed so far was written to the persistent tiers, or dropped by them."""

    wait_s: float = 60.0


class Observed(Message, frozen=True):
    """How long a load or save took at the client, and the length of its prompt. Sent along with the next request."""

    kind: Literal["load", "save"]
    seconds: Annotated[float, Meta(ge=0, le=86400)]
    num_tokens: Number = 0


class RemovedSince(Message, frozen=True):
    """Asks which keys of these shards (ids, one after the other) have left the last tier since the number `after`."""

    after: Annotated[int, Meta(ge=-1, le=2**53)]
    shards: Annotated[bytes, Meta(max_length=4096 * 8)]


class StatsRequest(Message, frozen=True, tag="stats"):
    """Asks for the daemon's report."""


class Describe(Message, frozen=True):
    """Asks for the daemon's description, with all registered schemas or those of one model."""

    model: Name | None = None


class Clear(Message, frozen=True):
    """Deletes everything, or what belongs to a tenant, a model, or both, in every tier, within `wait_s` seconds."""

    tenant: Digest | None = None
    model: Name | None = None
    wait_s: float = 60.0


# ---- replies


class Welcome(Message, frozen=True):
    """`boot` is unique to each start of the daemon. The limits are those of one connection: reserved bytes, open
    sequences, and their keys (shards x chunks). `inbox_bytes`: the size of the connection's inbox; 0: it writes to the
    arena itself."""

    version: int
    boot: bytes
    arena_bytes: int
    lease_s: float
    reserve_bytes: int
    max_sequences: int
    max_keys: int
    inbox_bytes: int = 0


class Done(Message, frozen=True):
    """The request is done; `count` of whatever it was about."""

    count: int = 0


class Found(Message, frozen=True):
    """The position of the hit; the pieces that exist (bits, `[shards, chunks]`); and the places of what the hit needs,
    shard by shard.

    Without places nothing is under lease: none was asked for, or the quota of leases is used up. `late`: a tier did not
    answer in time, so that more may be stored.
    """

    position: int
    present: bytes
    starts: bytes
    late: bool = False


class Places(Message, frozen=True):
    """The places of pieces, to read or to write, in the order of the request."""

    starts: bytes


class Alive(Message, frozen=True):
    """The leases that still exist."""

    leases: list[int]


class RemovedKeys(Message, frozen=True):
    """Keys, one after the other, and the number to ask with next. Not `complete`: anything may be gone."""

    number: Number
    keys: bytes
    complete: bool


class StatsReply(Message, frozen=True, tag="stated"):
    """The reply to `StatsRequest`."""

    report: Report


class DescribeReply(Message, frozen=True, tag="described"):
    """The reply to `Describe`."""

    description: Description


class ClearReply(Message, frozen=True, tag="cleared"):
    """The result in each tier, the nearest first."""

    tiers: list[TierCleared]

    @property
    def entries(self) -> int:
        return sum(tier.entries for tier in self.tiers)

    @property
    def kept_by(self) -> dict[str, str]:
        """Tiers that may not be empty, and why."""
        return {tier.name: tier.trouble for tier in self.tiers if tier.trouble}


class Failed(Message, frozen=True):
    """An error: the name of its class, and its message."""

    error: str
    message: str


Request = (
    Hello | Ping | Register | Open | Close | Lookup | Fetch | PinLeases | Release | Reserve | CopyIn
    | Commit | Damaged | Flush | Observed | RemovedSince | StatsRequest | Describe | Clear
)  # fmt: skip
Reply = Welcome | Done | Found | Places | Alive | RemovedKeys | StatsReply | DescribeReply | ClearReply | Failed
Handler = Callable[[Any], Reply | Awaitable[Reply]]
"""Serves a request at the daemon."""

ERRORS = {error.__name__: error for error in (ServerError, Refused, BadRequest, OverLimit, LeaseExpired)}


def _digest() -> bytes:
    """A hash of the shape of all messages: a client and a daemon that would misread one another refuse to talk."""
    roots, parts = msgspec.json.schema_components([Request, Reply])
    encoded = msgspec.json.encode(_shape(roots, parts), order="deterministic")
    return hashlib.sha256(encoded).digest()[:8]


def _shape(schema: Any, parts: Mapping[str, Any]) -> Any:
    """A JSON schema without class names and docstrings, which do not change a byte on the wire."""
    if isinstance(schema, list | tuple):
        return [_shape(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _shape(parts[schema["$ref"].rpartition("/")[2]], parts)
    named = ("title", "description")
    return {key: _shape(each, parts) for key, each in schema.items() if key not in named or not isinstance(each, str)}


DIGEST = _digest()
_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
read_request = msgspec.msgpack.Decoder(Request).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Message, request_id: int | None = None) -> bytes:
    """A message, preceded by its length and the id of its request. `Hello` and its reply have no id."""
    body = _encoder.encode(message)
    if request_id is None:
        return len(body).to_bytes(LENGTH_BYTES, "little") + body
    return _HEAD.pack(ID_BYTES + len(body), request_id) + body


def read_request_id(body: bytes) -> int:
    """The id of a message; 0, which no request has, if the message is too short."""
    return int.from_bytes(body[:ID_BYTES], "little") if len(body) >= ID_BYTES else 0


def undo(request: Message) -> Message | None:
    """The request that releases what an unanswered request may have taken."""
    if isinstance(request, Lookup | Fetch) and request.lease:
        return Release([request.lease])
    return Commit(request.reservation, abandon=True) if isinstance(request, Reserve) else None


def numbers(data: bytes, kind: str = "<i8") -> NDArray[np.int64]:
    """Decode an array that was sent as bytes."""
    if len(data) % np.dtype(kind).itemsize:
        raise BadRequest(f"{len(data)} bytes are no array of {kind}")
    return np.frombuffer(data, kind).astype(np.int64)


def packed(values: object, kind: str = "<i8") -> bytes:
    """Encode an array as bytes."""
    return np.asarray(values, kind).tobytes()
