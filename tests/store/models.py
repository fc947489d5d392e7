"""Small models of every kind, ranks with pools full of random bytes, and the rows that their sequences must have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from kvweave import Layer, LayerCache, ModelSpec, Parallel, Plan, Role, make_plan
from kvweave.plan import Layout
from kvweave.spec import DType, Full, Part, Reach, Segment, SinkWindow, State, Window
from kvweave.store import EngineMemory, Namespace, PagePayloads, Schema, Shard, model_digest
from kvweave.store.keys import Bytes

CHUNK = 256


def kv(heads: int, dim: int = 4, axis: int = 0, dtype: DType = DType.BFLOAT16) -> tuple[Role, ...]:
    split = (Segment(heads),)
    return tuple(Role(name, (heads, dim), dtype, token_axis=axis, split=split) for name in ("key", "value"))


def model(*caches: LayerCache, layers: int = 2) -> ModelSpec:
    return ModelSpec("tiny", (Layer(caches),) * layers)


INDEXER = (Part("values", (8,), DType.FLOAT8_E4M3), Part("scale", (1,), DType.FLOAT32))
CONV = Role("conv_state", (24, 3), DType.BFLOAT16, split=(Segment(8, 2), Segment(1, 4), Segment(1, 4)))
SSM = Role("ssm_state", (8, 2, 4), DType.FLOAT32, split=(Segment(8),))
SCALED = (*kv(8, axis=1, dtype=DType.INT4), Role("key_scale", (8,), DType.FLOAT16, token_axis=1, split=(Segment(8),)))

KINDS = {
    "mha": model(LayerCache("full", Full(), kv(16))),
    "gqa": model(LayerCache("full", Full(), kv(2, 8)), layers=3),
    "heads first": model(LayerCache("full", Full(), kv(8, axis=1))),
    "int4 with scales": model(LayerCache("full", Full(), SCALED)),
    "mla": model(LayerCache("latent", Full(), (Role("latent", (12,), DType.BFLOAT16),))),
    "indexer": model(
        LayerCache("latent", Full(), (Role("latent", (12,), DType.BFLOAT16),)),
        LayerCache("indexer", Full(), (Role.packed("indexer", INDEXER, planar=True, align=16),), kernel_tokens=16),
    ),
    "packed states": model(LayerCache("state", State(), (Role.packed("state", INDEXER, align=16),))),
    "states": model(LayerCache("state", State(), (CONV, SSM))),
    "compressed": model(LayerCache("c", Full(), (Role("compressed", (6,), DType.BFLOAT16, tokens_per_row=4),))),
}


def hybrid(window: int = 300) -> ModelSpec:
    """Full attention, a window, and a state, in different numbers of layers."""
    full = Layer((LayerCache("full", Full(), kv(4)),))
    near = Layer((LayerCache("window", Window(window), kv(4)),))
    state = Layer((LayerCache("state", State(), (SSM,)),))
    return ModelSpec("hybrid", (full, near, near, state, state, state))


def one(reach: Reach) -> ModelSpec:
    return model(LayerCache("only", reach, kv(2)), layers=1)


SINKS = one(SinkWindow(300, 500))


@dataclass
class Rank:
    """A plan, its pools, and the pages of one sequence, which are all over the pools."""

    plan: Plan
    pools: dict[str, Bytes]
    table: dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]]
    pages: PagePayloads


def rank(
    schema: Schema,
    spec: ModelSpec,
    tokens: int,
    *,
    tp: int = 1,
    at: int = 0,
    pp: int = 1,
    stage: int = 0,
    **wishes: object,
) -> Rank:
    parallel = Parallel(tp=tp, tp_rank=at, pp=pp, pp_rank=stage)
    made = make_plan(spec, "2MiB", parallel=parallel, **wishes)  # type: ignore[arg-type]
    chance = np.random.default_rng([tp, at, pp, stage])
    pools = {pool.name: np.full(pool.num_bytes, 0xAA, np.uint8) for pool in made.pools}
    table, used = {}, 1  # the first super-page is nobody's, and each group takes its own
    for group in (group for group in made.groups if group.layers):
        count = tokens // group.block_tokens
        ids = used * group.pages_per_superpage + np.arange(count)
        used += -(-count // group.pages_per_superpage)
        table[group.tag] = chance.permutation(ids).astype(np.int32)
    return Rank(made, pools, table, PagePayloads(schema, EngineMemory.of_plan(made, pools)))


def truth(shard: Shard, chunk: int) -> Bytes:
    """What a row's chunk holds, the same for every rank: cut out of the whole roles' bytes."""
    pieces = []
    for layer, role, _ in shard.fields():
        shape = (shard.num_rows(role), *role.shape)
        bits = role.dtype.bits
        if bits < 8:
            shape = (*shape[:-1], shape[-1] * bits // 8)
        item = max(1, bits // 8)
        seed = [layer, chunk, *role.name.encode()]
        whole = np.random.default_rng(seed).integers(0, 256, (*shape, item), np.uint8)
        pieces += [
            np.concatenate(
                [whole[:, axis_slice.start : axis_slice.stop] for axis_slice in shard.axis_slices(role)], axis=1
            ).ravel()
        ]
    return np.concatenate(pieces)


def fill(schema: Schema, rank: Rank, chunks: int) -> None:
    """Give a rank what it would have computed: its share of the truth."""
    sink = rank.pages.sink(rank.table)
    for number in rank.pages.reads:
        for chunk in range(chunks):
            sink(schema.shards[number], chunk, truth(schema.shards[number], chunk))


def share(rank: Rank) -> dict[tuple[int, str, str], list[bytes]]:
    """By layer, tag and role: every row of the sequence, in order, as the rank holds it, blind to its layout."""
    shards = {}
    for view in rank.plan.views():
        group = rank.plan.group(view.tag)
        role = group.cache.role(view.role)
        planes = view.parts or (view,)
        gathered = []
        for plane in planes:
            item = plane.dtype.align_bytes
            array = np.ndarray(
                (*plane.shape, item), np.uint8, rank.pools[plane.pool], plane.offset, (*plane.strides, 1)
            )
            kernel = rank.table[view.tag][:, None] * group.kernel_blocks + np.arange(group.kernel_blocks)
            owned_payload = array[kernel.ravel()]
            if group.cache.reach.per_token and not view.parts:
                owned_payload = np.moveaxis(owned_payload, role.token_axis + 1, 1)
                owned_payload = owned_payload.reshape(-1, *owned_payload.shape[2:])
            elif view.parts:
                owned_payload = owned_payload.reshape(-1, *owned_payload.shape[2:])
            gathered.append(owned_payload.reshape(len(owned_payload), -1))
        whole = np.ascontiguousarray(np.concatenate(gathered, axis=1))
        shards[view.layer, view.tag, view.role] = whole.view(f"V{whole.shape[1]}").ravel().tolist()
    return shards


def namespace(spec: ModelSpec, **fields: object) -> Namespace:
    return Namespace(model_digest(spec), **fields)  # type: ignore[arg-type]


LAYOUTS = tuple(Layout)


def checksum_of(data: Bytes) -> int:
    """As it is defined: of parts of 32 KiB, the last of which is up to twice as long."""
    last = max(1, data.nbytes // 32768) - 1
    parts = [data[at : at + 32768] for at in range(0, last * 32768, 32768)] + [data[last * 32768 :]]
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_intdigest(p.data).to_bytes(8, "little") for p in parts))
