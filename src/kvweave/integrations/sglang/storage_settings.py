"""What `--hicache-storage-backend-extra-config` says to kvweave: the object under its key "kvweave"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvweave.errors import BadOption, UnknownName
from kvweave.integrations.engine_store import check_place


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """One of `store` and `socket` says where KV is kept; everything else has a default."""

    store: str = ""
    """`DIR` or `DIR:SIZE`, of an engine of one rank, or a URL, as `open_store` has them."""
    socket: str = ""
    """The socket of a daemon (`kvweave serve`), shared by ranks and engines."""
    weights: str = ""
    """A name for the weights; "": a digest of the safetensors files, where the model is a directory with some."""
    tenant: str = ""
    timeout_s: float = 10.0
    """How long a lookup, a load or a save may take."""

    def __post_init__(self) -> None:
        check_place(self.store, self.socket)
        if self.timeout_s <= 0:
            raise BadOption(f"timeout_s must be more than 0, got {self.timeout_s}")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> StorageSettings:
        extra = extra_config or {}
        if not extra.get("interface_v1"):
            raise BadOption('say "interface_v1": 1 beside "kvweave" in the extra config: pages are moved in place')
        given = extra.get("kvweave", {})
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise UnknownName("setting of KVWeaveStorage", name, known)
            if not isinstance(value, (float, int) if known[name] is float else known[name]):
                raise BadOption(f"{name} must be of type {known[name].__name__}, got {value!r}")
        return cls(**given)
