"""Small models of every kind over real memory, whose rows are signed, so that moved pages can be told apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from kvweave import from_config, make_plan
from kvweave.plan import Group, Plan
from kvweave.pool import NULL
from kvweave.spec import Layer, LayerCache, ModelSpec, Role
from kvweave.tensor import Arena
from kvweave.tensor.torch_dtypes import flat_bytes
from kvweave.transfer import ChunkLayout
from tests.strategies import smallest_memory

EXAMPLES = sorted(path.name[:-5] for path in (files("kvweave") / "examples").iterdir() if path.name.endswith(".json"))


def shrunk(name: str, dtype: str = "auto", layers: int = 2) -> ModelSpec:
    """An example model with the first few layers of each kind and a few of their heads; dtypes and packing stay."""
    spec = from_config(str(files("kvweave") / "examples" / f"{name}.json"), dtype=dtype)
    left = dict.fromkeys(spec.groups(), layers)
    kept = []
    for layer in spec.layers:
        caches = tuple(_slim(cache) for cache in layer.caches if left[cache.tag] > 0)
        for cache in caches:
            left[cache.tag] -= 1
        if caches:
            kept.append(Layer(caches, (), layer.draft))
    return replace(spec, layers=tuple(kept))


def _slim(cache: LayerCache) -> LayerCache:
    return replace(cache, roles=tuple(_slim_role(role) for role in cache.roles))


def _slim_role(role: Role) -> Role:
    shape = role.shape
    while not role.parts and len(shape) > 1 and shape[0] > 2 and math.prod(shape) > 2048:
        shape = (-(-shape[0] // 2), *shape[1:])
    return replace(role, shape=shape, split=())


def planned(spec: ModelSpec, sequences: int, num_chunks: int = 1, **wishes: Any) -> Plan:
    """A plan with the pages of so many chunks for so many sequences, whoever shares a pool."""
    made = make_plan(spec, smallest_memory(spec, **wishes), **wishes)
    layout = ChunkLayout.of(made, chunk_tokens(made), ends_only=True)
    pools = []
    for pool in made.pools:
        members = [(layout.group(tag).num_blocks, made.group(tag).pages_per_superpage) for tag in pool.tags]
        supers = sum(-(-blocks * num_chunks // pages) for blocks, pages in members)
        pools.append(replace(pool, num_superpages=1 + sequences * supers))
    return replace(made, pools=tuple(pools))


def chunk_tokens(made: Plan) -> int:
    """The fewest tokens that are whole blocks of every group."""
    spans = [g.block_tokens * g.context_shards for g in made.groups if g.layers and g.cache.reach.per_token]
    return math.lcm(*spans) if spans else 16


class World:
    """An arena, and pages of its groups dealt out at random, no super-page to two groups."""

    def __init__(self, made: Plan, seed: int, device: str = "cpu") -> None:
        self.plan, self.device = made, device
        self.arena = Arena(made, device)
        self.rng = np.random.default_rng(seed)
        self.scramble()
        self._supers = {
            pool.name: [1 + n for n in self.rng.permutation(pool.num_superpages - 1).tolist()] for pool in made.pools
        }
        self._free: dict[str, list[int]] = {group.tag: [] for group in made.groups}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    def scramble(self) -> None:
        """Other bytes everywhere, but in the NULL super-page."""
        for pool in self.plan.pools:
            noise = torch.from_numpy(np.frombuffer(self.rng.bytes(pool.num_bytes), np.uint8).copy())
            noise.view(pool.lanes, -1)[:, : pool.superpage_bytes] = 0
            self.arena.pool(pool.name).copy_(noise)

    def take(self, tag: str, count: int) -> np.ndarray:
        group, free = self.plan.group(tag), self._free[tag]
        while len(free) < count:
            start = self._supers[group.pool].pop() * group.pages_per_superpage
            free += range(start, start + group.pages_per_superpage)
        self.rng.shuffle(free)
        taken, self._free[tag] = free[:count], free[count:]
        return np.array(taken, np.int32)

    def tables(self, layout: ChunkLayout, num_chunks: int) -> dict[str, np.ndarray]:
        """Pages for all blocks that chunks of a layout hold; NULL for those that they do not."""
        rows = {}
        for part in layout.groups:
            width = blocks_per_chunk(layout, part.group)
            row = np.zeros((num_chunks, width), np.int32)
            row[:, part.first_block :] = self.take(part.tag, num_chunks * part.num_blocks).reshape(num_chunks, -1)
            rows[part.tag] = row.ravel()
        return rows

    def rows(self, tables: Mapping[str, np.ndarray]) -> Iterator[tuple[tuple[str, int, str], torch.Tensor, np.ndarray]]:
        """Every role of every layer of the groups in `tables`: its tensor, and the kernel blocks of the pages."""
        for tag, pages in tables.items():
            group = self.plan.group(tag)
            held = pages[pages != NULL].astype(np.int64)
            blocks = (held[:, None] * group.kernel_blocks + np.arange(group.kernel_blocks)).ravel()
            for layer in group.layers:
                for role in self.arena.layer(layer, tag).roles.values():
                    if role.role.alias_of is None:
                        yield (tag, layer, role.role.name), role.tensor, blocks

    def sign(self, tables: Mapping[str, np.ndarray]) -> None:
        """New random rows in all pages, through the views of their layers."""
        for _, tensor, blocks in self.rows(tables):
            for block in blocks.tolist():
                shape, dtype = tensor[block].shape, tensor.dtype
                noise = torch.from_numpy(self.rng.integers(0, 256, (math.prod(shape) * dtype.itemsize,), np.uint8))
                tensor[block] = noise.view(dtype).view(shape).to(self.device)

    def read(self, tables: Mapping[str, np.ndarray]) -> dict[tuple[str, int, str], np.ndarray]:
        """The bytes of all pages, by tag, layer and role, through the views."""
        return {
            name: np.stack([flat_bytes(tensor[block]).cpu().numpy() for block in blocks.tolist()])
            for name, tensor, blocks in self.rows(tables)
            if len(blocks)
        }

    def memory(self) -> dict[str, np.ndarray]:
        return {pool.name: self.arena.pool(pool.name).cpu().numpy().copy() for pool in self.plan.pools}

    def outside(self, tables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """By pool, which bytes are in none of the pages."""
        masks = {pool.name: np.ones(pool.num_bytes, bool) for pool in self.plan.pools}
        for tag, pages in tables.items():
            group = self.plan.group(tag)
            pool = self.plan.pool(group.pool)
            lanes = masks[pool.name].reshape(pool.lanes, -1)
            for page in pages[pages != NULL].tolist():
                lanes[:, page * group.page_stride : (page + 1) * group.page_stride] = False
        return masks


def blocks_per_chunk(layout: ChunkLayout, group: Group) -> int:
    return layout.num_tokens // (group.block_tokens * group.context_shards) if group.cache.reach.per_token else 1


def buffers(layout: ChunkLayout, count: int, device: str = "cpu") -> list[torch.Tensor]:
    """Chunks full of a byte that nobody wrote; pinned where a GPU is to reach them."""
    made = [torch.full((layout.num_bytes,), 0xEE, dtype=torch.uint8) for _ in range(count)]
    return [chunk.pin_memory() for chunk in made] if device == "cuda" else made


def in_rows(layout: ChunkLayout, padding: bool = False) -> np.ndarray:
    """Which bytes of a chunk belong to rows; with `padding`, also those between the roles of a layer."""
    mask = np.zeros(layout.num_bytes, bool)
    for part in layout.groups:
        if padding:
            mask[part.offset : part.end] = True
        for layer in part.group.layers:
            for role in part.group.cache.roles:
                view = part.view(layer, role.name)
                size = math.prod(view.shape[1:]) * view.dtype.align_bytes
                for block in range(view.shape[0]):
                    start = view.offset + block * view.strides[0]
                    mask[start : start + size] = True
    return mask
