"""What a layer's attention does beside the products: scale, reach, softcap, sink logits, causality."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvweave.errors import NoKernel
from kvweave.spec import Reach
from kvweave.spec.reach import Positions

FAR = 1 << 30
"""More tokens than any sequence has."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """How one layer attends. `reach` None is the layer cache's own; `scale` None is 1 / sqrt(key width).

    `softcap` c turns a score s into c * tanh(s / c). `sink_logits` (gpt-oss), one a query head, join the sum of the
    softmax and stand for no value. `value_dim`: the value is so many of the first numbers of the key (MLA); None is the
    value role, or the latent part of the row. `causal` False: a query also sees the later tokens of its step.
    """

    scale: float | None = None
    reach: Reach | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = field(default=None, repr=False)
    value_dim: int | None = None
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Band:
    """A reach as three numbers, which kernels compute with. The query at position p sees, up to itself,

    the tokens before `head`, and those from tail(p) = max(0, floor((p - back) / step) * step) on.
    """

    head: int
    back: int
    step: int

    @classmethod
    def of(cls, reach: Reach) -> Band:
        """Found by asking the reach, so that a new kind needs nothing here as long as three numbers describe it."""
        tokens = (reach.span or FAR) - reach.head
        probes = np.concatenate([np.arange(512), *(tokens * n + np.arange(-1, 2) for n in range(1, 4))])
        positions = probes[probes < FAR]
        for band in (cls(reach.head, tokens - 1, 1), cls(reach.head, 0, tokens)):
            if reach.per_token and np.array_equal(reach.tail(positions), band.tail(positions)):
                return band
        raise NoKernel(f"a reach of kind {reach.kind!r}", "its tail is neither a window's nor a chunk's")

    def tail(self, position: Positions) -> Positions:
        tail: Positions = np.maximum((position - self.back) // self.step * self.step, 0)
        return tail
