"""What attention must do, whichever kernels carry it out: the class that each backend's tests inherit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.attention import Attention, AttentionOptions, open_attention
from kvweave.attention.base import packed
from kvweave.errors import BadRows, NoKernel, UnknownName
from kvweave.plan import Layout
from kvweave.spec import Chunk, Full, Reach, SinkWindow, Window
from tests.attention.worlds import Kind, World, wanted

MIXED = ([1, 70, 300, 33, 0, 129, 64], [1, 1, 37, 33, 1, 1, 2])
"""Lengths and new tokens: decodes beside chunks, whole prompts, and a row of padding."""
REACHES: dict[str, Reach] = {
    "full": Full(),
    "window": Window(40),
    "window of one": Window(1),
    "chunk": Chunk(48),
    "sinks": SinkWindow(5, 40),
    "sinks far": SinkWindow(70, 17),
}
KINDS = {
    "gqa": Kind(),
    "mha": Kind(heads=4, kv_heads=4),
    "mqa": Kind(heads=12, kv_heads=1),
    "head of 80": Kind(key_dim=80),
    "head of 96": Kind(key_dim=96),
    "head of 20": Kind(key_dim=20),
    "unequal widths": Kind(key_dim=96, value_dim=64),
    "narrow keys": Kind(key_dim=32, value_dim=80),
    "bfloat16": Kind(dtype="bfloat16"),
    "float16": Kind(dtype="float16"),
    "fp8": Kind(quant="fp8", dtype="bfloat16"),
    "fp8_e5m2": Kind(quant="fp8_e5m2", dtype="bfloat16"),
    "fp8 with scales": Kind(quant="fp8_token_head", dtype="bfloat16"),
    "fp8 in blocks": Kind(quant="fp8_block", key_dim=160, value_dim=144, dtype="bfloat16"),
    "int8": Kind(quant="int8", dtype="bfloat16"),
    "int8 and float32": Kind(quant="int8", key_dim=48),
    "latent": Kind(heads=16, latent=(64, 32)),
    "latent, bfloat16": Kind(heads=16, latent=(128, 64), dtype="bfloat16"),
    "latent, fp8, one scale": Kind(heads=16, latent=(128, 32), dtype="bfloat16", quant="fp8"),
    "latent, fp8": Kind(heads=16, latent=(256, 64), dtype="bfloat16", quant="fp8"),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest output: rounding of weights and outputs to the dtype."""


def close(found: torch.Tensor, right: torch.Tensor, tolerance: float = 0.0) -> None:
    assert found.shape == right.shape
    assert found.dtype == right.dtype
    largest = right.float().abs().amax().clamp(min=1e-3)
    error = ((found.float() - right.float()).abs().amax() / largest).item()
    assert error <= (tolerance or TOLERANCE[right.dtype]), f"off by {error:.2e} of the largest output"


