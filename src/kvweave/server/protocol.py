"""What client and daemon say to one another: small typed messages, msgpack, a length before each.

    length (4, little-endian)   request id (4)   message: an array, its name first

Every request gets exactly one answer, in order; `Failed` is one. The answer carries the request's id, so that an answer
which comes too late is never taken for another one's. Positions in the arena travel as arrays of bytes.

The first request is `Hello`. It and its answer have no id, and its version is its first field: both stay so in every
version, so that builds of different versions can tell one another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kvweave.errors import BadRequest, LeaseExpired, OverLimit, Refused, ServerError
from kvweave.server.description import Description
from kvweave.server.report import Report, TierCleared

VERSION = 3
LENGTH_BYTES = ID_BYTES = 4
MESSAGE_BYTES = 4 << 20
"""The longest message: the digests of 32 million tokens in chunks of 256."""

MOST_PIECES = 1 << 13
"""What one message may ask for: so many are answered in some milliseconds."""
NOT_IN_ARENA = -1
"""A place that is no place: not in the arena; for a reservation, nothing to do, since it is there already."""
PRESENT, WRITING, NO_ROOM = -1, -2, -3

Number = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=200)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]


class Message(Struct, frozen=True, array_like=True, tag=str.lower):
    """Anything that is said."""


# ---- questions


class Hello(Message, frozen=True):
    """The first message. `arena`: whether the answer shall bring the arena's file descriptor."""

    version: int
    digest: bytes
    name: Name = ""
    token: Name = ""
    arena: bool = True


class Ping(Message, frozen=True):
    """Are you there?"""


class ShardInfo(Struct, frozen=True, array_like=True):
    """One part of one group: its id is the digest of `meta`, which says what is in it."""

    id: Digest
    blob_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    meta: Annotated[bytes, Meta(max_length=1 << 20)]


class GroupInfo(Struct, frozen=True, array_like=True):
    """So many of the rows, one after the other, and their reach as JSON."""

    tag: Name
    num_shards: Annotated[int, Meta(ge=1, le=4096)]
    reach: dict[str, str | int]


class Register(Message, frozen=True):
    """A model's schema, under a number of the client's choice."""

    schema: Number
    model: Name
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    shards: Annotated[list[ShardInfo], Meta(min_length=1, max_length=4096)]
    groups: Annotated[list[GroupInfo], Meta(min_length=1, max_length=4096)]


class Open(Message, frozen=True):
    """A sequence, under a number of the client's choice: the digests of its prefixes, which are sent only once."""

    sequence: Number
    schema: Number
    tenant: Digest
    num_tokens: Number
    prefixes: bytes


class Close(Message, frozen=True):
    """Forget sequences."""

    sequences: list[Number]


class Lookup(Message, frozen=True):
    """The longest prefix from which every group can go on. With a lease (not 0), `shards` of it stay where they are."""

    sequence: Number
    lease: Number
    shards: bytes | None = None
    budget_s: float | None = None


class Fetch(Message, frozen=True, tag="bring"):
    """Where these pieces are, under a lease; those of farther tiers are brought first."""

    sequence: Number
    lease: Number
    pieces: bytes
    budget_s: float | None = None


class Prefetch(Message, frozen=True):
    """Bring these pieces, without a lease."""

    sequence: Number
    pieces: bytes
    budget_s: float | None = None


class Renew(Message, frozen=True):
    """Keep these leases for their time again."""

    leases: list[Number]


class PinLeases(Message, frozen=True, tag="pin"):
    """Keep these leases until they are released, or the connection ends."""

    leases: list[Number]


class Release(Message, frozen=True):
    """Give back these leases; unknown and expired ones are fine."""

    leases: list[Number]


class Reserve(Message, frozen=True):
    """Places to write these pieces at, under a number."""

    sequence: Number
    reservation: Number
    pieces: bytes
    budget_s: float | None = None


class Commit(Message, frozen=True):
    """Everything that was reserved is written: show it. `abandon`: show nothing, and give the places back."""

    reservation: Number
    abandon: bool = False
    budget_s: float | None = None


class Damaged(Message, frozen=True):
    """These pieces are not what they should be. The daemon checks them, and forgets those that are damaged."""

    sequence: Number
    pieces: bytes


class Flush(Message, frozen=True):
    """Answer when what was committed so far is in the persistent tiers."""

    wait_s: float = 60.0


