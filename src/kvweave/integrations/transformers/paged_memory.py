"""What all caches of one model share: the core, the arena, and the functions that make cache layers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from kvweave.cache import Cache, Sequence
from kvweave.integrations.transformers.attention_interface import SwitchedConfigs
from kvweave.integrations.transformers.core_lock import CoreLock
from kvweave.integrations.transformers.latents import EXPANDED_TOKENS
from kvweave.integrations.transformers.model_changes import ModelChanges
from kvweave.integrations.transformers.paged_forward import LayerAttention
from kvweave.integrations.transformers.rope import LengthRope
from kvweave.tensor import Arena

MakeLayer = Callable[[Any], Any]
"""Makes a layer for a cache."""


@dataclass(frozen=True, eq=False)
class PagedMemory:
    """The memory of one model; used by the thread that holds `core_lock`."""

    core: Cache
    arena: Arena
    make_layers: SequenceOf[MakeLayer]
    core_lock: CoreLock
    rope: LengthRope
    model_changes: ModelChanges
    attention: SequenceOf[LayerAttention]
    """Of each layer with keys and values; empty for models some of whose layers never attend in place."""
    switched: SwitchedConfigs

    @cached_property
    def device_type(self) -> str:
        return str(self.arena.memory.device.type)

    @cached_property
    def keeps_tokens(self) -> bool:
        """Whether there is anything but states."""
        return len(self.state_tags) < len(self.core.plan.groups)

    @cached_property
    def state_tags(self) -> tuple[str, ...]:
        return tuple(group.tag for group in self.core.plan.groups if not group.cache.reach.per_token)

    @property
    def attends_in_place(self) -> bool:
        """Whether the attention of every layer, if there is any, reads pages where they lie; if not, rows are gathered
        for some."""
        if not self.keeps_tokens:
            return True
        return bool(self.attention) and all(layer.attends(True) and layer.attends(False) for layer in self.attention)

    def expands(self, num_tokens: int) -> bool:
        """Whether a forward of `num_tokens` tokens expands latents, if they can be gathered."""
        return num_tokens > EXPANDED_TOKENS and any(layer.projection for layer in self.attention)


class RowSaver(Protocol):
    """Saves rows of a cache to a store: told when rows reach the end of a chunk, and before they are closed."""

    num_loaded: int
    save_seconds: float

    def due(self, sequences: SequenceOf[Sequence]) -> list[Sequence]: ...
    def capture_answers(self, due: SequenceOf[Sequence], num_rows: int) -> None: ...
    def save(self, sequences: SequenceOf[Sequence]) -> None: ...
