"""Inside SGLang: a storage backend of HiCache, by `module_path="kvweave.integrations.sglang"`, `KVWeaveStorage`."""

from __future__ import annotations

from typing import Any

from kvweave.errors import MissingExtra

__all__ = ["KVWeaveStorage"]


def __getattr__(name: str) -> Any:
    if name != "KVWeaveStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvweave.integrations.sglang.hicache_storage import KVWeaveStorage  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtra("kvweave inside SGLang", "sglang", error.name) from error
    return KVWeaveStorage
