"""Names of a model's config and weights that every engine computes alike, so that they share what they store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvweave.store import weights_digest

IGNORED_CONFIG_FIELDS = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Config fields that do not change results: origin and loading. The dtype is that of the weights, and part of every
shard's key."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary settings whose frequencies depend on the longest sequence that an engine allows."""


def config_digest(config: Any) -> str:
    """A hash of every field of a transformers config that changes results."""
    return hashlib.sha256(_text(config).encode()).hexdigest()


def depends_on_length(config: Any) -> bool:
    return any(kind in _text(config) for kind in BY_LENGTH)


def _text(config: Any) -> str:
    return json.dumps(_facts(config.to_dict()), sort_keys=True, default=str)


def _facts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _facts(inner) for name, inner in value.items() if name not in IGNORED_CONFIG_FIELDS}
    return value


def weights_name(path: str, revision: str | None, given: str) -> str:
    """The name that was given, else a commit, else a digest of the checkpoint's files: `given_weights` of it. Raises
    `StoreError` where there is none."""
    return given_weights(given or revision or weights_digest(path))


def given_weights(name: str) -> str:
    return f"given {name}"
