"""Chunk layouts: values that say where every byte is, whatever pool it came from."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from kvweave import make_plan
from kvweave.errors import BadCopy, SpecError, UnknownName
from kvweave.plan import Layout, Parallel, Plan
from kvweave.spec import Full, Layer, LayerCache, ModelSpec, Role, SinkWindow, Window
from kvweave.tensor.layer import strided
from kvweave.transfer import ChunkLayout, check_layout
from kvweave.transfer.layout import ALIGN
from tests import strategies
from tests.tensor.models import DSA, HYBRID, KEY, VALUE
from tests.transfer.worlds import chunk_tokens, in_rows

SMALL: dict[str, Any] = {"memory": "2MB", "block_tokens": 8}


def test_a_layout_goes_through_json_and_keeps_its_digest() -> None:
    layout = ChunkLayout.of(make_plan(HYBRID, **SMALL), 16)
    again = ChunkLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout
    assert again.digest == layout.digest
    assert len(layout.digest) == 64


def test_an_unknown_key_is_an_error_with_its_place() -> None:
    data = ChunkLayout.of(make_plan(HYBRID, **SMALL), 16).to_dict()
    data["groups"][0]["ofset"] = 3
    with pytest.raises(SpecError, match=r"chunk layout.groups\[0\].*did you mean 'offset'"):
        ChunkLayout.from_dict(data)


def test_a_layout_that_contradicts_itself_is_refused() -> None:
    data = ChunkLayout.of(make_plan(HYBRID, **SMALL), 16).to_dict()
    data["groups"][0]["block_bytes"] += 16
    with pytest.raises(SpecError, match=r"'full' takes 512 bytes a layer and 1024 a block, not 512 and 1040"):
        ChunkLayout.from_dict(data)


def test_pools_do_not_show_in_the_digest_but_blocks_and_dtypes_do() -> None:
    same = [
        make_plan(HYBRID, "2MB", block_tokens=8, layout=layout, pools=pools)
        for layout in Layout
        for pools in ("shared", "independent")
    ]
    assert len({ChunkLayout.of(made, 16).digest for made in same}) == 1
    other = ChunkLayout.of(make_plan(HYBRID, "2MB", block_tokens=16), 16)
    assert other.digest != ChunkLayout.of(same[0], 16).digest
    with pytest.raises(BadCopy, match="keep 'full' as .*block_tokens=16.* the plan as .*block_tokens=8"):
        check_layout(other, same[0])


def test_groups_come_by_first_layer_at_aligned_offsets() -> None:
    layout = ChunkLayout.of(make_plan(HYBRID, **SMALL), 16)
    assert [part.tag for part in layout.groups] == ["full", "window", "state"]
    assert all(part.offset % ALIGN == 0 for part in layout.groups)
    assert layout.num_bytes % ALIGN == 0
    assert [part.tag for part in ChunkLayout.of(make_plan(HYBRID, **SMALL), 16, ["state", "full"]).groups] == [
        "full",
        "state",
    ]


@given(made=strategies.plans(most_bytes=10_000))
def test_no_two_rows_share_a_byte_and_all_are_inside(made: Plan) -> None:
    layout = ChunkLayout.of(made, chunk_tokens(made))
    kept = sum(part.num_blocks * made.group(part.tag).payload_bytes for part in layout.groups)
    assert int(in_rows(layout).sum()) == kept
    assert len(in_rows(layout)) == layout.num_bytes


def test_a_role_of_a_layer_can_be_taken_out_of_a_chunk() -> None:
    layout = ChunkLayout.of(make_plan(DSA, "8MB", block_tokens=64), 128)
    chunk = torch.arange(layout.num_bytes, dtype=torch.int64).to(torch.uint8)
    indexer = layout.view(1, "indexer", "indexer")
    assert strided(chunk, indexer).shape == (2, 64 * 132)
    scales = next(part for part in indexer.parts if part.role == "indexer.scale")
    assert strided(chunk, scales).shape == (2, 64, 1)
    assert strided(chunk, scales).data_ptr() - chunk.data_ptr() == scales.offset == indexer.offset + 64 * 128
    with pytest.raises(BadCopy, match="layer 1 has the caches latent, indexer in the chunk: say which tag"):
        layout.view(1, "indexer")
    with pytest.raises(UnknownName, match="tag of layer 1 in the chunk 'index'; did you mean 'indexer'"):
        layout.view(1, "indexer", "index")


def test_layer_groups_say_all_that_a_reader_must_know() -> None:
    layout = ChunkLayout.of(make_plan(HYBRID, **SMALL, kernel_tokens=4), 16)
    chunk = np.arange(layout.num_bytes, dtype=np.int64).astype(np.uint8)
    groups = layout.layer_groups()
    assert [(g.tag, g.role) for g in groups] == [
        ("full", "key"),
        ("full", "value"),
        ("window", "key"),
        ("window", "value"),
        ("state", "conv_state"),
        ("state", "ssm_state"),
    ]
    for group in groups:
        for number, layer in enumerate(group.layers):
            view = layout.view(layer, group.role, group.tag)
            assert view.offset == group.offset + number * group.stride
            assert (view.shape, view.strides, view.dtype) == (group.shape, group.strides, group.dtype)
        assert math.prod(group.shape) * group.dtype.align_bytes * len(group.layers) <= chunk.nbytes


def test_chunks_of_broken_blocks_are_refused_with_the_cure() -> None:
    with pytest.raises(BadCopy, match="a chunk of 20 tokens is no whole number of the blocks of 'full'.* take 24"):
        ChunkLayout.of(make_plan(HYBRID, **SMALL), 20)
    with pytest.raises(UnknownName, match="did you mean 'window'"):
        ChunkLayout.of(make_plan(HYBRID, **SMALL), 16, ["windows"])


def test_ends_only_keeps_what_the_end_of_a_chunk_needs() -> None:
    caches = [
        LayerCache(tag, reach, (KEY, VALUE))
        for tag, reach in (("full", Full()), ("near", Window(9)), ("far", Window(500)), ("sinks", SinkWindow(4, 8)))
    ]
    made = make_plan(ModelSpec("x", (Layer(tuple(caches)),)), "4MB", block_tokens=8)
    parts = ChunkLayout.of(made, 64, ends_only=True).groups
    assert {part.tag: (part.first_block, part.num_blocks) for part in parts} == {
        "full": (0, 8),
        "near": (7, 1),
        "far": (0, 8),
        "sinks": (0, 8),
    }


def test_groups_without_layers_on_this_rank_are_not_in_its_chunks() -> None:
    made = make_plan(HYBRID, "1MB", block_tokens=8, parallel=Parallel(pp=3, pp_rank=1))
    assert [part.tag for part in ChunkLayout.of(made, 16).groups] == ["state"]


def test_ranks_of_context_parallelism_hold_their_share_of_a_chunk() -> None:
    split = LayerCache("full", Full(), (Role("key", (2, 8), KEY.dtype),), context_split=True)
    made = make_plan(ModelSpec("x", (Layer((split,)),)), "1MB", block_tokens=8, parallel=Parallel(cp=2))
    assert ChunkLayout.of(made, 64).groups[0].num_blocks == 4
    with pytest.raises(BadCopy, match="span 16 tokens; take 32"):
        ChunkLayout.of(made, 24)
