"""What kernels read of a layer: planes `[kernel_blocks, heads, kernel_tokens, dim]` of keys and values, as they lie.

layer keeps                      key planes             value plane
key, value                       key                    value
latent (one role), value_dim     latent                 the first value_dim columns of it
latent, rope (roles or parts)    latent, rope           latent
key alone                        key                    key, or its first value_dim columns
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kvweave.errors import BadRows, NoKernel
from kvweave.spec import DType, Role
from kvweave.tensor import LayerView, RoleView
from kvweave.tensor.quant import packed_width

READABLE = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
}


@dataclass(frozen=True, slots=True, eq=False)
class KVPlane:
    """Rows in pages; `scales` `[kernel_blocks, heads, kernel_tokens, n]`: one for each nth of 128 columns, or one."""

    tensor: torch.Tensor = field(repr=False)
    scales: torch.Tensor | None = field(default=None, repr=False)

    @property
    def dim(self) -> int:
        return int(self.tensor.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """Key columns are those of all `keys` planes, one after the other. `values` None: the first `value_dim` of them."""

    keys: tuple[KVPlane, ...]
    values: KVPlane | None
    value_dim: int

    @property
    def heads(self) -> int:
        return int(self.keys[0].tensor.shape[1])

    @property
    def key_dim(self) -> int:
        return sum(plane.dim for plane in self.keys)

    @property
    def value_plane(self) -> KVPlane:
        """Where values are read, shared with the keys or not."""
        if self.values is not None:
            return self.values
        return replace(self.keys[0], tensor=self.keys[0].tensor[..., : self.value_dim])


def paged_kv(view: LayerView, value_dim: int | None = None) -> PagedKV:
    """The planes of a layer; `NoKernel` where its rows are not plain numbers on their own boundaries."""
    check_layer(view)
    planes = [plane for name in key_roles(view) for plane in _planes(view, view.role(name))]
    values = _planes(view, view.role("value"))[0] if keeps_values(view) else None
    if values is not None:
        return PagedKV(tuple(planes), values, values.dim)
    width = value_width(view, value_dim)
    if width > planes[0].dim:
        raise NoKernel(_name(view), f"values of {width} columns lie in several planes of its keys")
    return PagedKV(tuple(planes), None, width)


def key_roles(view: LayerView) -> list[str]:
    """The roles whose rows make a key."""
    names = ["key"] if "key" in view.roles else [name for name in ("latent", "rope") if name in view.roles]
    if not names:
        raise NoKernel(_name(view), f"it keeps {', '.join(view.roles)}: neither keys nor latents")
    return names


def keeps_values(view: LayerView) -> bool:
    """Whether values are rows of their own, and no part of the keys."""
    return "value" in view.roles and view.role("value").role.alias_of is None


def row_width(role: Role) -> int:
    """Numbers of one head's row."""
    return packed_width(role) if role.parts else role.shape[-1]


def value_width(view: LayerView, value_dim: int | None) -> int:
    """Numbers of a value: of its own role, or of those that it is of its key."""
    if keeps_values(view):
        return row_width(view.role("value").role)
    first = view.role(key_roles(view)[0]).role
    nope = next((part.shape[0] for part in first.parts if part.name == "nope"), None)
    return value_dim or nope or row_width(first)


def check_layer(view: LayerView) -> None:
    """What no backend of ours reads."""
    if not view.reach.per_token:
        raise NoKernel(_name(view), "it keeps states: use read_states and write_states")
    if view.group.context_shards > 1:
        raise NoKernel(_name(view), "its context is divided among ranks")
    if any(view.role(name).role.tokens_per_row > 1 for name in key_roles(view)):
        raise NoKernel(_name(view), "several tokens share a row")


def rows_by_role(view: LayerView, keys: torch.Tensor, values: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """New rows `[tokens, heads, dim]` by the role that keeps them; latents may come without the axis of heads."""
    names = key_roles(view)
    if keeps_values(view) != (values is not None):
        raise BadRows(f"{_name(view)} keeps {', '.join(view.roles)}: give values if, and only if, it keeps them")
    shapes = [view.role(name).role.shape for name in names]
    if len(names) == 1:
        flat = len(shapes[0]) == 1 and keys.dim() == 3 and keys.shape[1] == 1
        rows = {names[0]: keys.squeeze(1) if flat else keys}
    else:
        parts = keys.split([shape[-1] for shape in shapes], dim=-1)
        rows = {name: part.reshape(len(part), *shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    return rows if values is None else {**rows, "value": values}


def _planes(view: LayerView, role: RoleView) -> list[KVPlane]:
    if not role.role.parts:
        scale = view.roles.get(f"{role.role.name}_scale")
        if role.role.dtype is DType.INT4:
            raise NoKernel(role.name, "numbers of 4 bits are read by the reference only")
        return [_plane(role, role.planes[0].tensor, scale.planes[0].tensor if scale else None)]
    found = {plane.name: plane.tensor for plane in role.planes}
    if not {"nope", "scale"} <= set(found) <= {"nope", "scale", "rope"}:
        raise NoKernel(role.name, f"packed rows of {', '.join(found)} are read by the reference only")
    latent = _plane(role, found["nope"], found["scale"].unsqueeze(2))
    return [latent, *([_plane(role, found["rope"])] if "rope" in found else [])]


def _plane(role: RoleView, rows: torch.Tensor, scales: torch.Tensor | None = None) -> KVPlane:
    """Rows `[kernel_blocks, rows, (heads,) dim]` as planes; scales `[kernel_blocks, rows, heads(, blocks)]`."""
    if rows.dtype not in READABLE or rows.stride(-1) != 1 or rows.dim() not in (3, 4) or rows.shape[-1] == 0:
        raise NoKernel(role.name, f"rows {list(rows.shape)} of {rows.dtype} with strides {rows.stride()}")
    rows = (rows if rows.dim() == 4 else rows.unsqueeze(2)).transpose(1, 2)
    if scales is None:
        return KVPlane(rows)
    if scales.dtype != torch.float32 or scales.shape[-1] == 0:
        raise NoKernel(role.name, f"scales {list(scales.shape)} of {scales.dtype}")
    scales = scales.unsqueeze(-1) if scales.dim() == 3 else scales
    return KVPlane(rows, scales.transpose(1, 2))


def _name(view: LayerView) -> str:
    return f"layer {view.layer} under tag {view.tag!r}"
