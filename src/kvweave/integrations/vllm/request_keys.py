"""Keys of requests: the namespace in which their KV may be shared, and which tokens stand for pictures."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.errors import StoreError
from kvweave.integrations.vllm.connector_settings import RequestSettings
from kvweave.prefix import Span
from kvweave.store import Namespace, weights_digest


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter as a request names it."""

    name: str
    path: str


class AdapterRevisions:
    """Which weights an adapter of some name has: a digest of its files, looked at again when they change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}

    def of(self, adapter: AdapterFile) -> str:
        try:
            path = Path(adapter.path)
            stamp = max(os.stat(file).st_mtime_ns for file in (path, *path.glob("*.safetensors")))
            if (key := (adapter.path, stamp)) not in self._known:
                self._known[key] = weights_digest(path)
        except (OSError, StoreError):  # a repository's name, or files of another format
            return f"path {adapter.path}"
        return self._known[key]


class NamespaceMaker:
    """The namespaces of one engine's requests."""

    def __init__(self, model: Namespace) -> None:
        self._model, self._revisions = model, AdapterRevisions()

    def of(self, settings: RequestSettings, salt: str | None, adapter: AdapterFile | None) -> Namespace:
        named = self._model
        if settings.tenant or salt:
            named = replace(named, tenant=settings.tenant, salt=_bytes(salt or ""))
        if adapter is None:
            return named
        return replace(named, adapter=adapter.name, adapter_revision=self._revisions.of(adapter))

    def forget(self) -> None:
        """Share nothing with earlier requests: the weights have changed, and have no name."""
        self._model = replace(self._model, weights=f"changed {uuid.uuid4().hex}")


def spans_of(features: Any) -> list[Span]:
    """Where pictures and sounds begin, and the identifiers of what they show. A video and its sound may begin at the
    same token: they are one span."""
    shown = dict[int, list[bytes]]()
    for feature in features:
        shown.setdefault(int(feature.mm_position.offset), []).append(_bytes(str(feature.identifier)))
    return [Span(start, names[0] if len(names) == 1 else _together(names)) for start, names in shown.items()]


def _together(names: Sequence[bytes]) -> bytes:
    return b"".join(len(name).to_bytes(8, "little") + name for name in sorted(names))


def _bytes(text: str) -> bytes:
    """Of any text that a request may have, half a surrogate too."""
    return text.encode("utf-8", "surrogatepass")
