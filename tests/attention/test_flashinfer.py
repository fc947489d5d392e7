"""FlashInfer's kernels keep the contract on a GPU where they are installed; what is ours of it, everywhere.

On a CPU a stand-in with FlashInfer's calls computes what these promise, so that our plans of a step are compared with
the reference in every run of the tests.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.attention import Attention, AttentionOptions, open_attention
from kvweave.attention.flashinfer_attention import FlashInferAttention, page_lists
from kvweave.errors import BadRows, MissingExtra, NoKernel
from kvweave.spec import Chunk, SinkWindow, Window
from tests.attention.contract import KINDS, MIXED, REACHES, AttentionContract, close
from tests.attention.worlds import Kind, World, wanted

PLAIN = Kind(dtype="bfloat16")


class StandIn:
    """`BatchPrefillWithPagedKVCacheWrapper`, row by row in float64."""

    planned = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (kv_layout, backend in ("fa2", "auto")) == ("NHD", True)

    def plan(self, *what: Any, **how: Any) -> None:
        type(self).planned += 1
        self._starts, self._page_starts, self._pages, self._last = (each.tolist() for each in what[:4])
        self._heads, self._kv_heads, self._dim, self._tokens = what[4:]
        self._how = how

    def run(self, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        assert queries.dtype == out.dtype == self._how["q_data_type"]
        assert queries.shape[1:] == (self._heads, self._dim)
        for row, last in enumerate(self._last):
            mine = slice(self._starts[row], self._starts[row + 1])
            of_row = self._pages[self._page_starts[row] : self._page_starts[row + 1]]
            length = (len(of_row) - 1) * self._tokens + last
            keys, values = (plane[of_row].flatten(0, 1)[:length].double() for plane in pages)
            out[mine] = self._row(queries[mine].double(), keys, values).to(out.dtype)

    def _row(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group, how = self._heads // self._kv_heads, self._how
        keys, values = (rows.repeat_interleave(group, 1) for rows in (keys, values))
        scores = torch.einsum("qhd,thd->hqt", queries, keys) * how["sm_scale"]
        if cap := how["logits_soft_cap"]:
            scores = torch.tanh(scores / cap) * cap
        tokens = torch.arange(len(keys))
        positions = torch.arange(len(keys) - len(queries), len(keys))[:, None]
        seen = tokens <= positions if how["causal"] else torch.ones_like(tokens + positions, dtype=torch.bool)
        if how["window_left"] >= 0:
            seen &= tokens >= positions - how["window_left"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqt,thd->qhd", weights, values)


class OnStandIn(FlashInferAttention):
    devices = ("cpu",)


class FlashInferContract(AttentionContract):
    """What FlashInfer cannot is refused, and then there is nothing to compare."""

    backend = "flashinfer"
    plain = PLAIN

    def world(self, kind: Kind, *how: Any, **more: Any) -> World:
        """Layers in float32 become layers in bfloat16."""
        return super().world(replace(kind, dtype="bfloat16") if kind.dtype == "float32" else kind, *how, **more)

    def open(self, world: World, options: AttentionOptions) -> Attention:
        try:
            return self.opened(world, options)
        except NoKernel as error:
            pytest.skip(str(error))

    def opened(self, world: World, options: AttentionOptions) -> Attention:
        return super().open(world, options)

    def test_blocks_that_are_null_are_seen_by_nobody(self) -> None:
        """But refused where a query would see them; a window's are left behind it."""
        world = self.world(self.plain)
        with pytest.raises(NoKernel, match=r"row \d cannot be .*: its block \d+ is NULL, and seen"):
            self.same(world, *MIXED, nulls=0.4)
        for counts in (MIXED[1], [1] * 7):
            step = world.step(MIXED[0], counts)
            (table,) = step.tables.values()
            for row, (length, count) in enumerate(zip(MIXED[0], counts, strict=True)):
                table[row, : max(0, length - count - 19) // 16] = 0
            queries, options = world.queries(step), AttentionOptions(reach=Window(20))
            close(self.open(world, options).attend(queries, step), wanted(world, queries, step, options))

    @pytest.mark.parametrize("kind", ["bfloat16"])
    @pytest.mark.parametrize("reach", ["full", "window"])
    def test_poison_outside_the_reach_of_a_row_does_not_change_a_bit(self, kind: str, reach: str) -> None:
        """In pages of which no token is seen, and behind the last token of a row."""
        world = self.world(KINDS[kind], pages=80)
        options = AttentionOptions(reach=REACHES[reach])
        for counts in (MIXED[1], [1] * 7):
            world.fill()
            step = world.step(MIXED[0], counts)
            queries, attention = world.queries(step), self.open(world, options)
            before = attention.attend(queries, step)
            seen = world.seen(step, options)
            if reach != "full":
                seen = np.unique(seen // 16)[:, None] * 16 + np.arange(16)
            world.poison(seen.ravel())
            after = attention.attend(queries, step)
            assert not after.isnan().any()
            assert torch.equal(before, after)

    def test_layers_alike_share_the_plan_of_a_step_until_its_numbers_change(self) -> None:
        world = self.world(self.plain)
        one, other = (self.opened(world, AttentionOptions()) for _ in range(2))
        assert isinstance(one, FlashInferAttention)
        assert isinstance(other, FlashInferAttention)
        step = world.step(*MIXED)
        queries = world.queries(step)
        assert one.plan(queries, step) is other.plan(queries, step)
        made_of = one.plan(queries, step)._made_of
        assert other.plan(queries, step)._made_of is made_of
        step.lengths[1] = 17
        close(other.attend(queries, step), wanted(world, queries, step, AttentionOptions()))
        assert other.plan(queries, step)._made_of is not made_of
        third = world.step([70, 1, 64, 40, 0, 300, 9], MIXED[1])
        close(one.attend(queries, third), wanted(world, queries, third, AttentionOptions()))
        close(other.attend(queries, step), wanted(world, queries, step, AttentionOptions()))

    def test_steps_made_without_versions_are_planned_each_time(self) -> None:
        world = self.world(self.plain)
        with torch.inference_mode():
            step = world.step(*MIXED)
            queries, attention = world.queries(step), self.opened(world, AttentionOptions())
            for length in (70, 3):
                step.lengths[1] = length
                close(attention.attend(queries, step), wanted(world, queries, step, AttentionOptions()))

    @pytest.mark.parametrize(
        ("kind", "how", "reason"),
        [
            (Kind(), {}, "pages of torch.float32"),
            (Kind(dtype="bfloat16", quant="fp8"), {}, "pages of torch.float8_e4m3fn"),
            (Kind(dtype="bfloat16", quant="int8"), {}, "pages of torch.int8"),
            (replace(PLAIN, key_dim=80), {}, "keys of 80 and values of 80 numbers"),
            (replace(PLAIN, key_dim=128, value_dim=64), {}, "keys of 128 and values of 64 numbers"),
            (Kind(heads=16, latent=(64, 64), dtype="bfloat16"), {}, "latents"),
            (replace(PLAIN, reach=Chunk(48)), {}, "neither chunks nor"),
            (PLAIN, {"reach": SinkWindow(4, 32)}, "nor first tokens that stay"),
            (PLAIN, {"sink_logits": torch.zeros(8)}, "no sink logits"),
        ],
        ids=str,
    )
    def test_layers_that_it_cannot_attend_to_are_refused_with_the_reason(
        self, kind: Kind, how: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(NoKernel, match=reason):
            self.opened(World(kind, device=self.device), AttentionOptions(**how))

    def test_queries_of_another_type_are_refused(self) -> None:
        world = self.world(self.plain)
        step = world.step(*MIXED)
        with pytest.raises(BadRows, match="queries of torch.float16 over pages of torch.bfloat16"):
            self.opened(world, AttentionOptions()).attend(world.queries(step, torch.float16), step)


class TestOurPart(FlashInferContract):
    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn)
        monkeypatch.setitem(sys.modules, "flashinfer", module)

    def opened(self, world: World, options: AttentionOptions) -> Attention:
        return OnStandIn(world.view, options)

    def test_a_step_is_planned_once_for_all_layers(self) -> None:
        world = self.world(self.plain)
        step = world.step(*MIXED)
        queries, before = world.queries(step), StandIn.planned
        for _ in range(5):
            self.opened(world, AttentionOptions(scale=0.125)).attend(queries, step)
        assert StandIn.planned == before + 1

    def test_it_computes_on_gpus_alone(self) -> None:
        with pytest.raises(NoKernel, match="its pages are on cpu"):
            open_attention(self.world(self.plain).view, backend="flashinfer")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestFlashInfer(FlashInferContract):
    device = "cuda"

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("flashinfer")

    def test_a_captured_step_is_refused(self) -> None:
        world = self.world(self.plain)
        step = world.step([40, 20], [1, 1])
        queries, attention = world.queries(step), self.opened(world, AttentionOptions())
        attention.attend(queries, step)
        torch.cuda.synchronize()
        with pytest.raises(NoKernel, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attention.attend(queries, step)


def test_without_flashinfer_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingExtra, match=r"needs flashinfer: pip install 'kvweave\[flashinfer\]'"):
        OnStandIn(World(PLAIN).view, AttentionOptions())


def test_pages_before_a_window_are_not_listed() -> None:
    table = np.arange(1, 25, dtype=np.int32).reshape(3, 8)
    lists = page_lists(np.array([0, 1, 5, 6], np.int32), np.array([29, 26, 0], np.int32), table, 4, window=9)
    assert lists.pages.tolist() == [5, 6, 7, 8, 12, 13, 14, 15, 0]
    assert lists.page_starts.tolist() == [0, 4, 8, 9]
    assert lists.last_tokens.tolist() == [1, 2, 1]
    assert lists.padding == [(5, 6)]
