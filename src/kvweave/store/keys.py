"""Keys: the digest of tokens, namespace and shard under which a blob is stored.

A key is 48 bytes; all keys of a prompt are made in one broadcast:

    tenant (8)   the digest of the tenant's name, for quotas; not a secret
    prefix (32)  a chain of SHA-256 over namespace, grid and every token up to the end of the chunk
    shard (8)    the group and part of the model, with its shapes and dtypes (`shards.Shard.id`)

The leaf of a chunk is the digest of its tokens; the prefix digest of a chunk is that of the prefix before it and its
leaf:

    prefix[-1] = H(domain, namespace, chunk_tokens)      leaf[i] = H(tokens[i])      prefix[i] = H(prefix[i-1], leaf[i])

Each token is hashed once, many leaves at a time. Equal prefix digests mean equal namespaces, chunk sizes and tokens,
from the first on. A prefix digest has fixed positions for its two halves, so a leaf cannot be mistaken for a prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadTokens
from kvweave.prefix import Span, as_tokens
from kvweave.store.compiled import native

DOMAIN = b"kvweave chain 2\0"
SPANS = (-2).to_bytes(4, "little", signed=True) + b"kvweave spans 2\0"
"""-2 is neither a token nor the marker of a span, so no chunk starts with it."""
TENANT_BYTES, PREFIX_BYTES, SHARD_ID_BYTES = 8, 32, 8
KEY_BYTES = TENANT_BYTES + PREFIX_BYTES + SHARD_ID_BYTES

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV to be shared. Dtypes and shapes are not part of it: the key of every shard has them.

    `model` says the architecture (`shards.model_digest`), `weights` its revision, `rotary` the position settings that
    change keys (scaling, base), `adapter` a LoRA. `salt` separates tenants that have all of these in common.
    """

    model: str
    weights: str = ""
    rotary: str = ""
    adapter: str = ""
    tenant: str = ""
    salt: bytes = b""

    @property
    def fingerprint(self) -> bytes:
        """Every field is preceded by its length, so that no two namespaces have the same bytes."""
        digest = hashlib.sha256(b"kvweave namespace 1\0")
        texts = (self.model, self.weights, self.rotary, self.adapter, self.tenant)
        for field in (*(text.encode() for text in texts), self.salt):
            digest.update(len(field).to_bytes(8, "little") + field)
        return digest.digest()

    @property
    def tenant_id(self) -> bytes:
        return tenant_id(self.tenant)


def tenant_id(name: str) -> bytes:
    """The first bytes of every key of a tenant."""
    return hashlib.sha256(b"kvweave tenant 1\0" + name.encode()).digest()[:TENANT_BYTES]


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the store knows it: a digest for each prefix of whole chunks. `num_tokens` counts all tokens."""

    namespace: Namespace
    num_tokens: int
    chunk_tokens: int
    prefixes: Bytes
    """`[chunks, 32]`"""

    @property
    def num_chunks(self) -> int:
        return len(self.prefixes)

    def keys(self, shards: Bytes) -> list[bytes]:
        """The keys of all chunks and shards (ids `[shards, 8]`), chunk by chunk: earlier keys are worth more."""
        return keys_of(self.namespace.tenant_id, self.prefixes, shards)


def keys_of(tenant: bytes, prefixes: Bytes, shards: Bytes) -> list[bytes]:
    """Every prefix (`[chunks, 32]`) with every shard id (`[shards, 8]`), in one broadcast."""
    keys = np.empty((len(prefixes), len(shards), KEY_BYTES), np.uint8)
    keys[..., :TENANT_BYTES] = np.frombuffer(tenant, np.uint8)
    keys[..., TENANT_BYTES:-SHARD_ID_BYTES] = prefixes[:, None]
    keys[..., -SHARD_ID_BYTES:] = shards
    listed: list[bytes] = keys.view(f"V{KEY_BYTES}").ravel().tolist()
    return listed


def prompt(tokens: object, namespace: Namespace, chunk_tokens: int, spans: Sequence[Span] = ()) -> HashedPrompt:
    """Hash the whole chunks of a prompt. The content of a span counts for the chunk in which it starts."""
    numbers = as_tokens(tokens)
    marked, contents = _mark_spans(numbers, spans, chunk_tokens) if spans else (numbers, {})
    num_chunks = len(numbers) // chunk_tokens
    whole = np.ascontiguousarray(marked[: num_chunks * chunk_tokens], "<i4")
    leaves = bytearray(_digests(whole.view(np.uint8), 4 * chunk_tokens))
    for number in contents.keys() & range(num_chunks):
        leaf = slice(number * PREFIX_BYTES, (number + 1) * PREFIX_BYTES)
        leaves[leaf] = hashlib.sha256(SPANS + leaves[leaf] + contents[number]).digest()
    first = hashlib.sha256(DOMAIN + namespace.fingerprint + chunk_tokens.to_bytes(8, "little")).digest()
    prefixes = np.frombuffer(_links(first, leaves), np.uint8).reshape(-1, PREFIX_BYTES)
    return HashedPrompt(namespace, len(numbers), chunk_tokens, prefixes)


def _digests(messages: Bytes, size: int) -> bytes:
    """The digests of messages of `size` bytes, concatenated."""
    if native:
        return native.digests(messages, size)
    return b"".join(hashlib.sha256(message).digest() for message in messages.view(f"V{size}").tolist())


def _links(first: bytes, leaves: bytearray) -> bytes:
    """The chain over `leaves`: each link is the digest of the link before it and the next leaf."""
    if native:
        return native.links(first, leaves)
    links = [first]
    for at in range(0, len(leaves), PREFIX_BYTES):
        links.append(hashlib.sha256(links[-1] + leaves[at : at + PREFIX_BYTES]).digest())
    return b"".join(links[1:])


def _mark_spans(
    tokens: NDArray[np.int32], spans: Sequence[Span], size: int
) -> tuple[NDArray[np.int32], dict[int, bytes]]:
    """The tokens with -1, which is no token, at the start of each span; and by chunk the digests of the spans that
    start in it.

    A leaf with k markers is followed by k digests, so that the hashed bytes are unambiguous.
    """
    marked, contents = tokens.copy(), dict[int, bytes]()
    starts = [span.start for span in spans]
    if len({*starts}) != len(starts) or any(not 0 <= start < len(tokens) for start in starts):
        raise BadTokens(f"spans start at {starts}; each needs a place of its own in a prompt of {len(tokens)} tokens")
    for start, content in sorted(spans, key=lambda span: span.start):
        token = int(tokens[start]).to_bytes(4, "little")
        digest = hashlib.sha256(b"kvweave span 2\0" + token + bytes(content)).digest()
        contents[start // size] = contents.get(start // size, b"") + digest
        marked[start] = -1
    return marked, contents