class AttentionContract:
    backend: str
    device = "cpu"
    plain = Kind()
    """The layer of tests that are not about kinds of layers."""

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.plain.dtype)
        return found

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def world(self, kind: Kind, *how: Any, **more: Any) -> World:
        return World(kind, *how, device=self.device, **more)

    def open(self, world: World, options: AttentionOptions) -> Attention:
        return open_attention(world.view, options, self.backend)

    def options(self, world: World, **how: Any) -> AttentionOptions:
        """MLA's values are told by the options where the page does not."""
        latent = world.kind.latent
        return AttentionOptions(value_dim=latent[0] if latent else None, **how)

    def same(self, world: World, lengths: list[int], counts: list[int], nulls: float = 0.0, **how: Any) -> None:
        step, options = world.step(lengths, counts, nulls), self.options(world, **how)
        queries = world.queries(step)
        found = self.open(world, options).attend(queries, step)
        close(found, wanted(world, queries, step, options))

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
    def test_a_mixed_step_over_layers_of_every_kind(self, kind: Kind) -> None:
        self.same(self.world(kind), *MIXED)

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
    def test_a_step_of_decodes_over_layers_of_every_kind(self, kind: Kind) -> None:
        self.same(self.world(kind), [700, 1, 64, 65, 0], [1] * 5)

    @pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
    @pytest.mark.parametrize("counts", [MIXED[1], [1] * 7], ids=["mixed", "decodes"])
    def test_every_reach(self, reach: Reach, counts: list[int]) -> None:
        self.same(self.world(replace(self.plain, reach=reach)), MIXED[0], counts)

    @pytest.mark.parametrize("counts", [MIXED[1], [1] * 7], ids=["mixed", "decodes"])
    @pytest.mark.parametrize(
        "how",
        [
            {"scale": 0.3},
            {"softcap": 2.0},
            {"softcap": 30.0, "scale": 1.0, "reach": Window(50)},
            {"sink_logits": torch.linspace(-2, 4, 8)},
            {"sink_logits": torch.linspace(-2, 4, 8), "reach": Window(20), "softcap": 5.0},
            {"causal": False},
            {"causal": False, "reach": Window(20)},
        ],
        ids=" ".join,
    )
    def test_every_option(self, how: dict[str, Any], counts: list[int]) -> None:
        how = {name: value.to(self.device) if name == "sink_logits" else value for name, value in how.items()}
        self.same(self.world(self.plain), MIXED[0], counts, **how)

    def test_scores_that_are_far_apart_overflow_nothing(self) -> None:
        """The largest of a row may be in any tile and any split, hundreds above those before it."""
        world, options = self.world(self.plain), AttentionOptions(scale=15.0)
        step = world.step([900, 1200, 300], [1, 1, 40])
        queries = world.queries(step)
        found = self.open(world, options).attend(queries, step)
        close(found, wanted(world, queries, step, options), tolerance=max(2e-3, TOLERANCE[self.dtype]))

    @pytest.mark.parametrize("layout", Layout)
    @pytest.mark.parametrize(
        ("block_tokens", "kernel_tokens"), [(16, 16), (64, 32), (8, 4), (1, 1), (48, 48), (24, 12)]
    )
    def test_pages_of_any_size_and_layout_in_a_pool_shared_with_states(
        self, layout: Layout, block_tokens: int, kernel_tokens: int
    ) -> None:
        world = self.world(self.plain, 400, block_tokens, kernel_tokens, layout, alone=False)
        self.same(world, [90, 1, 200, 50], [1, 1, 30, 50])

    def test_blocks_that_are_null_are_seen_by_nobody(self) -> None:
        world = self.world(self.plain)
        self.same(world, *MIXED, nulls=0.4)
        self.same(world, [200, 300, 17], [1, 1, 1], nulls=0.4)
        self.same(world, [200, 300, 17], [1, 3, 1], nulls=1.0)

    @pytest.mark.parametrize("kind", ["gqa", "bfloat16", "fp8 with scales", "int8", "latent", "latent, fp8"])
    @pytest.mark.parametrize("reach", ["full", "window", "chunk", "sinks"])
    def test_poison_outside_the_reach_of_a_row_does_not_change_a_bit(self, kind: str, reach: str) -> None:
        world = self.world(KINDS[kind], pages=80)
        options = self.options(world, reach=REACHES[reach])
        for counts in (MIXED[1], [1] * 7):
            world.fill()
            step = world.step(MIXED[0], counts, nulls=0.1)
            queries = world.queries(step)
            attention = self.open(world, options)
            before = attention.attend(queries, step)
            world.poison(world.seen(step, options))
            after = attention.attend(queries, step)
            assert not after.isnan().any()
            assert torch.equal(before, after)

    def test_a_row_alone_is_what_it_is_in_a_batch(self) -> None:
        world = self.world(self.plain)
        step = world.step([300, 90, 41], [20, 1, 41])
        queries = world.queries(step)
        attention = self.open(world, AttentionOptions())
        together = attention.attend(queries, step)
        (table,) = step.tables.values()
        starts = step.query_starts.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            alone = replace(
                step,
                query_starts=(step.query_starts[row : row + 2] - first).contiguous(),
                lengths=step.lengths[row : row + 1],
                tables={world.view.tag: table[row : row + 1]},
                max_queries=last - first,
            )
            close(attention.attend(queries[first:last], alone), together[first:last])

    def test_outputs_go_where_the_caller_wants_them_and_queries_may_be_strided(self) -> None:
        world = self.world(self.plain)
        step = world.step(*MIXED)
        queries = world.queries(step)
        wide = torch.cat([queries, queries], dim=1)[:, :8]
        out = torch.full((len(queries), 8, 64), torch.nan, device=self.device, dtype=self.dtype)
        attention = self.open(world, AttentionOptions())
        assert attention.attend(wide, step, out) is out
        assert torch.equal(out, attention.attend(queries, step))

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
    def test_rows_are_written_as_the_layer_keeps_them(self, kind: Kind) -> None:
        world = self.world(kind)
        attention = self.open(world, self.options(world))
        tokens = np.array([self.slot(world, 3), -1, self.slot(world, 70), self.slot(world, 4)])
        rows = world.rows(4)
        dtype = torch.float32 if kind.quant != "auto" else getattr(torch, kind.dtype)
        keys, values = next(iter(rows.values())).to(dtype), rows.get("value")
        attention.write(keys, None if values is None else values.to(dtype), torch.from_numpy(tokens).to(self.device))
        found = snapshot(world)
        reference = open_attention(world.view, self.options(world), "reference")
        world.fill()
        before = snapshot(world)
        reference.write(keys, None if values is None else values.to(dtype), torch.from_numpy(tokens).to(self.device))
        right = snapshot(world)
        kept = tokens[tokens >= 0]
        for name in right:
            rows_found, rows_right = (rows_at(planes[name], kept) for planes in (found, right))
            assert not torch.equal(rows_at(before[name], kept), rows_right), name
            if kind.quant == "auto" or self.device == "cpu":
                assert torch.equal(rows_found, rows_right), name
            elif rows_right.dtype == torch.float32:  # on a GPU torch divides by a number as it multiplies by another
                assert torch.allclose(rows_found, rows_right, rtol=1e-6), name
            else:
                assert (rows_found != rows_right).float().mean() < 0.02, name

    def slot(self, world: World, token: int) -> int:
        return world.first_page * world.view.block_tokens + token

    def test_new_rows_are_seen_at_once(self) -> None:
        world = self.world(self.plain)
        attention = self.open(world, AttentionOptions())
        step = world.step([40, 20], [1, 20])
        (table,) = step.tables.values()
        positions = [(0, 39), *((1, token) for token in range(20))]
        slots = torch.tensor([int(table[row, token // 16]) * 16 + token % 16 for row, token in positions])
        keys, values, queries = (self.random(21, heads, 64) for heads in (2, 2, 8))
        before = attention.attend(queries, step)
        attention.write(keys, values, slots.to(self.device))
        after = attention.attend(queries, step)
        close(after, wanted(world, queries, step, AttentionOptions()))
        assert not torch.allclose(before, after)

    @pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 9), (3, 1), (3, 9)])
    def test_a_batch_as_models_give_it_is_the_same_rows_packed(self, rows: int, count: int) -> None:
        world = self.world(self.plain)
        attention = self.open(world, AttentionOptions())
        for is_strided in (False, True, False):  # layouts change from call to call
            step = world.step([40] * rows, [count] * rows)
            table = 2 * world.first_page + torch.arange(3 * rows, dtype=torch.int32, device=self.device).view(rows, 3)
            step = replace(step, tables={world.view.tag: table})
            positions = torch.arange(40 - count, 40, device=self.device)
            slots = (table[:, positions // 16].long() * 16 + positions % 16).flatten()
            keys, values, queries = (self.random(rows, count, heads, 64).transpose(1, 2) for heads in (2, 2, 8))
            if not is_strided:
                keys, values, queries = (tensor.contiguous() for tensor in (keys, values, queries))
            attention.write_batch(keys, values, slots)
            found = attention.attend_batch(queries, step)
            assert found.shape == (rows, count, 8, 64)
            attention.write(packed(keys), packed(values), slots)
            close(found.flatten(0, 1), wanted(world, packed(queries), step, AttentionOptions()))

    def test_what_does_not_fit_is_refused(self) -> None:
        world = self.world(self.plain)
        attention = self.open(world, AttentionOptions())
        step = world.step([40, 20], [1, 20])
        good = world.queries(step)
        with pytest.raises(BadRows, match=r"queries \[21, 8, 63\] for keys of 2 heads of 64 numbers"):
            attention.attend(good[:, :, :63], step)
        with pytest.raises(BadRows, match="7, 64"):
            attention.attend(good[:, :7], step)
        with pytest.raises(BadRows, match="out is"):
            attention.attend(good, step, good.new_empty(21, 8, 63))
        with pytest.raises(UnknownName, match="unknown tag of the step 'full'"):
            attention.attend(good, replace(step, tables={}))
        batch = good[None].transpose(1, 2)
        assert attention.attend_batch(batch, step).shape == (1, 21, 8, 64)
        with pytest.raises(UnknownName, match="unknown tag of the step 'full'"):
            attention.attend_batch(batch, replace(step, tables={}))
        with pytest.raises(BadRows, match="7, 64"):
            attention.attend_batch(batch[:, :7], step)
        with pytest.raises(BadRows, match="give values"):
            attention.write(good[:, :2], None, torch.zeros(21, dtype=torch.int64, device=self.device))
        with pytest.raises(NoKernel, match="states"):
            other = self.world(self.plain, alone=False)
            open_attention(other.arena.layer(2), None, self.backend)


def snapshot(world: World) -> dict[str, torch.Tensor]:
    return {
        f"{role.name} {plane.name}": plane.tensor.view(whole_or_float(plane.tensor.dtype)).clone()
        for role in world.view.roles.values()
        for plane in role.planes
    }


def whole_or_float(dtype: torch.dtype) -> torch.dtype:
    """What can be compared and indexed on every device."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def rows_at(plane: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    return plane.flatten(0, 1)[torch.from_numpy(slots).to(plane.device)]
