"""Layers of every kind in pages full of random numbers, and random steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import make_plan
from kvweave.attention import AttentionOptions, Step, open_attention
from kvweave.attention.reference import ReferenceAttention
from kvweave.plan import Layout, PoolRequest
from kvweave.spec import DType, Full, Reach
from kvweave.tensor import GQA, MLA, Arena, LayerRequest, LayerView, Recurrent, assemble, write_tokens
from kvweave.tensor.quant import packed_width

EVERY_BYTE = 0xFF
"""A NaN in every float type, fp8 too."""


@dataclass(frozen=True)
class Kind:
    """What a layer keeps, and the query heads over it."""

    heads: int = 8
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int | None = None
    dtype: str = "float32"
    quant: str = "auto"
    latent: tuple[int, int] | None = None
    reach: Reach = Full()  # noqa: RUF009  (frozen)


class World:
    """One layer of a kind beside others, so that its pages have strides of a pool; `pages` of them."""

    def __init__(
        self,
        kind: Kind,
        pages: int = 40,
        block_tokens: int = 32,
        kernel_tokens: int = 16,
        layout: Layout = Layout.PAGE_MAJOR,
        *,
        device: str = "cpu",
        alone: bool = True,
        seed: int = 0,
    ) -> None:
        self.kind, self.device = kind, device
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        request = {"heads": kind.kv_heads, "key_dim": kind.key_dim, "value_dim": kind.value_dim}
        how: dict[str, Any] = {**request, "dtype": DType.parse(kind.dtype), "quant": kind.quant, "reach": kind.reach}
        backend = GQA() if kind.latent is None else MLA(*kind.latent)
        layers: list[Any] = [(backend, LayerRequest(number, **how)) for number in range(2)]
        if not alone:
            layers.append((Recurrent((4, 16, 16)), LayerRequest(2, dtype=DType.parse(kind.dtype))))
        spec = assemble("world", layers)
        tag = kind.reach.kind if kind.latent is None else "latent"
        wishes: dict[str, Any] = {"own_pools": {tag: PoolRequest(pages=pages)}} if alone else {}
        plan = make_plan(spec, "64MB", layout=layout, block_tokens=block_tokens, kernel_tokens=kernel_tokens, **wishes)
        self.arena = Arena(plan, device)
        self.view: LayerView = self.arena.layer(1)
        self.pages = min(pages, plan.num_pages(self.view.tag))
        self.fill()

    @property
    def first_page(self) -> int:
        return self.view.group.pages_per_superpage

    def rows(self, count: int) -> dict[str, torch.Tensor]:
        """Random rows of each role that is not made of others."""
        made = {}
        for name, role in self.view.roles.items():
            if not name.endswith("_scale"):
                shape = (packed_width(role.role),) if role.role.parts else role.role.shape
                made[name] = torch.randn(count, *shape, device=self.device)
        return made

    def fill(self) -> None:
        """Numbers in all pages, and NaN in the NULL page."""
        tokens = self.view.block_tokens
        for page in range(self.first_page, self.first_page + self.pages):
            write_tokens(self.view, page * tokens + np.arange(tokens), self.rows(tokens))
        self.poison(np.zeros(0, np.int64), only_null=True)

    def poison(self, slots: np.ndarray, only_null: bool = False) -> None:
        """NaN everywhere but at `slots`."""
        view = self.view
        for role in view.roles.values():
            for plane in role.planes:
                rows = plane.tensor.view(torch.uint8) if plane.tensor.dtype.itemsize == 1 else plane.tensor
                value = EVERY_BYTE if rows.dtype == torch.uint8 else torch.nan
                if only_null:
                    rows[0] = value
                    continue
                gone = np.ones(rows.shape[0] * rows.shape[1], bool)
                gone[slots] = False
                blocks, offsets = np.divmod(np.flatnonzero(gone), rows.shape[1])
                rows[torch.from_numpy(blocks).to(self.device), torch.from_numpy(offsets).to(self.device)] = value

    def step(self, lengths: Sequence[int], counts: Sequence[int], nulls: float = 0.0, spare: int = 1) -> Step:
        """Rows over random pages, which they share by chance; `nulls`: so many of their kernel blocks are NULL."""
        view = self.view
        size, split = view.kernel_tokens, view.group.kernel_blocks
        width = -(-max(lengths, default=0) // view.block_tokens) + spare
        pages = self.random.integers(self.first_page, self.first_page + self.pages, (len(lengths), width))
        table = (pages[:, :, None] * split + np.arange(split)).reshape(len(lengths), -1).astype(np.int32)
        table[self.random.random(table.shape) < nulls] = 0
        used = np.arange(table.shape[1])[None] * size < np.array(lengths)[:, None]
        table[~used] = 0
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return Step(
            there(starts), there(np.array(lengths, np.int32)), {view.tag: there(table)}, {}, max(counts, default=0)
        )

    def queries(self, step: Step, dtype: torch.dtype | None = None) -> torch.Tensor:
        reference = ReferenceAttention(self.view, AttentionOptions())
        shape = int(step.query_starts[-1]), self.kind.heads, reference.key_dim
        return torch.randn(shape, device=self.device).to(dtype or getattr(torch, self.kind.dtype))

    def seen(self, step: Step, options: AttentionOptions) -> np.ndarray:
        """The slots that any row sees."""
        reference = ReferenceAttention(self.view, options)
        size, found = self.view.kernel_tokens, []
        table, starts = step.tables[self.view.tag], step.query_starts.tolist()
        for row, length in enumerate(step.lengths.tolist()):
            seen = reference._seen(starts[row + 1] - starts[row], table[row], length).any(0).nonzero().squeeze(1)
            found.append(table[row][seen // size].long() * size + seen % size)
        slots: np.ndarray = torch.cat(found).unique().cpu().numpy()
        return slots


def wanted(world: World, queries: torch.Tensor, step: Step, options: AttentionOptions) -> torch.Tensor:
    return open_attention(world.view, options, "reference").attend(queries, step)
