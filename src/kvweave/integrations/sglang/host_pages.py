"""Pages of SGLang's host pools as bytes. Which bytes a page has, its pool says: every kind and layout is alike here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvweave.errors import CannotServe
from kvweave.integrations.keyed_pages import KeyedPool
from kvweave.store import Shard, Sink, Source
from kvweave.store.keys import Bytes


class HostPages:
    """The pages of one host pool."""

    def __init__(self, name: str, pool: Any, rank: str) -> None:
        """`rank` says whose share of a page this is; "" where all ranks have the same."""
        try:
            page = pool.get_data_page(0, flat=True)
        except (NotImplementedError, AttributeError, ValueError) as error:
            layout = getattr(pool, "layout", None)
            raise CannotServe(
                f"host pool {name!r} ({type(pool).__name__}, {layout})", f"no flat pages: {error}"
            ) from error
        self._pool, self._dtype, self.page_tokens = pool, page.dtype, pool.page_size or 1
        facts = [type(pool).__name__, pool.layout, str(page.dtype), f"page {self.page_tokens}", rank]
        facts += [pool.storage_format_tag] if pool.storage_format_tag else []
        self.kind = KeyedPool(name, page.numel() * page.element_size(), " ".join(filter(None, facts)))

    def first_tokens(self, num_pages: int, host_indices: Any) -> Sequence[int] | None:
        """Where pages begin in the pool; None: these are not that many pages."""
        if host_indices is None or host_indices.numel() != num_pages * self.page_tokens:
            return None
        first: list[int] = host_indices[:: self.page_tokens].tolist()
        return first

    def source(self, first: Sequence[int]) -> Source:
        def read(shard: Shard, page: int) -> Bytes:  # noqa: ARG001 - there is one
            own = self._pool.get_data_page(first[page], flat=False).clone(memory_format=torch.contiguous_format)
            flat: Bytes = own.view(torch.uint8).reshape(-1).numpy()
            flat.flags.writeable = False
            return flat

        return read

    def sink(self, first: Sequence[int]) -> Sink:
        def write(shard: Shard, page: int, payload: Bytes) -> None:  # noqa: ARG001
            flat = torch.from_numpy(np.array(payload)).view(self._dtype)
            self._pool.set_from_flat_data_page(first[page], flat)

        return write


def shared_rank(config: Any, name: str) -> str:
    """Whose share a rank's pages are, by SGLang's own rule: latents are the same on all ranks, everything else is
    split by tensor-parallel rank; layers by pipeline, tokens by context rank."""
    ranks: Mapping[str, tuple[int, int]] = {
        "tp": (0, 1) if config.is_mla_model and name != "mamba" else (config.tp_rank, config.tp_size),
        "pp": (config.pp_rank, config.pp_size),
        "cp": (config.attn_cp_rank, config.attn_cp_size),
    }
    return " ".join(f"{axis} {rank} of {size}" for axis, (rank, size) in ranks.items() if size > 1)
