"""Latent attention (MLA) in place.

A model with it caches a latent c and a rotary key for each token, and expands all of them to the keys K c and values
V c of its heads before it attends. Pages can be read as they are, since both are linear:

    q . (K c)  =  (K^T q) . c            sum of a_i (V c_i)  =  V (sum of a_i c_i)

For few queries this is less work, by the length of the past. For many it is more, as latents are longer than keys.
"""

from __future__ import annotations

from typing import Any

import torch

EXPANDED_TOKENS = 256
"""Forwards of more tokens than this expand latents, where they can be gathered. With the sizes of DeepSeek-V3 (latents
of 512, keys of 192, values of 128) both ways take as many operations at 170 tokens."""


class LatentProjection:
    """The queries and outputs of one attention module, as attention over its latents needs and gives them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def is_plain(self) -> bool:
        """Whether the module's projection is a product with its weight, and nothing else: no adapter, hook, bias or
        quantised weight."""
        linear = self._module.kv_b_proj
        if type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter:
            return False
        is_hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
        return linear.bias is None and not is_hooked

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, tokens, nope + rope]` as `[batch, heads, tokens, rank + rope]`."""
        nope, rope = queries.tensor_split([self._module.qk_nope_head_dim], dim=-1)
        keys, _ = self._weights()
        return torch.cat([_by_head(nope.transpose(0, 1), keys).transpose(0, 1), rope], dim=-1)

    def outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, heads, rank]` as `[batch, tokens, heads, value]`."""
        _, values = self._weights()
        return _by_head(outputs.permute(2, 0, 1, 3), values.transpose(1, 2)).permute(1, 2, 0, 3)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[heads, nope, rank]`, `[heads, value, rank]`."""
        module, weight = self._module, self._module.kv_b_proj.weight
        widths = module.qk_nope_head_dim, module.v_head_dim
        keys, values = weight.view(-1, sum(widths), weight.shape[1]).split(widths, dim=1)
        return keys, values


def _by_head(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[heads, batch, tokens, n]` times `[heads, n, m]`."""
    return torch.bmm(rows.flatten(1, 2), weights).view(*rows.shape[:3], weights.shape[2])
