"""States by slot: a recurrent layer's rows, read and written where its pages are. A state's slot is its page.

Rows that pad a batch may have slot 0: the NULL page, which no sequence owns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvweave.errors import BadRows
from kvweave.pool import NULL
from kvweave.tensor import LayerView, RoleView

LARGE_BYTES = 16 << 10
"""On a CPU, rows from here on are copied one by one, each as one run: torch's index copy goes number by number."""


def read_states(view: LayerView, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states at `slots` int64 `[n]` as `[n, *shape]`, by role. Copies; nothing waits for a device."""
    return {name: _pages(role, slots).index_select(0, slots) for name, role in view.roles.items()}


def write_states(view: LayerView, states: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
    """Write states `[n, *shape]` by role at `slots`; roles that are not given stay as they are."""
    wanted = [(view.role(name), rows) for name, rows in states.items()]
    for role, rows in wanted:
        pages, shape = _pages(role, slots), (len(slots), *role.role.shape)
        if rows.shape != shape or rows.dtype != pages.dtype:
            raise BadRows(f"{role.name} takes states {list(shape)} {pages.dtype}, not {list(rows.shape)} {rows.dtype}")
    for role, rows in wanted:
        write_pages(role.tensor, rows, slots)


def write_pages(pages: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> None:
    """`pages[slots] = states`, the fastest way."""
    if pages.is_cpu and pages[0].numel() * pages.element_size() >= LARGE_BYTES:
        for page, state in zip(slots.tolist(), states, strict=True):
            pages[page].copy_(state)
    else:
        pages.index_copy_(0, slots, states)


def _pages(role: RoleView, slots: torch.Tensor) -> torch.Tensor:
    """The pages of a role, once the slots are known to be there; slots on a GPU are not looked at."""
    pages = role.tensor
    if role.group.cache.reach.per_token:
        raise BadRows(f"{role.name} keeps tokens, not states: attend to them")
    if slots.device.type == "cpu" and len(slots) and not NULL <= int(slots.min()) <= int(slots.max()) < len(pages):
        raise BadRows(f"slots {slots.tolist()} are not all among the {len(pages)} of {role.name}")
    return pages