class Observed(Message, frozen=True):
    """How long a load or save took at the client, of a prompt of so many tokens. Said with the next question."""

    kind: Literal["load", "save"]
    seconds: Annotated[float, Meta(ge=0, le=86400)]
    num_tokens: Number = 0


class StatsRequest(Message, frozen=True, tag="stats"):
    """What is in there, and what was done."""


class Describe(Message, frozen=True):
    """What the daemon is: its terms, its tiers, and the registered schemas, or those of one model."""

    model: Name | None = None


class Clear(Message, frozen=True):
    """Forget everything, or what belongs to a tenant, a model, or both; in every tier, for so long at most."""

    tenant: Digest | None = None
    model: Name | None = None
    wait_s: float = 60.0


# ---- answers


class Welcome(Message, frozen=True):
    """`boot` is another one for every start of the daemon. A connection may have so many bytes reserved at once, so
    many sequences open, and so many keys in them (rows x chunks)."""

    version: int
    boot: bytes
    arena_bytes: int
    lease_s: float
    reserve_bytes: int
    max_sequences: int
    max_keys: int


class Done(Message, frozen=True):
    """It is done; so many."""

    count: int = 0


class Found(Message, frozen=True):
    """The hit; which pieces there are (bits, `[shards, chunks]`); and places, row by row, of what the hit needs.

    No places: nothing is under lease, since none was asked for or the leases' share of the arena is used up. `late`:
    some tier did not answer in time, so that there may be more."""

    position: int
    present: bytes
    starts: bytes
    late: bool = False


class Places(Message, frozen=True):
    """Where pieces are, or may be written, in the order they were asked for."""

    starts: bytes


class Alive(Message, frozen=True):
    """Leases that hold."""

    leases: list[int]


class StatsReply(Message, frozen=True, tag="stated"):
    """The answer to `StatsRequest`."""

    report: Report


class DescribeReply(Message, frozen=True, tag="described"):
    """The answer to `Describe`."""

    description: Description


class ClearReply(Message, frozen=True, tag="cleared"):
    """What became of it in each tier, the nearest first."""

    tiers: list[TierCleared]

    @property
    def entries(self) -> int:
        return sum(tier.entries for tier in self.tiers)

    @property
    def kept_by(self) -> dict[str, str]:
        """Tiers that may still have something, and why."""
        return {tier.name: tier.trouble for tier in self.tiers if tier.trouble}


class Failed(Message, frozen=True):
    """An error's name and words."""

    error: str
    message: str


Question = (
    Hello | Ping | Register | Open | Close | Lookup | Fetch | Prefetch | Renew | PinLeases | Release | Reserve | Commit
    | Damaged | Flush | Observed | StatsRequest | Describe | Clear
)  # fmt: skip
Answer = Welcome | Done | Found | Places | Alive | StatsReply | DescribeReply | ClearReply | Failed

ERRORS = {error.__name__: error for error in (ServerError, Refused, BadRequest, OverLimit, LeaseExpired)}


def _digest() -> bytes:
    """A hash of the shape of all messages: a client and a daemon that would misread one another refuse to talk."""
    roots, parts = msgspec.json.schema_components([Question, Answer])
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
read_question = msgspec.msgpack.Decoder(Question).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(message: Message, request: int | None = None) -> bytes:
    """A message with its length, and its request's id, before it. Only `Hello` and its answer have no id."""
    body = _encoder.encode(message)
    if request is None:
        return len(body).to_bytes(LENGTH_BYTES, "little") + body
    return _HEAD.pack(ID_BYTES + len(body), request) + body


def request_id(body: bytes) -> int:
    """The id before a message; 0, which no request has, if there is none."""
    return int.from_bytes(body[:ID_BYTES], "little") if len(body) >= ID_BYTES else 0


def undo(question: Message) -> Message | None:
    """What gives back whatever a question may have taken whose answer nobody waited for."""
    if isinstance(question, Lookup | Fetch) and question.lease:
        return Release([question.lease])
    return Commit(question.reservation, abandon=True) if isinstance(question, Reserve) else None


def numbers(data: bytes, kind: str = "<i8") -> NDArray[np.int64]:
    """An array that travelled as bytes."""
    if len(data) % np.dtype(kind).itemsize:
        raise BadRequest(f"{len(data)} bytes are no array of {kind}")
    return np.frombuffer(data, kind).astype(np.int64)


def packed(values: object, kind: str = "<i8") -> bytes:
    """An array as bytes."""
    return np.asarray(values, kind).tobytes()
