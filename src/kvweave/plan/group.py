"""Groups: the layer caches that share one block table, and where their pages lie in a pool.

A page is one block of every layer of its group. It is made of kernel blocks, a kernel block of layers, a layer of
roles; the order is the same everywhere, so any role of any layer is one strided tensor over kernel blocks:

    page      | kernel block 0                              | kernel block 1          ...
                layer a            layer b        (padding)
                key   value        key   value
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvweave.errors import PlanError
from kvweave.spec import LayerCache
from kvweave.spec.role import Role, align_up

LAYER_ALIGN = 16
"""Bytes at whose multiples each layer starts, so that copies may use 16-byte vectors."""
MOST_BLOCKS = 2**20
"""The most blocks of a sequence that are looked at one by one: 16 million tokens of usual blocks."""


@dataclass(frozen=True, slots=True)
class Group:
    """The caches under one tag: what they keep, in what blocks, and how its pool is cut for them.

    `lane_layers` of its layers lie side by side in each lane of the pool, where a super-page holds
    `pages_per_superpage` pages and kernel blocks are `kernel_stride` bytes apart.
    A group without layers is a placeholder: its table exists, its pages hold nothing.
    """

    tag: str
    cache: LayerCache
    layers: tuple[int, ...]
    block_tokens: int
    kernel_tokens: int
    context_shards: int = 1
    pool: str = ""
    lane_layers: int = 0
    pages_per_superpage: int = 0
    kernel_stride: int = 0

    def check(self, layers: range, cp: int) -> None:
        """Raise `PlanError` where its numbers contradict one another, as those of a file may."""
        unit = self.cache.unit_tokens if self.cache.reach.per_token else 1
        if self.kernel_tokens < 1 or self.block_tokens < 1 or self.block_tokens % self.kernel_tokens:
            raise PlanError(
                f"group {self.tag!r}: blocks of {self.block_tokens} tokens are not whole kernel blocks of"
                f" {self.kernel_tokens}"
            )
        if self.kernel_tokens % unit:
            raise PlanError(
                f"group {self.tag!r}: kernel blocks of {self.kernel_tokens} tokens are no multiple of {unit}"
            )
        if len(set(self.layers)) < len(self.layers) or any(layer not in layers for layer in self.layers):
            raise PlanError(f"group {self.tag!r}: {self.layers} are not different ones of {layers.stop} layers")
        if self.context_shards != (cp if self.cache.context_split else 1):
            raise PlanError(f"group {self.tag!r}: {self.context_shards} shards for {cp} context-parallel ranks")

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks in a page."""
        return self.block_tokens // self.kernel_tokens

    def num_rows(self, role: Role) -> int:
        """Rows of a role in one kernel block."""
        return self.cache.num_rows(role, self.kernel_tokens)

    @property
    def role_offsets(self) -> dict[str, int]:
        """Where each role starts within its layer's share of a kernel block."""
        offsets: dict[str, int] = {}
        end = 0
        for role in self.cache.roles:
            if role.alias_of is None:
                start = align_up(end, role.start_align)
                offsets[role.name] = start
                end = start + role.block_bytes(self.num_rows(role))
        return offsets | {r.name: offsets[r.alias_of] for r in self.cache.roles if r.alias_of is not None}

    @property
    def layer_align(self) -> int:
        return math.lcm(LAYER_ALIGN, *(role.start_align for role in self.cache.roles))

    @property
    def layer_bytes(self) -> int:
        """One layer's share of a kernel block, alignment included."""
        offsets = self.role_offsets
        ends = [offsets[role.name] + role.block_bytes(self.num_rows(role)) for role in self.cache.roles]
        return align_up(max(ends), self.layer_align)

    @property
    def payload_bytes(self) -> int:
        """Bytes of rows in a page, all layers."""
        rows = sum(role.row_bytes * self.num_rows(role) for role in self.cache.roles)
        return rows * self.kernel_blocks * len(self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the alignment of roles and layers included; what the pool adds is `padding_bytes`."""
        return self.layer_bytes * self.kernel_blocks * len(self.layers)

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next, within a lane."""
        return self.kernel_stride * self.kernel_blocks

    @property
    def fixed_bytes(self) -> int:
        """Bytes of rows that a long sequence keeps whatever its length, on this rank, block rounding apart."""
        ranks = self.context_shards if self.cache.reach.per_token else 1
        return -(-self.cache.fixed_bytes() // ranks) * len(self.layers)

    def moves_before(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens has let go of blocks on its way."""
        reach = self.cache.reach
        return reach.per_token and reach.span is not None and num_tokens > reach.span

    def num_blocks_held(self, num_tokens: int) -> int:
        """The most blocks that a sequence holds on its way to `num_tokens` tokens, on each rank: they allocate and
        release a block of each rank at a time.

        While position p is computed these are the blocks of [0, head) and of [tail(p), p + 1). Tails never come back,
        so of all positions in a block the first holds the most.
        """
        if num_tokens <= 0:
            return 0
        reach, size = self.cache.reach, self.block_tokens * self.context_shards
        if not reach.per_token:
            return 1
        num_blocks = -(-num_tokens // size)
        end = np.arange(num_blocks - self._blocks_to_ask(num_blocks, size), num_blocks) + 1
        head = np.minimum(-(-reach.head // size), end)
        tail = np.clip(reach.tail((end - 1) * size) // size, head, end)
        return int((head + end - tail).max())

    def _blocks_to_ask(self, num_blocks: int, size: int) -> int:
        """How many of the last of `num_blocks` blocks are looked at: one of them holds as much as any before.

        Before a tail moves, the last block holds the most. Later, what a reach with a span holds repeats where a span
        and a block begin together.
        """
        reach = self.cache.reach
        if reach.tail((num_blocks - 1) * size) <= reach.head:
            return 1
        if num_blocks <= MOST_BLOCKS or reach.span is None:
            return min(num_blocks, MOST_BLOCKS)
        repeats = math.lcm(reach.span - reach.head, size) // size
        if repeats > MOST_BLOCKS:
            raise PlanError(
                f"group {self.tag!r}: what {num_blocks:,} blocks of {size} tokens hold repeats after {repeats:,} blocks"
                f" only, of which at most {MOST_BLOCKS:,} are counted: choose a shorter context, or a block size that"
                f" divides {reach.span - reach.head:,}"
            )
        return repeats
