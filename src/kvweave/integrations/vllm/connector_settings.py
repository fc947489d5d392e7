"""The connector's settings: what `kv_connector_extra_config` may say, and what a request's `kv_transfer_params` may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvweave.errors import BadOption, UnknownName
from kvweave.integrations.engine_store import check_place

PREFIX = "kvweave."


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """One of `store` and `socket` says where KV is kept; everything else has a default."""

    store: str = ""
    """`DIR` or `DIR:SIZE`, of this engine alone, or a URL, as `open_store` has them."""
    socket: str = ""
    """The socket of a daemon (`kvweave serve`), shared by engines."""
    chunk_tokens: int = 0
    """Tokens of a stored chunk; 0: 64, or a divisor of it where blocks of states need one. Engines that share a store
    must have the same."""
    parts: int = 8
    """A multiple of every tensor-parallel degree that shall write."""
    stages: int = 0
    """Pipeline stages by which layers are stored apart: a multiple of every pipeline-parallel degree that shall write.
    0: this engine's own degree. Engines that share a store must have the same."""
    weights: str = ""
    """A name for the weights, which other engines may say, too; "": a commit where the model has one, else a digest of
    its safetensors files (`weights_digest`)."""
    tenant: str = ""
    """Of requests that name none."""
    min_load_tokens: int = 64
    """Fewer tokens are computed, never loaded."""
    save_generated: bool = False
    """Whether generated tokens are saved, too."""
    always_load: bool = False
    """Whether a hit is loaded even where computing it would be faster, by the speeds measured so far."""
    record: str = ""
    """A file for a trace of all requests, without their text (`kvweave simulate`)."""
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        check_place(self.store, self.socket)
        for name in ("chunk_tokens", "parts", "stages", "min_load_tokens", "lookup_timeout_s", "load_timeout_s"):
            if getattr(self, name) < (1 if name == "parts" else 0):
                raise BadOption(f"{name} must not be {getattr(self, name)}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ConnectorSettings:
        known = {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise UnknownName("setting of KVWeaveConnector", name, known)
            wanted = type(known[name].default)
            if not isinstance(value, wanted) and not (wanted is float and type(value) is int):
                raise BadOption(f"{name} must be of type {wanted.__name__}, got {value!r}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What one request asked for."""

    tenant: str = ""
    skip_save: bool = False
    skip_load: bool = False
    pin: bool = False
    """Keep the prompt's KV in the daemon's memory, from the end of this request on."""
    unpin: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, tenant: str) -> tuple[RequestSettings, list[str]]:
        """The settings, and a complaint for each that is not understood: a request must not stop an engine."""
        if not given:
            return cls(tenant=tenant), []
        ours = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
        kinds = {field.name: type(field.default) for field in fields(cls)}
        wrong = [name for name, value in ours.items() if not isinstance(value, kinds.get(name, type(None)))]
        good = {name: value for name, value in ours.items() if name not in wrong}
        known = ", ".join(PREFIX + name for name in kinds)
        return cls(**{"tenant": tenant, **good}), [f"{PREFIX}{name}={ours[name]!r}; known: {known}" for name in wrong]
