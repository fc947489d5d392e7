"""The attention and mask functions that transformers calls while a model runs on pages.

For each attention implementation there is one of ours under the name `kvweave+<name>`. It reads pages in place for
keys and values of a paged cache, and calls the other one for everything else. A model's config names it only while a
forward with a paged cache runs.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvweave.integrations.transformers.paged_forward import running
from kvweave.spec import Chunk, Full, Reach, Window

PREFIX = "kvweave+"
FIELD = "_attn_implementation_internal"
EAGER = "eager_attention_forward"


class SwitchedConfigs:
    """The configs that the attention layers of a model read their implementation from, switched while forwards run.

    Their fields are read and written directly: a config's own ways take longer than the rest of a decode's preparation.
    """

    _lock = threading.Lock()
    _users: Counter[int] = Counter()
    """Forwards that run with a config, by the id of its fields: several KVWeaves may share a model."""

    def __init__(self, model: Any) -> None:
        layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "config")]
        fields = (vars(layer.config) for layer in layers if _can_switch(layer))
        self._fields = {id(each): each for each in fields}

    def enter(self) -> None:
        with self._lock:
            for config, fields in self._fields.items():
                self._users[config] += 1
                if not fields[FIELD].startswith(PREFIX):
                    fields[FIELD] = _registered(fields[FIELD])

    def leave(self) -> None:
        with self._lock:
            for config, fields in self._fields.items():
                self._users[config] -= 1
                if not self._users[config]:
                    del self._users[config]
                    fields[FIELD] = fields[FIELD].removeprefix(PREFIX)


def _can_switch(module: Any) -> bool:
    """Whether the module's own attention can be called where pages do not serve."""
    name = getattr(module.config, "_attn_implementation", None)
    return isinstance(name, str) and (name != "eager" or hasattr(sys.modules[type(module).__module__], EAGER))


def _registered(name: str) -> str:
    ours = PREFIX + name
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ours, partial(_attention, name))
        if name in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(ours, partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[name]))
    return ours


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    name: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    forward = running()
    handed = forward.find(key, value) if forward else None
    if forward and handed and not forward.is_learning:
        return forward.attend(handed, query, attention_mask, options), None
    outputs: tuple[torch.Tensor, Any] = _own(name, module)(module, query, key, value, attention_mask, **options)
    if forward and handed:
        forward.judge(handed, query, attention_mask, options, outputs[0])
    return outputs


def _own(name: str, module: Any) -> Callable[..., Any]:
    """The attention function that the model would call by itself."""
    source = sys.modules[type(module).__module__]
    if name == "eager":
        eager: Callable[..., Any] = getattr(source, EAGER)
        return eager
    found: Callable[..., Any] = getattr(source, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)[name]
    return found


def _mask(own: Callable[..., Any], **arguments: Any) -> torch.Tensor | None:
    """The mask that the model's own implementation makes, unless all layers attend in place: then none."""
    forward = running()
    reach = reach_of(arguments["mask_function"]) if forward else None
    if forward and reach is None:
        forward.give_up()
    if forward and forward.is_useful and not forward.needs_masks:
        return None
    if forward and forward.is_learning:
        arguments["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = own(**arguments)
    if forward and reach is not None:
        forward.note_mask(mask, reach)
    return mask


def reach_of(mask_function: Callable[..., Any]) -> Reach | None:
    """What a mask function of transformers lets tokens see; None if that is no reach."""
    if mask_function is causal_mask_function:
        return Full()
    kind, facts = _closure(mask_function)
    if kind != "and_masks" or causal_mask_function not in facts["mask_functions"]:
        return None
    others = [part for part in facts["mask_functions"] if part is not causal_mask_function]
    kind, facts = _closure(others[0]) if len(others) == 1 else ("", {})
    if kind == "sliding_window_overlay":
        return Window(max(1, facts["sliding_window"]))  # some make a mask of no tokens, and do not use it
    return Chunk(facts["chunk_size"]) if kind == "chunked_overlay" else None


def _closure(function: Any) -> tuple[str, dict[str, Any]]:
    """The name of the function that made this one, and the values that it was made with."""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code else ()
    values = (cell.cell_contents for cell in function.__closure__ or ()) if code else ()
    return getattr(function, "__qualname__", "").partition(".")[0], dict(zip(names, values, strict=True))
