"""The arena: memory for the pools of a plan. One allocation a pool, whose address never changes, so that CUDA graphs
may capture it."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch

from kvweave.errors import ArenaClosed, UnknownName
from kvweave.plan import Place, Plan
from kvweave.tensor.layer import LayerView, layer_view
from kvweave.tensor.memory import Buffer, Memory
from kvweave.tensor.names import ordered


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool's memory: the place that the plan asked for, the place it was allocated in, and the device."""

    name: str
    num_bytes: int
    asked: Place
    given: Place
    device: str


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena holds; nothing after `close`."""

    pools: tuple[PoolMemory, ...]

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools)


class Arena:
    """Memory for all pools of a plan, and the views of its layers. It deals in roles and bytes, and does not know
    attention kinds.

    `memory` is a device ("cpu", "cuda"), or a `Memory` shared with other arenas. All or nothing: if one pool cannot be
    allocated, none is kept. All pools start as zeros.
    """

    def __init__(self, plan: Plan, memory: Memory | str = "cpu") -> None:
        self.plan = plan
        self.memory = memory if isinstance(memory, Memory) else Memory(memory)
        self._buffers: dict[str, Buffer] = {}
        self._layers: dict[tuple[int, str | None], LayerView] = {}
        self._closed = False
        try:
            untouched = 0  # host memory promised to earlier pools still counts as available until it is first written
            for pool in plan.pools:
                where = f"pool {pool.name!r}"
                self.memory.check(untouched + pool.num_bytes, pool.place, where)
                self._buffers[pool.name] = self.memory.take(pool.num_bytes, pool.place, where)
                untouched += pool.num_bytes if self._buffers[pool.name].tensor.device.type == "cpu" else 0
        except BaseException:
            self.close()
            raise

    # ---- views

    def layer(self, layer: int, tag: str | None = None) -> LayerView:
        """The view of a layer; the same object every time. `tag` chooses a cache where the layer has several."""
        self._check_open()
        if (layer, tag) not in self._layers:
            self._layers[layer, tag] = layer_view(self.plan, self.pool, self._where, layer, tag)
        return self._layers[layer, tag]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name, in the contract's order: by layer, then role priority."""
        shown = [self.layer(view.layer, view.tag).role(view.role) for view in ordered(self.plan)]
        return {view.name: view.tensor for view in shown}

    def pool(self, name: str) -> torch.Tensor:
        """A pool's bytes."""
        self._check_open()
        if name not in self._buffers:
            raise UnknownName("pool", name, self._buffers)
        return self._buffers[name].tensor

    def pages(self, tag: str) -> torch.Tensor:
        """A group's pages as bytes, `[pages, lanes, page_stride]`; in page-major pools a page is one run."""
        group = self.plan.group(tag)
        pool = self.plan.pool(group.pool)
        shape = (pool.num_superpages * group.pages_per_superpage, pool.lanes, group.page_stride)
        strides = (group.page_stride, pool.num_superpages * pool.superpage_bytes, 1)
        return torch.as_strided(self.pool(pool.name), shape, strides)

    # ---- stats, and the end

    @property
    def is_closed(self) -> bool:
        return self._closed

    def stats(self) -> ArenaStats:
        return ArenaStats(
            tuple(
                PoolMemory(name, buffer.tensor.numel(), buffer.asked, buffer.given, str(buffer.tensor.device))
                for name, buffer in self._buffers.items()
            )
        )

    def close(self) -> None:
        """Free all memory; calling it twice is fine. Tensors that others still hold keep their bytes alive."""
        self._closed = True
        self._layers.clear()
        while self._buffers:
            self.memory.release(self._buffers.popitem()[1])

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _where(self, pool: str) -> str:
        buffer = self._buffers[pool]
        return str(buffer.tensor.device if buffer.asked is Place.DEVICE else buffer.asked)

    def _check_open(self) -> None:
        if self._closed:
            raise ArenaClosed("this arena is closed: its memory was freed")
