"""Inside vLLM: `kv_connector="KVWeaveConnector"`, `kv_connector_module_path="kvweave.integrations.vllm"`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvweave.errors import MissingExtra

__all__ = ["KVWeaveConnector", "KVWeaveTier"]
_MODULES = {"KVWeaveConnector": "connector", "KVWeaveTier": "offloading_tier"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with MissingExtra.on_import("kvweave inside vLLM", "vllm"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
