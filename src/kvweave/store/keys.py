"""Keys: the digest of tokens, namespace and shard under which a blob is stored.

A key is 48 bytes; all keys of a prompt are made in one broadcast:

    tenant (8)   the digest of the tenant's name, for quotas; not a secret
    prefix (32)  a chain of SHA-256 over namespace, grid and every token up to the end of the chunk
    shard (8)    the group and part of the model, with its shapes and dtypes (`shards.Shard.id`)

The leaf of a chunk is the digest of its tokens; the prefix digest of a chunk is that of the prefix before it and its
leaf:

    prefix[-1] = H(domain, namespace, chunk_tokens)      leaf[i] = H(tokens[i])      prefix[i] = H(prefix[i-1], leaf[i])

A prompt known by an engine's own digests has a root of another domain; its leaves are those digests, chunk by chunk.
Each token is hashed once, many leaves at a time. Equal prefix digests mean equal namespaces, chunk sizes and tokens,
from the first on. A prefix digest has fixed positions for its two halves, so a leaf cannot be mistaken for a prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadTokens, StoreError
from kvweave.prefix import Span, TokenIds, as_tokens
from kvweave.store.compiled import native

DOMAIN = b"kvweave chain 2\0"
SPANS = (-2).to_bytes(4, "little", signed=True) + b"kvweave spans 2\0"
"""-2 is neither a token nor the marker of a span, so no chunk starts with it."""
DIGESTS = b"kvweave digests 1\0"
LEAST_DIGEST_BYTES = 16
"""Of a foreign digest: with shorter ones, equal digests of different tokens are to be expected."""
TENANT_BYTES, PREFIX_BYTES, SHARD_ID_BYTES = 8, 32, 8
KEY_BYTES = TENANT_BYTES + PREFIX_BYTES + SHARD_ID_BYTES

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV to be shared. Dtypes and shapes are not part of it: the key of every shard has them.

    `model` says the architecture (`shards.model_digest`), `weights` its revision (`weights.weights_digest`), `rotary`
    the position settings that change keys (scaling, base), `adapter` a LoRA by name, and `adapter_revision` which of
    that name. `kv_dtype` is how KV was quantised, beyond its dtype (scales, calibration); `multimodal` the processor
    that turned pictures into tokens (what they show is in the prompt's spans). `salt` separates tenants that have all
    of these in common.
    """

    model: str
    weights: str = ""
    rotary: str = ""
    adapter: str = ""
    tenant: str = ""
    salt: bytes = b""
    adapter_revision: str = ""
    kv_dtype: str = ""
    multimodal: str = ""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, kind = getattr(self, name), bytes if name == "salt" else str
            if not isinstance(value, kind):
                raise StoreError(f"Namespace.{name} is {kind.__name__}, got {type(value).__name__}")

    @property
    def fingerprint(self) -> bytes:
        """Every field is preceded by its length, so that no two namespaces have the same bytes. The last three fields
        were added later: where they are empty, the fingerprint is the same as before."""
        texts = (self.model, self.weights, self.rotary, self.adapter, self.tenant)
        later = (self.adapter_revision, self.kv_dtype, self.multimodal)
        fields = [*map(_encoded, texts), self.salt]
        digest = hashlib.sha256(b"kvweave namespace 2\0" if any(later) else b"kvweave namespace 1\0")
        for field in [*fields, *(_encoded(text) for text in later if any(later))]:
            digest.update(len(field).to_bytes(8, "little") + field)
        return digest.digest()

    @property
    def tenant_id(self) -> bytes:
        return tenant_id(self.tenant)


def tenant_id(name: str) -> bytes:
    """The first bytes of every key of a tenant."""
    return hashlib.sha256(b"kvweave tenant 1\0" + _encoded(name)).digest()[:TENANT_BYTES]


def _encoded(text: str) -> bytes:
    """Half a surrogate, which JSON of a user can have, is not UTF-8, and makes a name of its own."""
    return text.encode("utf-8", "surrogatepass")


def shard_id(meta: bytes) -> bytes:
    """The last bytes of every key of a shard, of its description."""
    return hashlib.sha256(b"kvweave row 1\0" + meta).digest()[:SHARD_ID_BYTES]


