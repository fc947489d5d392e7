"""The flat chunk: a chunk of tokens (or one state) as a single run of bytes, the same on every tier and machine.

    chunk   | group a                  |pad| group b ...                  groups at multiples of `align` bytes
    group   | block 0 | block 1 | ...                                     the blocks of the chunk, in order
    block   | kernel block 0: layer a, layer b, ... | kernel block 1 ...  as a page is, without the pool's padding

The part of a group is laid out as a pool of one lane without padding, so that the bytes do not depend on the pools they
came from: layer-major and page-major pools, shared or independent, read and write the same chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvweave.errors import BadCopy, SpecError, UnknownName
from kvweave.plan import Group, Plan, Pool, View
from kvweave.plan.view import role_view
from kvweave.spec import DType, codec
from kvweave.spec.role import align_up

ALIGN = 256
"""Groups start at multiples of this many bytes, so that kernels and direct file reads work on whole sectors."""


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """The part of a group in a chunk: `num_blocks` blocks, from block `first_block` of the chunk on, at byte `offset`.

    `layer_bytes` and `block_bytes` follow from the group's roles; they are stored for readers that cannot compute them.
    """

    group: Group
    offset: int
    num_blocks: int
    layer_bytes: int
    block_bytes: int
    first_block: int = 0

    def __post_init__(self) -> None:
        if (self.layer_bytes, self.block_bytes) != (self.group.layer_bytes, self.group.page_bytes):
            raise SpecError(
                f"{self.tag!r} takes {self.group.layer_bytes} bytes a layer and {self.group.page_bytes} a block, not"
                f" {self.layer_bytes} and {self.block_bytes}"
            )

    @property
    def tag(self) -> str:
        return self.group.tag

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @property
    def kernel_blocks(self) -> int:
        return self.group.kernel_blocks

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks

    def view(self, layer: int, role: str) -> View:
        """Where a role of a layer lies in the chunk; the first axis is the kernel block."""
        pool = Pool(self.tag, (self.tag,), 1, self.block_bytes, self.num_blocks)
        view = role_view(self.group, pool, layer, self.group.cache.role(role))
        parts = tuple(replace(part, offset=part.offset + self.offset) for part in view.parts)
        return replace(view, offset=view.offset + self.offset, parts=parts)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose rows of a role have one shape and lie at a constant distance: layer i starts at `offset` + i *
    `stride`."""

    tag: str
    role: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layers: tuple[int, ...]
    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where everything lies in a chunk of `num_tokens` tokens. A value with a digest, JSON in and out."""

    num_tokens: int
    groups: tuple[ChunkGroup, ...]

    @classmethod
    def of(
        cls, plan: Plan, num_tokens: int, tags: Iterable[str] | None = None, *, ends_only: bool = False
    ) -> ChunkLayout:
        """The chunks of a plan's groups (of `tags` alone, if given), ordered by their first layers.

        With `ends_only` a chunk holds only what a sequence needs to resume at the end of a chunk: of windows shorter
        than the chunk, their last blocks.
        """
        wanted = [plan.group(tag) for tag in dict.fromkeys(tags)] if tags is not None else list(plan.groups)
        kept = [group for group in wanted if group.layers]
        kept.sort(key=lambda group: (group.layers[0], plan.groups.index(group)))
        made, end = [], 0
        for group in kept:
            first, last = _blocks(group, num_tokens, ends_only)
            offset, layer_bytes = align_up(end, ALIGN), group.layer_bytes
            made.append(ChunkGroup(_placed(group), offset, last - first, layer_bytes, group.page_bytes, first))
            end = made[-1].end
        return cls(num_tokens, tuple(made))

    @property
    def num_bytes(self) -> int:
        return align_up(max((group.end for group in self.groups), default=0), ALIGN)

    @property
    def digest(self) -> str:
        """Equal for layouts with identical chunks."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def group(self, tag: str) -> ChunkGroup:
        for group in self.groups:
            if group.tag == tag:
                return group
        raise UnknownName("tag of the chunk", tag, [group.tag for group in self.groups])

    def view(self, layer: int, role: str, tag: str | None = None) -> View:
        """Where a role of a layer lies; `tag` chooses a cache where the layer has several."""
        tags = [group.tag for group in self.groups if layer in group.group.layers]
        if tag is None and len(tags) != 1:
            raise BadCopy(f"layer {layer} has the caches {', '.join(tags) or '(none)'} in the chunk: say which tag")
        if tag is not None and tag not in tags:
            raise UnknownName(f"tag of layer {layer} in the chunk", tag, tags)
        return self.group(tag or tags[0]).view(layer, role)

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Every role of every group, in the order of their bytes: what a reader other than kvweave needs."""
        return tuple(_layer_group(group, role.name) for group in self.groups for role in group.group.cache.roles)

    def to_dict(self) -> dict[str, Any]:
        return codec.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChunkLayout:
        return codec.from_dict(cls, data, "chunk layout")


def _placed(group: Group) -> Group:
    """The group as if it were alone in a pool of one lane."""
    layers = len(group.layers)
    return replace(group, pool="", lane_layers=layers, pages_per_superpage=1, kernel_stride=group.layer_bytes * layers)


def _blocks(group: Group, num_tokens: int, ends_only: bool) -> tuple[int, int]:
    """The blocks of a group, as numbered on this rank, that a chunk holds: the first, and one past the last."""
    if not group.cache.reach.per_token:
        return 0, 1
    slot_tokens = group.block_tokens * group.context_shards
    if num_tokens < 1 or num_tokens % slot_tokens:
        least = align_up(max(1, num_tokens), slot_tokens)
        raise BadCopy(
            f"a chunk of {num_tokens} tokens is no whole number of the blocks of {group.tag!r}, which span"
            f" {slot_tokens} tokens; take {least}"
        )
    last = num_tokens // slot_tokens
    span = group.cache.reach.span
    if not ends_only or span is None or group.cache.reach.head:
        return 0, last
    return max(0, num_tokens - span + 1) // slot_tokens, last


def _layer_group(part: ChunkGroup, role: str) -> LayerGroup:
    view = part.view(part.group.layers[0], role)
    return LayerGroup(
        part.tag, role, view.dtype, view.shape, view.strides, part.group.layers, view.offset, part.layer_bytes
    )
