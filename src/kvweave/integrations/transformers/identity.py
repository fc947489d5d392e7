"""Who computed it: what must be equal, beside the tokens, for what one process stored to be used by another."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvweave.errors import StoreError
from kvweave.spec import ModelSpec
from kvweave.store import Namespace, model_digest

log = logging.getLogger(__name__)

BESIDE_THE_POINT = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Of a config: where it came from and how it was loaded. Dtypes are in the weights, and in the key of every row."""


class Identity:
    """The architecture, the config, the weights and the adapters of a model, as they were when last looked at.

    `weights` names the weights (a commit, say); without it every byte of them is hashed, once, and again whenever a
    tensor was changed or replaced since. Where a model came from is no part of it.
    """

    def __init__(self, model: Any, spec: ModelSpec, weights: str | None = None) -> None:
        self._model, self._is_given = model, weights is not None
        self._spec, self._weights = model_digest(spec), f"given {weights}"
        self._seen: list[tuple[int, int]] = []
        self.look()

    def look(self) -> None:
        """See whether the model is still the one it was."""
        self._config, self._adapter = config_digest(self._model.config), active_adapters(self._model)
        if self._is_given:
            return
        seen = [(tensor.data_ptr(), _version(tensor)) for tensor in _tensors(self._model).values()]
        if seen != self._seen:
            start = time.perf_counter()
            self._weights, self._seen = weights_digest(self._model), seen
            log.info("hashed the weights in %.2f s; weights=NAME spares that", time.perf_counter() - start)

    def namespace(self, name: Hashable, padding: int = 0) -> Namespace:
        """For prompts of the user's namespace `name`, whose first `padding` tokens are padding that layers count."""
        salt = padding.to_bytes(8, "little") if padding else b""
        return Namespace(self._spec, self._weights, self._config, self._adapter, text_of(name), salt)


def weights_digest(model: Any) -> str:
    """A hash of every parameter and buffer that is saved with a model: name, dtype, shape and bytes."""
    tensors = sorted(_tensors(model).items())
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = threads.map(lambda item: _digest(*item), tensors)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    running = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    try:
        running.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise StoreError(
            f"cannot read {name} ({tensor.dtype} on {tensor.device}) to tell the model's weights from others ({error});"
            " say what they are with weights=NAME"
        ) from error
    return running.digest()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    tensors = model.state_dict(keep_vars=True).items()
    return {name: tensor for name, tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel()}


def _version(tensor: torch.Tensor) -> int:
    """Grows with every change in place; tensors made for inference alone do not count theirs."""
    return 0 if tensor.is_inference() else tensor._version


def config_digest(config: Any) -> str:
    facts = json.dumps(_facts(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()


def _facts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _facts(inner) for name, inner in value.items() if name not in BESIDE_THE_POINT}
    return value


def active_adapters(model: Any) -> str:
    """Which adapters are in use, as the layers that have them say; those of PEFT do."""
    used = {
        (tuple(module.active_adapters), bool(getattr(module, "disable_adapters", False)))
        for module in model.modules()
        if isinstance(getattr(module, "active_adapters", None), list | tuple)
    }
    return repr(sorted(used)) if used else ""


def text_of(name: Hashable) -> str:
    """A namespace as text that is the same in every process, and that no other namespace has."""
    if isinstance(name, str):
        return name
    if not _is_plain(name):
        raise StoreError(
            f"a namespace of a store is text, bytes, numbers, None, or tuples of these, so that it means the same in"
            f" every process; got {type(name).__name__}"
        )
    return "\0" + repr(name)


def _is_plain(name: object) -> bool:
    return (
        all(map(_is_plain, name)) if type(name) is tuple else type(name) in (str, bytes, int, float, bool, type(None))
    )
