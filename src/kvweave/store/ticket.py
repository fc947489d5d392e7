"""A hit as bytes, for another process: small enough to be sent with a request. A ticket holds no lease.

    0   magic "KVT1"          4   checksum: XXH3 of what follows           12  digest of the schema (8)
    20  tenant (8)            28  tokens of the prompt   36  position      44  until (seconds since 1970, a float)
    52  which pieces there are (bits, `[shards, chunks]`), then the digests of the chunks before the position, 32 each

Keys are made of the digests, and what is loaded is checked by key, so that no ticket ever leads to wrong bytes.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.store.keys import PREFIX_BYTES, TENANT_BYTES, HashedPrompt
from kvweave.store.shards import Schema

MAGIC = b"KVT1"
HEAD = struct.Struct(f"<4sQ8s{TENANT_BYTES}sQQd")
SUMMED = 12
"""Where the bytes begin that the checksum is of."""
VALID_S = 60.0


class TicketContent(NamedTuple):
    """The content of a ticket."""

    prompt: HashedPrompt
    position: int
    present: NDArray[np.bool_]
    """`[shards, chunks]`, of the chunks before the position."""


def write_ticket(
    schema: Schema, prompt: HashedPrompt, position: int, present: NDArray[np.bool_], valid_s: float
) -> bytes:
    """A ticket that is valid for `valid_s` seconds."""
    chunks = position // schema.chunk_tokens
    bits, digests = np.packbits(present[:, :chunks]).tobytes(), prompt.prefixes[:chunks].tobytes()
    facts = (schema.digest, prompt.tenant_id, prompt.num_tokens, position, time.time() + valid_s)
    ticket = HEAD.pack(MAGIC, 0, *facts) + bits + digests
    return ticket[:4] + xxhash.xxh3_64_intdigest(ticket[SUMMED:]).to_bytes(8, "little") + ticket[SUMMED:]


def read_ticket(schema: Schema, ticket: bytes) -> TicketContent:
    """Raises `StoreError` for a ticket that is damaged, of another schema, or expired."""
    if len(ticket) < HEAD.size or ticket[:4] != MAGIC:
        raise StoreError("this is not a ticket, or one of another version of kvweave")
    _, checksum, digest, tenant, num_tokens, position, until = HEAD.unpack_from(ticket)
    chunks, shards = position // schema.chunk_tokens, len(schema.shards)
    start = HEAD.size + -(-shards * chunks // 8)
    if xxhash.xxh3_64_intdigest(ticket[SUMMED:]) != checksum:
        raise StoreError("the ticket is damaged")
    is_possible = position < max(1, num_tokens) and not position % schema.chunk_tokens
    if digest != schema.digest or len(ticket) != start + chunks * PREFIX_BYTES or not is_possible:
        raise StoreError("the ticket is of another schema: model, chunk size or parts differ")
    if time.time() >= until:
        raise StoreError(f"the ticket expired {time.time() - until:.1f} s ago")
    bits = np.frombuffer(ticket[HEAD.size : start], np.uint8)
    present = np.unpackbits(bits, count=shards * chunks).reshape(shards, chunks).astype(bool)
    prefixes = np.frombuffer(ticket[start:], np.uint8).reshape(-1, PREFIX_BYTES)
    return TicketContent(HashedPrompt(tenant, num_tokens, schema.chunk_tokens, prefixes), position, present)


def blank_ticket(schema: Schema) -> TicketContent:
    """The content of a refused ticket: an empty hit."""
    empty = HashedPrompt(bytes(TENANT_BYTES), 0, schema.chunk_tokens, np.empty((0, PREFIX_BYTES), np.uint8))
    return TicketContent(empty, 0, np.empty((len(schema.shards), 0), bool))
