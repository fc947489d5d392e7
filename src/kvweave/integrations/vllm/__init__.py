"""Inside vLLM: `kv_connector="KVWeaveConnector"`, `kv_connector_module_path="kvweave.integrations.vllm"`."""

from __future__ import annotations

from typing import Any

from kvweave.errors import MissingExtra

__all__ = ["KVWeaveConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVWeaveConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvweave.integrations.vllm.connector import KVWeaveConnector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra("the connector for vLLM", "vllm", error.name) from error
    return KVWeaveConnector
