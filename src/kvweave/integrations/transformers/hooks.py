"""Hooks around a model's forward: they tell a paged cache which tokens are being computed, and when they are done."""

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
    "a cache of kvweave does not work through compiled code: call the model inside, which is `weave.model`, or"
    " `weave.generate`"
)


class ForwardHooks:
    """Hooks for the caches of one memory, to which they hold a weak reference.

    A copy of the hooks does nothing: a copy of a model, or one that was saved and loaded, has no pages.
    """

    changes_no_answer = True
    """Marks these hooks for `ModelChanges`, which otherwise takes hooks for the user's."""

    def __init__(self, memory: PagedMemory | None = None, served: Served | None = None) -> None:
        self._memory = weakref.ref(memory) if memory else _nobody
        self._cache_name = served.cache_name if served else ""

    def __reduce__(self) -> Any:
        return ForwardHooks, ()

    def register(self, models: list[Any]) -> list[Any]:
        """Register them on a model and its wrappers; the outermost one that is called begins the step."""
        handles = []
        for model in models:
            handles.append(model.register_forward_pre_hook(self.before, with_kwargs=True))
            handles.append(model.register_forward_hook(self.after, with_kwargs=True, always_call=True))
        return handles

    def before(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
        """Begin a step if the model is called with a paged cache; its inputs are then passed by name."""
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
            raise BadTokens("a cache of kvweave needs input_ids: prefixes are found by tokens")
        if named.get("use_cache") is False:
            raise BadCall("a cache of kvweave was given with use_cache=False: leave one of them out")
        named["use_cache"] = True
        if past.is_repeated_by(ids):
            named = self._without(past.columns, ids, named)
        past.begin(named, module)
        return (), named

    def after(self, module: Any, _args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """End the step that this module's call began; without an output, the step has failed."""
        past = self._own(options)
        if past is not None and past.computed_by is module:
            if output is None:
                past.fail()
            else:
                past.finish()

    def _own(self, options: dict[str, Any]) -> PagedCache | None:
        """The cache of a call, if it belongs to this memory."""
        past = options.get(self._cache_name)
        return past if isinstance(past, PagedCache) and past.memory is self._memory() else None

    def _without(self, length: int, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a first call with whole prompts, as some generation modes make it, without the first
        `length` tokens."""
        changed = {**options, "input_ids": ids[:, length:]}
        for name in ("position_ids", "token_type_ids"):
            if changed.get(name) is not None and changed[name].shape[-1] == ids.shape[1]:
                changed[name] = changed[name][..., length:]
        if self._cache_name != "past_key_values":
            changed["attention_mask"] = None
        return changed


def _names(module: Any, count: int) -> list[str]:
    """The names of a module's first inputs."""
    return ["input_ids"] if count < 2 else list(inspect.signature(module.forward).parameters)


def _nobody() -> None:
    return None