class UnfinishedChunk(NamedTuple):
    """The tokens behind a prompt's last whole chunk, and the spans that start among them."""

    tokens: NDArray[np.int32]
    spans: tuple[Span, ...]


NOTHING = UnfinishedChunk(np.empty(0, np.int32), ())


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the store knows it: a digest for each prefix of whole chunks. `num_tokens` counts all tokens."""

    tenant_id: bytes
    num_tokens: int
    chunk_tokens: int
    prefixes: Bytes
    """`[chunks, 32]`"""
    root: bytes = b""
    """The link before the first chunk's."""
    unfinished: UnfinishedChunk | None = None
    """None where only digests are known, so that it cannot grow by tokens."""

    @classmethod
    def of_digests(
        cls,
        digests: Sequence[bytes],
        namespace: Namespace,
        chunk_tokens: int,
        *,
        block_tokens: int,
        scheme: str,
        num_tokens: int | None = None,
    ) -> HashedPrompt:
        """A prompt known by an engine's own digests, one for each block of `block_tokens`, instead of its tokens.

        `scheme` names how they are made ("vllm sha256", say): prompts of two schemes never meet, nor do they meet
        those of tokens. Digests of 16 bytes at least, whose maker covers whatever changes KV (pictures, adapters), in
        the block's own digest or in those before it. `num_tokens` counts tokens behind the last block, too.
        """
        size = _digest_bytes(digests)
        if not 1 <= block_tokens <= chunk_tokens or chunk_tokens % block_tokens:
            raise BadTokens(f"blocks of {block_tokens} tokens do not divide chunks of {chunk_tokens}")
        total = len(digests) * block_tokens if num_tokens is None else num_tokens
        if total < len(digests) * block_tokens:
            raise BadTokens(f"{len(digests)} digests of {block_tokens} tokens each, in a prompt of {total}")
        each = chunk_tokens // block_tokens
        whole = np.frombuffer(b"".join(digests[: len(digests) // each * each]), np.uint8)
        facts = scheme.encode() + b"".join(number.to_bytes(8, "little") for number in (block_tokens, size, len(scheme)))
        root = hashlib.sha256(DIGESTS + _root(namespace, chunk_tokens) + facts).digest()
        return cls(namespace.tenant_id, total, chunk_tokens, _chained(root, bytearray(_digests(whole, each * size))))

    @property
    def num_chunks(self) -> int:
        return len(self.prefixes)

    def keys(self, shards: Bytes) -> list[bytes]:
        """The keys of all chunks and shards (ids `[shards, 8]`), chunk by chunk: earlier keys are worth more."""
        return keys_of(self.tenant_id, self.prefixes, shards)

    def extend(self, tokens: TokenIds, spans: Sequence[Span] = ()) -> HashedPrompt:
        """The same prompt with these tokens appended: only newly completed chunks are hashed. Spans start at positions
        of the whole prompt."""
        if self.unfinished is None:
            raise BadTokens("of this prompt only digests are known: make a longer one of all its digests")
        kept, more = self.unfinished, as_tokens(tokens)
        pending = np.concatenate((kept.tokens, more)) if len(kept.tokens) else more
        first = self.num_tokens - len(kept.tokens)
        _check_spans(spans, range(self.num_tokens, self.num_tokens + len(more)))
        every = (*kept.spans, *spans)
        leaves = _leaves(pending, [Span(start - first, content) for start, content in every], self.chunk_tokens)
        before = self.prefixes[-1].tobytes() if self.num_chunks else self.root
        added, done = _chained(before, leaves), len(leaves) // PREFIX_BYTES * self.chunk_tokens
        prefixes = np.concatenate((self.prefixes, added)) if self.num_chunks else added
        rest = UnfinishedChunk(pending[done:].copy(), tuple(span for span in every if span.start >= first + done))
        return replace(self, num_tokens=self.num_tokens + len(more), prefixes=prefixes, unfinished=rest)


def keys_of(tenant: bytes, prefixes: Bytes, shards: Bytes) -> list[bytes]:
    """Every prefix (`[chunks, 32]`) with every shard id (`[shards, 8]`), in one broadcast."""
    keys = np.empty((len(prefixes), len(shards), KEY_BYTES), np.uint8)
    keys[..., :TENANT_BYTES] = np.frombuffer(tenant, np.uint8)
    keys[..., TENANT_BYTES:-SHARD_ID_BYTES] = prefixes[:, None]
    keys[..., -SHARD_ID_BYTES:] = shards
    listed: list[bytes] = keys.view(f"V{KEY_BYTES}").ravel().tolist()
    return listed


def prompt(tokens: TokenIds, namespace: Namespace, chunk_tokens: int, spans: Sequence[Span] = ()) -> HashedPrompt:
    """Hash the whole chunks of a prompt. The content of a span counts for the chunk in which it starts."""
    none, root = np.empty((0, PREFIX_BYTES), np.uint8), _root(namespace, chunk_tokens)
    return HashedPrompt(namespace.tenant_id, 0, chunk_tokens, none, root, NOTHING).extend(tokens, spans)


@lru_cache(maxsize=4096)
def _root(namespace: Namespace, chunk_tokens: int) -> bytes:
    if chunk_tokens < 1:
        raise StoreError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    return hashlib.sha256(DOMAIN + namespace.fingerprint + chunk_tokens.to_bytes(8, "little")).digest()


def _digest_bytes(digests: Sequence[bytes]) -> int:
    """The length that all digests have."""
    others = {each.__name__ for each in {*map(type, digests)} if not issubclass(each, bytes | bytearray | memoryview)}
    if others:
        raise BadTokens(f"digests must be bytes, got {', '.join(sorted(others))}")
    sizes = {len(digest) for digest in digests} or {PREFIX_BYTES}
    if len(sizes) > 1 or min(sizes) < LEAST_DIGEST_BYTES:
        raise BadTokens(f"digests of {sorted(sizes)} bytes; all must be of one length, {LEAST_DIGEST_BYTES} at least")
    return sizes.pop()


def _leaves(tokens: NDArray[np.int32], spans: Sequence[Span], chunk_tokens: int) -> bytearray:
    """The digests of the whole chunks, concatenated."""
    marked, contents = _mark_spans(tokens, spans, chunk_tokens) if spans else (tokens, {})
    num_chunks = len(tokens) // chunk_tokens
    whole = np.ascontiguousarray(marked[: num_chunks * chunk_tokens], "<i4")
    leaves = bytearray(_digests(whole.view(np.uint8), 4 * chunk_tokens))
    for number in contents.keys() & range(num_chunks):
        leaf = slice(number * PREFIX_BYTES, (number + 1) * PREFIX_BYTES)
        leaves[leaf] = hashlib.sha256(SPANS + leaves[leaf] + contents[number]).digest()
    return leaves


def _chained(before: bytes, leaves: bytearray) -> Bytes:
    """`[chunks, 32]`"""
    return np.frombuffer(_links(before, leaves), np.uint8).reshape(-1, PREFIX_BYTES)


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


def _check_spans(spans: Sequence[Span], where: range) -> None:
    starts = [span.start for span in spans]
    if len({*starts}) != len(starts) or any(start not in where for start in starts):
        raise BadTokens(
            f"spans start at {starts}; each needs a place of its own among tokens {where.start} to {where.stop}"
        )


def _mark_spans(
    tokens: NDArray[np.int32], spans: Sequence[Span], size: int
) -> tuple[NDArray[np.int32], dict[int, bytes]]:
    """The tokens with -1, which is no token, at the start of each span; and by chunk the digests of the spans that
    start in it.

    A leaf with k markers is followed by k digests, so that the hashed bytes are unambiguous.
    """
    marked, contents = tokens.copy(), dict[int, bytes]()
    for start, content in sorted(spans, key=lambda span: span.start):
        token = int(tokens[start]).to_bytes(4, "little")
        digest = hashlib.sha256(b"kvweave span 2\0" + token + bytes(content)).digest()
        contents[start // size] = contents.get(start // size, b"") + digest
        marked[start] = -1
    return marked, contents
