"""The registered schemas: all that are in use, and others as long as there is room. Used by the event loop's thread."""

from __future__ import annotations

from collections import OrderedDict

from kvweave.errors import OverLimit
from kvweave.server.protocol import Register
from kvweave.server.registered_model import RegisteredModel, digest

MOST, MOST_BYTES = 1024, 64 << 20
"""Limits over all connections; a schema that is not in use is dropped when another needs its room."""


class ModelRegistry:
    """Registered schemas, by digest, the least recently registered first."""

    def __init__(self) -> None:
        self._models: OrderedDict[bytes, RegisteredModel] = OrderedDict()
        self._num_bytes = 0

    def take(self, request: Register) -> RegisteredModel:
        """The model of a registration, shared by equal registrations, until `release`. Raises `OverLimit` if those
        in use leave no room."""
        found = self._models.get(key := digest(request))
        if found is None:
            found = RegisteredModel(request)
            self._make_room(found.num_bytes)
            self._num_bytes += found.num_bytes
        self._models[key] = found
        self._models.move_to_end(key)
        found.users += 1
        return found

    def release(self, registered: RegisteredModel) -> None:
        registered.users -= 1

    def _make_room(self, num_bytes: int) -> None:
        idle = [key for key, each in self._models.items() if not each.users]
        while len(self._models) >= MOST or self._num_bytes + num_bytes > MOST_BYTES:
            if not idle:
                raise OverLimit(
                    f"{len(self._models)} schemas of {self._num_bytes} bytes are in use, {MOST} of {MOST_BYTES} at"
                    " most; close clients that are not needed"
                )
            self._num_bytes -= self._models.pop(idle.pop(0)).num_bytes

    def named(self, model: str | None) -> list[RegisteredModel]:
        """The registrations of a model; for None, all. Thread-safe."""
        return [registered for registered in [*self._models.values()] if model in (None, registered.model)]
