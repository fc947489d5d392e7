"""Copies between an engine's pools and a payload, as data: whoever carries them out needs to know nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvweave.copying.blocks import Bytes, Numbers, Shape, StridedBlocks, copy_blocks
from kvweave.errors import BadCopy


class BlockCopy(NamedTuple):
    """Blocks of `shape` (planes, rows, bytes of a run): block i starts at `held[i]` of the pool `pools[pool_index[i]]`,
    at `kept[i]` of the payload, and its runs lie as far apart as either side's strides say."""

    pools: tuple[str, ...]
    pool_index: Numbers | None
    """None if there is one pool."""
    held: Numbers
    held_strides: tuple[int, int]
    kept: Numbers
    kept_strides: tuple[int, int]
    shape: Shape

    def of_pools(self, numbers: Numbers) -> Numbers | int:
        """Of one number for each pool, those of the blocks' pools."""
        return int(numbers[0]) if self.pool_index is None else numbers[self.pool_index]

    def check(self, pool_bytes: Numbers, payload_bytes: int) -> None:
        """Raises `BadCopy` if a block, of at least one, does not lie in memories of so many bytes."""
        for name, sizes, starts, strides in (
            ("pool", self.of_pools(pool_bytes), self.held, self.held_strides),
            ("payload", payload_bytes, self.kept, self.kept_strides),
        ):
            reach = strides[0] * (self.shape[0] - 1) + strides[1] * (self.shape[1] - 1) + self.shape[2]
            first, beyond = int(starts.min()), starts + (reach - sizes)
            if first < 0 or beyond.max() > 0:
                raise BadCopy(
                    f"blocks begin at byte {first} of a {name}, and end {beyond.max()} bytes behind its end: is a page"
                    " number wrong?"
                )


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


Landing = Callable[[Callable[[], bool]], bool]
"""Waits until payloads were copied from where they are, then asks whether they were intact until now, and writes the
pools only if so; returns whether they were."""


@runtime_checkable
class StagedCopier(PayloadCopier, Protocol):
    """Copies through memory of its own, so that copies of many payloads overlap, and payloads which others may change
    are checked on their way."""

    def begin_gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> Callable[[], None]:
        """Start a gather; the returned function waits for its end."""
        ...

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        """Start a scatter of payloads, which are one for `copies`, one after the other."""
        ...


class HostPayloadCopier:
    """Pools in the host's memory."""

    together_bytes = 512 << 10
    """They stay in the processor's cache until their checksums are computed."""

    def __init__(self, pools: Mapping[str, Bytes]) -> None:
        self._pools = pools

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        for copy in copies:
            copy_blocks(_kept(copy, payload), self._held(copy), copy.shape)

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        for copy in copies:
            copy_blocks(self._held(copy), _kept(copy, payload), copy.shape)

    def after_caller(self) -> HostPayloadCopier:
        return self

    def _held(self, copy: BlockCopy) -> StridedBlocks:
        pools = [self._pools[name] for name in copy.pools]
        return StridedBlocks(pools, copy.held, copy.held_strides, copy.pool_index)


def _kept(copy: BlockCopy, payload: Bytes) -> StridedBlocks:
    return StridedBlocks([payload], copy.kept, copy.kept_strides)
