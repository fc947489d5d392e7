"""The identity of a model: what must be equal, beside the tokens, for stored KV to be shared between processes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvweave.errors import StoreError
from kvweave.integrations.model_identity import given_weights
from kvweave.integrations.transformers.model_changes import ModelChanges
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.spec import ModelSpec
from kvweave.store import Namespace, model_digest

log = logging.getLogger(__name__)

PROCESS = uuid.uuid4().hex
"""Identifies this process: what hooks and patches of a model do is unknown to other processes, so KV computed with them
is not shared."""


class Identity:
    """Architecture, config, weights and adapters of a model, as of the last `look`.

    `weights` names the weights (for example by a commit); without a name, all their bytes are hashed, and hashed again
    after a change of the model. A name is valid until the weights change; then they are hashed too. The path that
    a model was loaded from is not part of its identity.
    """

    def __init__(self, model: Any, spec: ModelSpec, changes: ModelChanges, weights: str | None = None) -> None:
        self._model, self._spec, self._changes = model, model_digest(spec), changes
        self._version = changes.version()
        self._weights = self._hashed() if weights is None else given_weights(weights)

    def look(self) -> None:
        """Update the identity if the model has changed."""
        before, self._version = self._version, self._changes.version()
        if before.weights != self._version.weights:
            self._weights = self._hashed()

    def _hashed(self) -> str:
        start = time.perf_counter()
        digest = weights_digest(self._model)
        log.info("hashed the weights in %.2f s; weights=NAME spares that", time.perf_counter() - start)
        return digest

    def namespace(self, prompt: Prompt) -> Namespace:
        """The namespace for prompts with the same padding, rotary frequencies and other inputs, in one namespace of
        the user's."""
        version = self._version
        hooks = (PROCESS, version.hooks, version.patches) if version.hooks or version.patches else ()
        kind = (prompt.padding, prompt.rope_range, prompt.extras, version.is_training, hooks, version.autocast)
        salt = b"" if kind == (0, (), (), False, (), "") else repr(kind).encode()
        return Namespace(self._spec, self._weights, version.config, version.adapters, text_of(prompt.name), salt)


def weights_digest(model: Any) -> str:
    """A hash of all saved parameters and buffers of a model: names, dtypes, shapes and bytes."""
    saved = model.state_dict(keep_vars=True).items()
    tensors = sorted((name, tensor) for name, tensor in saved if isinstance(tensor, torch.Tensor) and tensor.numel())
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = threads.map(lambda item: _digest(*item), tensors)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    running = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    try:
        running.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise StoreError(
            f"cannot read {name} ({tensor.dtype} on {tensor.device}) to tell the model's weights from others ({error});"
            " say what they are with weights=NAME"
        ) from error
    return running.digest()


def text_of(name: Hashable) -> str:
    """A user's namespace as text: the same in every process, and different for different namespaces."""
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
