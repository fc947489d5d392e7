"""Copies of pages are batched, and yet as if made one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave.cache import Copy
from kvweave.plan import Plan
from kvweave.tensor import Arena, carry_out, zero_pages
from kvweave.tensor import page_copies as pages_module
from kvweave.tensor.page_copies import _bounds
from tests.tensor.models import lives

PLANS = lives()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def random_copies(made: Plan, rng: np.random.Generator) -> list[Copy]:
    copies = []
    for _ in range(30):
        group = made.groups[int(rng.integers(len(made.groups)))]
        first, count = group.pages_per_superpage, int(rng.integers(0, 6))
        pages = rng.integers(first, first + min(6, made.num_pages(group.tag)), (2, count)).astype(np.int32)
        copies.append(Copy(group.tag, pages[0], pages[1]))
    return copies


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slab", [1, 1 << 26])
@pytest.mark.parametrize(
    "name", ["hybrid page_major", "hybrid layer_major", "hybrid independent", "dsa fp8 layer_major"]
)
def test_copies_that_read_and_overwrite_one_another_keep_their_order(
    name: str, slab: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", slab)
    made, rng = PLANS[name], np.random.default_rng(len(name))
    with Arena(made, device) as arena, Arena(made) as twin:
        for pool in made.pools:
            noise = torch.from_numpy(rng.integers(0, 256, pool.num_bytes, np.uint8))
            arena.pool(pool.name).copy_(noise)
            twin.pool(pool.name).copy_(noise)
        copies = random_copies(made, rng)
        carry_out(arena, copies)
        for tag, src, dst in copies:
            for a, b in zip(src.tolist(), dst.tolist(), strict=True):
                twin.pages(tag)[b] = twin.pages(tag)[a].clone()
        for pool in made.pools:
            assert torch.equal(arena.pool(pool.name).cpu(), twin.pool(pool.name))


def test_copies_are_cut_only_where_they_must_be() -> None:
    def cut(src: list[int], dst: list[int], is_same: bool = True) -> list[int]:
        return _bounds(np.array(src), np.array(dst), is_same)

    assert cut([1, 2, 3], [4, 5, 6]) == [0, 3]
    assert cut([1, 4, 3], [4, 5, 6]) == [0, 1, 3], "page 4 is read after it was written"
    assert cut([4, 1], [5, 4]) == [0, 2], "page 4 is read before: all reads come first"
    assert cut([1, 2], [4, 4]) == [0, 1, 2], "the last one counts"
    assert cut([1, 4, 3], [4, 5, 6], is_same=False) == [0, 3]
    assert cut([], []) == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_many_pages_are_wiped_and_no_other(device: str) -> None:
    made = PLANS["hybrid layer_major"]
    with Arena(made, device) as arena:
        first = made.group("full").pages_per_superpage
        arena.pages("full")[first : first + 4] = 7
        zero_pages(arena, "full", [first + 2, first])
        assert [bool(arena.pages("full")[first + i].any()) for i in range(4)] == [False, True, False, True]
        zero_pages(arena, "full", [])
