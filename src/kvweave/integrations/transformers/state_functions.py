"""The functions of transformers' models that take one token into a state, replaced by those in C for forwards on pages.

The modules of several families define them, word for word the same. Ours are called in their stead by forwards whose
attention reads pages in place, where tensors are float32 on a CPU; the model's own by all others. States are
updated where they lie: in their page, if a batch has one row.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from kvweave.attention.state_rules import causal_convolution, gated_delta_rule
from kvweave.integrations.transformers.paged_forward import running

Function = Callable[..., Any]


class ReplacedFunctions:
    """Those in the modules of one model, until `remove`; calling it twice is fine."""

    _lock = threading.Lock()
    _users: Counter[tuple[str, str]] = Counter()
    """Models that are served, by module and name."""

    def __init__(self, model: Any) -> None:
        modules = {type(each).__module__ for each in model.modules()}
        self._places = [(module, name) for module in modules for name in REPLACED if hasattr(sys.modules[module], name)]
        with self._lock:
            for place in self._places:
                self._users[place] += 1
                if self._users[place] == 1:
                    own = getattr(sys.modules[place[0]], place[1])
                    setattr(sys.modules[place[0]], place[1], REPLACED[place[1]](own))

    def remove(self) -> None:
        with self._lock:
            while self._places:
                place = self._places.pop()
                self._users[place] -= 1
                if not self._users[place]:
                    del self._users[place]
                    module = sys.modules[place[0]]
                    setattr(module, place[1], getattr(module, place[1]).__wrapped__)


def _is_ours() -> bool:
    return not torch.compiler.is_compiling() and running() is not None


def _delta_rule(own: Function) -> Function:
    @wraps(own)
    def recurrent_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = None
        if initial_state is not None and output_final_state and _is_ours():
            out = gated_delta_rule(query, key, value, g, beta, initial_state, normalises=use_qk_l2norm_in_kernel)
        if out is not None:
            return out, initial_state
        how = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        outputs: tuple[torch.Tensor, torch.Tensor | None] = own(
            query, key, value, g=g, beta=beta, initial_state=initial_state, **how, **options
        )
        return outputs

    return recurrent_gated_delta_rule


def _convolution(own: Function) -> Function:
    @wraps(own)
    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        out = None
        if activation in (None, "silu") and _is_ours():
            has_silu = activation is not None
            out = causal_convolution(hidden_states, conv_state, weight, bias, has_silu=has_silu)
        if out is None:
            out = own(hidden_states, conv_state, weight, bias, activation)
        return out

    return causal_conv1d_update


REPLACED: dict[str, Callable[[Function], Function]] = {
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "causal_conv1d_update": _convolution,
}
"""What stands for a function of this name."""
