"""Change detection: whether a model still computes what it computed when its pages were filled.

It runs once a request, so it must be cheap: of the weights, only a few elements are read, and numbers that a module
keeps beside its tensors are not looked at. It detects changes of:

    weights    a tensor that was replaced (its address), changed in place (torch's version counter), or changed without
               the counter (`weight.data.copy_(...)`): of up to PROBES tensors one element is compared
    adapters   those in use, merged or disabled, and their scales
    config     every field that changes results
    training   dropout is on
    hooks      the user's hooks on a module: they may change its output
    patches    a forward that replaces the one of a module's class, and buffers that are not saved (rotary frequencies)
    autocast   the dtype that torch computes in
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.integrations.model_identity import config_digest
from kvweave.integrations.transformers.rope import is_changing

PROBES = 64
"""Number of tensors of which one element is read, evenly spread over the model."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """What decides a model's results: equal versions from one `ModelChanges` mean equal results. `weights` and
    `patches` count the changes seen."""

    weights: int
    adapters: str
    config: str
    is_training: bool
    hooks: tuple[int, ...]
    autocast: str
    patches: int


class ModelChanges:
    """Detects changes of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: tuple[object, ...] = ()
        self._patched: list[object] | None = None
        self._changes = self._patches = -1
        self._version: ModelVersion | None = None
        self.on_change: Callable[[ModelVersion], None] = lambda _: None
        """Called by `version` with the first version, and with each later one that differs."""

    @property
    def config(self) -> Any:
        return self._model.config

    def version(self) -> ModelVersion:
        """The current version. Reads only the probed elements."""
        modules = modules_of(self._model)
        tensors = [tensor for module in modules for tensor in _kept(module) if tensor.numel()]
        seen = [(tensor.data_ptr(), version(tensor)) for tensor in tensors], _probe(tensors)
        if seen != self._seen:
            self._seen, self._changes = seen, self._changes + 1
        patched = list(_patches(modules))
        if patched != self._patched:
            self._patched, self._patches = patched, self._patches + 1
        training = any(module.training for module in modules)
        config, device = config_digest(self._model.config), self._model.device.type
        found = ModelVersion(
            self._changes, adapters(modules), config, training, _hooks(modules), autocast_dtype(device), self._patches
        )
        if found != self._version:
            self._version = found
            self.on_change(found)
        return found


def modules_of(model: Any) -> list[Any]:
    """All modules, as `model.modules()` but three times as fast: this runs once a request."""
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(module._modules.values())
    return list(found.values())


def _kept(module: Any) -> Iterator[torch.Tensor]:
    """The saved parameters and buffers of a module."""
    for tensor in module._parameters.values():
        if tensor is not None:
            yield tensor
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield tensor


def _patches(modules: list[Any]) -> Iterator[object]:
    for module in modules:
        forward = module.__dict__.get("forward")
        if forward is not None and not hasattr(forward, "changes_no_answer"):
            yield forward
        if module._non_persistent_buffers_set and not is_changing(module):
            for name in module._non_persistent_buffers_set:
                if (tensor := module._buffers.get(name)) is not None:
                    yield tensor.data_ptr(), version(tensor)


def _hooks(modules: list[Any]) -> tuple[int, ...]:
    """The ids of forward hooks, which torch never reuses; those excepted that change nothing."""
    with_some = (each for each in modules if each._forward_hooks or each._forward_pre_hooks)
    hooks = (hook for each in with_some for hook in (*each._forward_hooks.items(), *each._forward_pre_hooks.items()))
    return tuple(number for number, hook in hooks if not _changes_nothing(hook))


def _changes_nothing(hook: Any) -> bool:
    """Our own hooks, and those of transformers that stay once hidden states or attention weights were asked for."""
    is_ours = hasattr(getattr(hook, "__self__", None), "changes_no_answer")
    return is_ours or getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def autocast_dtype(device: str) -> str:
    """The dtype that torch computes in on a device; "" if that is the tensors' own."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)) if is_on else ""


def version(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors do not count them, and give 0."""
    return 0 if tensor.is_inference() else tensor._version


def _probe(tensors: list[torch.Tensor]) -> list[int]:
    """The bits of one element of some tensors; on a GPU all are fetched in one copy."""
    step = max(1, len(tensors) // PROBES)
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors[::step]:
            if tensor.device.type != "meta":
                with suppress(RuntimeError, NotImplementedError, TypeError):  # packed tensors may not allow it
                    middle = tensor[tuple([size // 2 for size in tensor.shape])]
                    found.setdefault((tensor.device, tensor.dtype), []).append(middle)
        return [bits for same in found.values() for bits in torch.stack(same).double().view(torch.int64).tolist()]


def adapters(modules: list[Any]) -> str:
    """The adapters in use and their settings, as reported by the layers that have them (PEFT's do)."""
    layers = [each for each in modules if "active_adapters" in vars(each) or hasattr(type(each), "active_adapters")]
    used = {_adapter(layer) for layer in layers if isinstance(layer.active_adapters, list | tuple)}
    return repr(sorted(used)) if used else ""


def _adapter(module: Any) -> tuple[Any, ...]:
    scaling = getattr(module, "scaling", None)
    scales = sorted((str(name), repr(scale)) for name, scale in scaling.items()) if isinstance(scaling, dict) else []
    merged = tuple(getattr(module, "merged_adapters", ()))
    return tuple(module.active_adapters), bool(getattr(module, "disable_adapters", False)), merged, tuple(scales)
