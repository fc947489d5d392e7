"""Hooks around a model's forward: they tell a past which tokens are computed, and when they are."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from kvweave.errors import BadCall, BadTokens
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.support import Served

COMPILED = (
    "a past of kvweave cannot be followed through compiled code: call the model inside, which is `weave.model`, or"
    " `weave.generate`"
)


class ForwardHooks:
    """Hooks for the pasts of one memory, which they do not keep alive.

    A copy of them does nothing: a copy of a model, or one that was saved and loaded, is a model without pages.
    """

    changes_no_answer = True
    """Says to a `ModelWatch` that these hooks are not the user's."""

    def __init__(self, memory: PagedMemory | None = None, served: Served | None = None) -> None:
        self._memory = weakref.ref(memory) if memory else _nobody
        self._cache_name = served.cache_name if served else ""

    def __reduce__(self) -> Any:
        return ForwardHooks, ()

    def register(self, models: list[Any]) -> list[Any]:
        """Put them on a model and on those around it; whichever is called first begins the step."""
        handles = []
        for model in models:
            handles.append(model.register_forward_pre_hook(self.before, with_kwargs=True))
            handles.append(model.register_forward_hook(self.after, with_kwargs=True, always_call=True))
        return handles

    def before(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
        """Begin a step, if the model is called with a past of ours; its inputs are then given by name."""
        if not any(isinstance(given, PagedCache) for given in (*args, *options.values())):
            return None
        if torch.compiler.is_compiling() or "_orig_mod" in module._modules:
            raise BadCall(COMPILED)
        named = {**dict(zip(_names(module, len(args)), args, strict=False)), **options}
        past = self._own(named)
        if past is None or past.computed_by is not None:
            return None
        ids = named.get("input_ids")
        if ids is None:
            raise BadTokens("a past of kvweave needs input_ids: tokens are what a prefix is found by")
        if named.get("use_cache") is False:
            raise BadCall("a past of kvweave was given with use_cache=False: leave one of them out")
        named["use_cache"] = True
        if past.expects_prompts and ids.shape[1] > past.columns:
            named = self._without(past.columns, ids, named)
        past.begin(named, module)
        return (), named

    def after(self, module: Any, _args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """End the step that this module's call began; without an output, it has failed."""
        past = self._own(options)
        if past is not None and past.computed_by is module:
            if output is None:
                past.fail()
            else:
                past.finish()

    def _own(self, options: dict[str, Any]) -> PagedCache | None:
        """The past of a call, if it is of this memory."""
        past = options.get(self._cache_name)
        return past if isinstance(past, PagedCache) and past.memory is self._memory() else None

    def _without(self, length: int, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """A first call with whole prompts, as some ways to generate make it: only what comes after `length` is new."""
        changed = {**options, "input_ids": ids[:, length:]}
        for name in ("position_ids", "token_type_ids"):
            if changed.get(name) is not None and changed[name].shape[-1] == ids.shape[1]:
                changed[name] = changed[name][..., length:]
        if self._cache_name != "past_key_values":
            changed["attention_mask"] = None
        return changed


def _names(module: Any, count: int) -> list[str]:
    """What a module calls its first inputs."""
    return ["input_ids"] if count < 2 else list(inspect.signature(module.forward).parameters)


def _nobody() -> None:
    return None
