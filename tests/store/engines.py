"""Engines of other people: tensors in their layouts, filled and read token by token, as their kernels would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvweave import Layer, LayerCache, ModelSpec, Parallel, Role
from kvweave.spec import DType, Full, Part, Segment, State, Window
from kvweave.store import EngineMemory, PagePayloads, Schema, Shard, TableUse, region_view
from kvweave.store.keys import Bytes

HEADS, DIM, LATENT, WINDOW = 4, 8, 24, 75
SPLIT = (Segment(HEADS),)
KEY, VALUE = (Role(name, (HEADS, DIM), DType.BFLOAT16, split=SPLIT) for name in ("key", "value"))
INDEXER = Role.packed("indexer", (Part("values", (128,), DType.FLOAT8_E4M3), Part("scale", (1,), DType.FLOAT32)))
CONV = Role("conv_state", (24, 3), DType.BFLOAT16, split=(Segment(8, 2), Segment(1, 4), Segment(1, 4)))
SSM = Role("ssm_state", (8, 2, 4), DType.FLOAT32, split=(Segment(8),))
FULL, LATENTS, STATES, WINDOWS = 0, 1, 2, (3, 4, 5)
SPEC = ModelSpec(
    "foreign",
    (
        Layer((LayerCache("full", Full(), (KEY, VALUE)),)),
        Layer(
            (
                LayerCache("latent", Full(), (Role("latent", (LATENT,), DType.BFLOAT16),)),
                LayerCache("indexer", Full(), (INDEXER,)),
            )
        ),
        Layer((LayerCache("state", State(), (CONV, SSM)),)),
        *(Layer((LayerCache("window", Window(WINDOW), (KEY, VALUE)),)) for _ in WINDOWS),
    ),
)
LAYOUTS = ("[B, 2, N, H, D]", "[B, H, N, K|V]", "K as [D, N]", "regions", "two kernel blocks a page")
POISON = 0xA5
PADDING = 64


@dataclass
class Truth:
    """What a model computes for `tokens` tokens, by layer and role: rows of all heads; states at chunks' ends."""

    tokens: int
    chunk: int
    rows: dict[tuple[int, str], np.ndarray[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = np.random.default_rng(7)
        for number, layer in enumerate(SPEC.layers):
            for cache in layer.caches:
                for role in cache.roles:
                    count = self.tokens if cache.reach.per_token else self.tokens // self.chunk
                    item = np.dtype(f"u{role.dtype.align_bytes}")
                    rows = chance.integers(0, 2 ** (8 * item.itemsize), (count, *role.shape), item)
                    self.rows[number, role.name] = rows

    def payload(self, shard: Shard, chunk: int) -> Bytes:
        """Layers, roles, rows, and of a row the entries of the part."""
        start, stop = shard.tokens(chunk) if shard.reach.per_token else (chunk, chunk + 1)
        pieces = []
        for layer, role, _ in shard.fields():
            rows = self.rows[layer, role.name][start:stop]
            pieces += [np.concatenate([rows[:, cut.start : cut.stop] for cut in shard.axis_slices(role)], axis=1)]
        return np.concatenate([np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces])


class Engine:
    """One rank's tensors for one sequence, whose pages are all over them. Page 0 is nobody's."""

    def __init__(self, schema: Schema, layout: str, block: int, tokens: int, tp: int = 1, rank: int = 0) -> None:
        self.layout, self.block, self.tokens, self.chunk = layout, block, tokens, schema.chunk_tokens
        self.tp, self.rank, self.heads = tp, rank, HEADS // tp
        self.null = -1 if layout == "regions" else 0
        self._chance = np.random.default_rng([block, tp, rank])
        pages, states = -(-tokens // block), tokens // self.chunk
        names = {"tokens": pages, "window 3": pages, "window 4": pages, "window 5": pages, "state": states}
        self.tables = {name: self._scattered(count) for name, count in names.items()}
        conv, ssm = (role.shard(tp) for role in (CONV, SSM))
        self.state_bytes = conv.row_bytes + ssm.row_bytes + PADDING
        self.arrays = {f"kv {layer}": self._kv(pages + 1) for layer in (FULL, *WINDOWS)}
        self.arrays |= {
            "latent": np.zeros((pages + 1, block, LATENT), np.uint16),
            "indexer": np.zeros((pages + 1, block * 132), np.uint8),
            "state": np.zeros((states + 1, self.state_bytes), np.uint8),
        }
        self.poison()
        self.memory = self._described()
        self.pages = PagePayloads(schema, self.memory)

    def _scattered(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return (1 + self._chance.permutation(count)).astype(np.int32)

    def _kv(self, pages: int) -> np.ndarray[Any, Any]:
        size, heads = self.block, self.heads
        shapes = {
            "[B, 2, N, H, D]": (pages, 2, size, heads, DIM),
            "[B, H, N, K|V]": (pages, heads, size, 2 * DIM),
            "K as [D, N]": (pages, heads, 2 * size * DIM),
            "regions": (pages, 2, heads, size, DIM),
            "two kernel blocks a page": (2 * pages, 2, size // 2, heads, DIM),
        }
        return np.zeros(shapes[self.layout], np.uint16)

    def poison(self) -> None:
        for array in self.arrays.values():
            array.reshape(-1).view(np.uint8)[:] = POISON

    # ---- as the store is told

    def _described(self) -> EngineMemory:
        parallel = Parallel(tp=self.tp, tp_rank=self.rank)
        tables = {(FULL, "full"): TableUse("tokens", self.block), (STATES, "state"): TableUse("state", self.chunk)}
        tables |= {(LATENTS, tag): TableUse("tokens", self.block) for tag in ("latent", "indexer")}
        tables |= {(layer, "window"): TableUse(f"window {layer}", self.block) for layer in WINDOWS}
        indexer, state, split = self.arrays["indexer"], self.arrays["state"], CONV.shard(self.tp).row_bytes
        planes = indexer[:, : self.block * 128], indexer[:, self.block * 128 :].view(np.uint32)
        states = state[:, :split].view(np.uint16), state[:, split:-PADDING].view(np.uint32)
        given = {
            (LATENTS, "latent", "latent"): self.arrays["latent"],
            (LATENTS, "indexer", "indexer.values"): planes[0].reshape(-1, self.block, 128),
            (LATENTS, "indexer", "indexer.scale"): planes[1].reshape(-1, self.block, 1),
            (STATES, "state", "conv_state"): states[0].reshape(-1, *CONV.shard(self.tp).shape),
            (STATES, "state", "ssm_state"): states[1].reshape(-1, *SSM.shard(self.tp).shape),
        }
        if self.layout != "regions":
            for layer in (FULL, *WINDOWS):
                tag = "full" if layer == FULL else "window"
                for name, view in zip(("key", "value"), self._kv_views(self.arrays[f"kv {layer}"]), strict=True):
                    given[layer, tag, name] = view
            return EngineMemory.of_tensors(given, tables, parallel=parallel, null=self.null)
        rest = {key: use for key, use in tables.items() if key[1] not in ("full", "window")}
        others = EngineMemory.of_tensors(given, rest, parallel=parallel)
        pools = {f"kv {layer}": self.arrays[f"kv {layer}"].reshape(-1).view(np.uint8) for layer in (FULL, *WINDOWS)}
        views = (*others.views, *self._regions())
        return EngineMemory(views, tables, {**others.pools, **pools}, parallel, self.null)

    def _kv_views(self, array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys and values as blocks, tokens, heads, entries."""
        if self.layout == "[B, H, N, K|V]":
            return array[..., :DIM].transpose(0, 2, 1, 3), array[..., DIM:].transpose(0, 2, 1, 3)
        if self.layout == "K as [D, N]":
            keys, values = np.split(array, 2, axis=2)
            keys = keys.reshape(-1, self.heads, DIM, self.block).transpose(0, 3, 1, 2)
            return keys, values.reshape(-1, self.heads, self.block, DIM).transpose(0, 2, 1, 3)
        return array[:, 0], array[:, 1]

    def _regions(self) -> list[Any]:
        size = self.heads * self.block * DIM * 2
        return [
            region_view(
                layer, "full" if layer == FULL else "window", role.shard(self.tp), pool=f"kv {layer}", base=side * size,
                stride=2 * size, slots=len(self.arrays[f"kv {layer}"]), size=size, num_rows=self.block, token_axis=1,
            )
            for layer in (FULL, *WINDOWS)
            for side, role in enumerate((KEY, VALUE))
        ]  # fmt: skip

    # ---- as its kernels write

    def compute(self, truth: Truth, window_from: int = 0, states: Any = ()) -> None:
        """Write what this rank would have: all tokens, of windows those from `window_from` on, and some snapshots."""
        mine = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        for layer in (FULL, *WINDOWS):
            tokens = np.arange(window_from if layer in WINDOWS else 0, self.tokens)
            table = self.tables[f"window {layer}" if layer in WINDOWS else "tokens"]
            keys, values = (truth.rows[layer, name][tokens][:, mine] for name in ("key", "value"))
            self._write(self.arrays[f"kv {layer}"], table[tokens // self.block], tokens % self.block, keys, values)
        tokens = np.arange(self.tokens)
        pages, rows = self.tables["tokens"][tokens // self.block], tokens % self.block
        self.arrays["latent"][pages, rows] = truth.rows[LATENTS, "latent"]
        for byte in range(132):
            at = rows * 128 + byte if byte < 128 else self.block * 128 + rows * 4 + byte - 128
            self.arrays["indexer"][pages, at] = truth.rows[LATENTS, "indexer"][:, byte]
        for number in states:
            conv, ssm = (truth.rows[STATES, role.name][number] for role in (CONV, SSM))
            share = np.concatenate([conv[16 * self.rank // self.tp : 16 * (self.rank + 1) // self.tp], conv[16:]])
            heads = ssm[8 * self.rank // self.tp : 8 * (self.rank + 1) // self.tp]
            whole = np.concatenate([share.reshape(-1).view(np.uint8), heads.reshape(-1).view(np.uint8)])
            self.arrays["state"][self.tables["state"][number], :-PADDING] = whole

    def _write(self, array: Any, pages: Any, rows: Any, keys: Any, values: Any) -> None:
        if self.layout == "[B, 2, N, H, D]":
            array[pages, 0, rows], array[pages, 1, rows] = keys, values
        elif self.layout == "[B, H, N, K|V]":
            array[pages, :, rows, :DIM], array[pages, :, rows, DIM:] = keys, values
        elif self.layout == "regions":
            array[pages, 0, :, rows], array[pages, 1, :, rows] = keys, values
        elif self.layout == "K as [D, N]":
            for entry in range(DIM):
                array[pages, :, entry * self.block + rows] = keys[:, :, entry]
                array[pages, :, (self.block + rows) * DIM + entry] = values[:, :, entry]
        else:
            kernel, rows = 2 * pages + rows // (self.block // 2), rows % (self.block // 2)
            array[kernel, 0, rows], array[kernel, 1, rows] = keys, values

    def lose_windows(self, before: int) -> None:
        """Give back the pages that hold nothing from token `before` on."""
        for layer in WINDOWS:
            self.tables[f"window {layer}"][: before // self.block] = self.null

    def snapshot(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.arrays.items()}
