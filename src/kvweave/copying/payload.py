"""Copies between an engine's pools and payloads, as data: a copier needs nothing else to carry them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvweave.copying.blocks import Bytes, Numbers, Shape, StridedBlocks, copy_blocks

PART_BYTES = 32 << 10
"""A payload's checksum is computed from those of parts of this many bytes; a remainder belongs to the last part."""


@dataclass(frozen=True, slots=True, eq=False)
class FieldRuns:
    """Fields that lie alike: blocks of `shape` (planes, rows, bytes of a run), whose runs are as far apart as either
    side's strides say. Field i begins at `held[i]` of the pool `pools[pool_index[i]]`, and at `kept[i]` of a payload.
    """

    pools: tuple[str, ...]
    pool_index: Numbers
    held: Numbers
    held_strides: tuple[int, int]
    kept: Numbers
    kept_strides: tuple[int, int]
    shape: Shape


class BlockCopy(NamedTuple):
    """A block of each field for each segment, which begins at these byte offsets in the pools and in the payload."""

    fields: FieldRuns
    held: Numbers
    kept: Numbers


class PartChecksums(NamedTuple):
    """Of a payload the XXH3s of its parts, 8 bytes each; and, if that is not among them, the last part itself."""

    checksums: bytes
    last: Bytes | None = None


class PayloadCopier(Protocol):
    """Carries out copies; may be used by several threads. Both calls block until every byte is where it belongs."""

    @property
    def together_bytes(self) -> int:
        """Bytes of payloads that are best gathered by one call."""
        ...

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        """Out of the pools into a payload on the host."""
        ...

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        """Back."""
        ...

    def after_caller(self) -> PayloadCopier:
        """One whose copies come after all that the caller's stream has to do now."""
        ...


Gathering = Callable[[], Sequence[PartChecksums]]
"""Waits until payloads are where they belong; returns the sums of what was gathered."""


Landing = Callable[[Callable[[Sequence[PartChecksums]], bool]], bool]
"""Waits until payloads were copied from where they are, then asks whether what was copied, which has these sums, is
intact, and writes the pools only if so; returns whether it was."""


class StagedPayloads(Protocol):
    """Payloads in the memory of a `StagedCopier`. Either of both is called, once."""

    def begin_copy(self, payloads: Sequence[Bytes]) -> Gathering:
        """Start to copy them to the host."""
        ...

    def drop(self) -> None:
        """Do not copy them. Never waits."""
        ...


@runtime_checkable
class StagedCopier(PayloadCopier, Protocol):
    """Copies through memory of its own, and computes checksums there, so that copies of many payloads overlap, and
    payloads may lie where others can change them.

    Payloads of one call have one length, and are one for `copies`, one after the other. Several have a multiple of 8
    bytes each.
    """

    def stage(self, copies: Iterable[BlockCopy], num_payloads: int, payload_bytes: int) -> StagedPayloads:
        """Start to gather payloads in the copier's own memory; where they go on the host is said later."""
        ...

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        """Start a scatter."""
        ...

    def wait_for_caller(self) -> None:
        """Block until the caller's stream has done what copies come after: what is begun then ends soon."""
        ...

    def is_caller_done(self) -> bool:
        """Whether `wait_for_caller` would return at once."""
        ...


class HostPayloadCopier:
    """Pools in the host's memory."""

    together_bytes = 512 << 10
    """They stay in the processor's cache until their checksums are computed."""

    def __init__(self, pools: Mapping[str, Bytes]) -> None:
        self._pools = pools

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        for copy in copies:
            copy_blocks(_kept(copy, payload), self._held(copy), copy.fields.shape)

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        for copy in copies:
            copy_blocks(self._held(copy), _kept(copy, payload), copy.fields.shape)

    def after_caller(self) -> HostPayloadCopier:
        return self

    def _held(self, copy: BlockCopy) -> StridedBlocks:
        fields, starts = copy.fields, np.add.outer(copy.fields.held, copy.held).ravel()
        pools = [self._pools[name] for name in fields.pools]
        index = np.repeat(fields.pool_index, len(copy.held)) if len(pools) > 1 else None
        return StridedBlocks(pools, starts, fields.held_strides, index)


def _kept(copy: BlockCopy, payload: Bytes) -> StridedBlocks:
    starts = np.add.outer(copy.fields.kept, copy.kept).ravel()
    return StridedBlocks([payload], starts, copy.fields.kept_strides)
