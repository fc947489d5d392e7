"""Functions of transformers' models that are replaced for forwards on pages.

Those that take one token into a state, by ours (`state_rules`). The modules of several families define them; one is
replaced if it is seen to compute the same. Ours are then called by forwards whose attention reads pages in place; the
model's own by all others, and for tensors that ours do not take. States are updated where they lie: in their page, if a
batch has one row, or the cache has said where the pages are.

And the methods that expand latents (MLA): those that are attended to in place stay as they are.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from itertools import product
from typing import Any

import torch

from kvweave.attention.state_rules import causal_convolution, gated_delta_rule, selective_state
from kvweave.integrations.transformers.latents import LatentProjection
from kvweave.integrations.transformers.paged_forward import running

Function = Callable[..., Any]


class ReplacedFunctions:
    """Those in the modules and classes of one model, until `remove`; calling it twice is fine."""

    _lock = threading.Lock()
    _users: Counter[tuple[Any, str]] = Counter()
    """Models that are served, by module or class, and name."""

    def __init__(self, model: Any) -> None:
        self._places: list[tuple[Any, str]] = []
        classes = {base for each in model.modules() for base in type(each).__mro__}
        modules = {sys.modules[each.__module__] for each in classes}
        with self._lock, torch.no_grad():
            for place in product([*classes, *modules], REPLACED):
                self._replace(place, model.device)

    def _replace(self, place: tuple[Any, str], device: torch.device) -> None:
        where, name = place
        if place not in self._users:
            (wrap, agrees), own = REPLACED[name], vars(where).get(name)
            if own is None or not agrees(own, device):
                return
            setattr(where, name, wrap(own))
        self._users[place] += 1
        self._places.append(place)

    def remove(self) -> None:
        with self._lock:
            while self._places:
                place = self._places.pop()
                self._users[place] -= 1
                if not self._users[place]:
                    del self._users[place]
                    where, name = place
                    setattr(where, name, vars(where)[name].__wrapped__)


def _for_pages(own: Function, ours: Function) -> Function:
    """A function that is `ours` in forwards whose attention reads pages in place, for compilers a call of which they
    know nothing; else the model's own."""
    uncompiled = torch.compiler.disable(ours)

    @wraps(own)
    def function(*given: Any, **named: Any) -> Any:
        if running() is None:
            return own(*given, **named)
        return (uncompiled if torch.compiler.is_compiling() else ours)(*given, **named)

    return function


def _delta_rule(own: Function) -> Function:
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
        forward, out = running(), None
        if forward and initial_state is not None and output_final_state:
            states, slots = forward.states_of(initial_state)
            out = gated_delta_rule(query, key, value, g, beta, states, slots, normalises=use_qk_l2norm_in_kernel)
        if out is not None:
            return out, initial_state
        how = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        outputs: tuple[torch.Tensor, torch.Tensor | None] = own(
            query, key, value, g=g, beta=beta, initial_state=initial_state, **how, **options
        )
        return outputs

    return _for_pages(own, recurrent_gated_delta_rule)


def _convolution(own: Function) -> Function:
    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        forward, out = running(), None
        if forward and activation in (None, "silu"):
            states, slots = forward.states_of(conv_state)
            has_silu = activation is not None
            out = causal_convolution(hidden_states, states, weight, bias, slots, has_silu=has_silu)
        if out is None:
            out = own(hidden_states, conv_state, weight, bias, activation)
        return out

    return _for_pages(own, causal_conv1d_update)


def _selection(own: Function) -> Function:
    def selective_state_update(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        forward, out = running(), None
        if forward:
            states, slots = forward.states_of(state)
            given = hidden_states, dt, A, B, C, D, dt_bias, z
            out = selective_state(states, *given, slots, has_softplus=dt_softplus)
        if out is None:
            out = own(state, hidden_states, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **options)
        return out

    return _for_pages(own, selective_state_update)


def _expansion(own: Function) -> Function:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def expand_on_pages(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        forward = running()
        handed = forward.find(kv_nope, k_rot) if forward else None
        if forward and handed and not forward.is_learning:
            return kv_nope, k_rot
        keys, values = own(module, kv_nope, k_rot)
        if forward and handed:
            forward.note_expansion(handed, LatentProjection(module), keys, values)
        return keys, values

    @wraps(own)
    def expand_kv(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        return (own if running() is None else expand_on_pages)(module, kv_nope, k_rot)

    return expand_kv


def _delta_rule_agrees(own: Function, device: torch.device, by_key: bool = False) -> bool:
    """Whether both make the same of a few random numbers; `by_key`: every key has a decay of its own."""
    random = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 1, 3, 4, generator=random).to(device)
    decays = -torch.rand(*((2, 1, 3, 4) if by_key else (2, 1, 3)), generator=random).to(device)
    betas = torch.rand(2, 1, 3, generator=random).to(device)
    states = torch.randn(2, 3, 4, 4, generator=random).to(device)
    how: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with suppress(Exception):  # whatever it is, it is not what it was
        right = own(queries, keys, values, g=decays, beta=betas, initial_state=states.clone(), **how)
        out = gated_delta_rule(queries, keys, values, decays, betas, states, normalises=True)
        return out is not None and _are_close(right, (out, states))
    return False


def _convolution_agrees(own: Function, device: torch.device) -> bool:
    random = torch.Generator().manual_seed(0)
    shapes = (2, 3, 1), (2, 3, 4), (3, 4), (3,)
    new, states, weights, bias = (torch.randn(shape, generator=random).to(device) for shape in shapes)
    with suppress(Exception):
        after = states.clone()
        right = own(new, after, weights, bias, "silu")
        out = causal_convolution(new, states, weights, bias, has_silu=True)
        return out is not None and _are_close((right, after), (out, states))
    return False


def _selection_agrees(own: Function, device: torch.device) -> bool:
    """With one of the two shapes, with heads and without."""
    random = torch.Generator().manual_seed(0)
    for sizes in ((2, 4, 3, 16), (2, 5, 16)):
        states = torch.randn(sizes, generator=random).to(device)
        inputs, steps, gates = torch.randn(3, *sizes[:-1], generator=random).to(device)
        rates = -torch.rand(sizes[1:], generator=random).to(device)
        groups = (2, 2, 16) if len(sizes) == 4 else (2, 16)
        ins, outs = torch.randn(2, *groups, generator=random).to(device)
        skips, biases = torch.randn(2, *sizes[1:-1], generator=random).to(device)
        with suppress(Exception):
            after, how = states.clone(), {"dt_bias": biases, "z": gates, "dt_softplus": True}
            right = own(after, inputs, steps, rates, ins, outs, skips, **how)
            given = inputs, steps, rates, ins, outs, skips, biases, gates
            out = selective_state(states, *given, has_softplus=True)
            if out is not None and _are_close((right, after), (out, states)):
                return True
    return False


def _are_close(right: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(right, found, strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, atol=1e-5) for one, other in pairs)


REPLACED: dict[str, tuple[Callable[[Function], Function], Callable[[Function, torch.device], bool]]] = {
    "torch_recurrent_gated_delta_rule": (_delta_rule, _delta_rule_agrees),
    "causal_conv1d_update": (_convolution, _convolution_agrees),
    "recurrent_kimi_delta_attention": (_delta_rule, partial(_delta_rule_agrees, by_key=True)),
    "mamba_selective_state_update": (_selection, _selection_agrees),
    "mamba2_selective_state_update": (_selection, _selection_agrees),
    "expand_kv": (_expansion, lambda *_: True),  # attention itself is compared, layer by layer
}
"""What stands for a function of this name, and whether it may."""
