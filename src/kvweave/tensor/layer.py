"""Layer views: what a layer keeps, as zero-copy tensors over its pool.

keys, values   [kernel_blocks, heads, kernel_tokens, dim]      both at once: kv [kernel_blocks, 2, heads, ...]
latents        [kernel_blocks, kernel_tokens, dim]
states         [pages, ...]
packed rows    [kernel_blocks, kernel_tokens, row_bytes] as bytes, planar ones [kernel_blocks, bytes]; parts beside
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvweave.errors import PlanError, UnknownName
from kvweave.plan import Group, Plan, View
from kvweave.spec import DType, Reach, Role
from kvweave.tensor.names import tensor_name
from kvweave.tensor.torch_dtypes import torch_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One field of a role's rows as `[kernel_blocks, rows, *shape]`; only packed roles have more than one.

    If elements are not aligned to their size, `tensor` is of bytes and has one more axis.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    tensor: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RoleView:
    """One role of one layer. Kernels read `tensor`; `planes` are its rows in logical order, for writing."""

    name: str
    layer: int
    role: Role
    group: Group
    cp_rank: int
    tensor: torch.Tensor = field(repr=False)
    planes: tuple[Plane, ...]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The fields of a packed row by name: values, scales."""
        return {plane.name: plane.tensor for plane in self.planes} if self.role.parts else {}

    @property
    def rows_per_block(self) -> int:
        return self.group.num_rows(self.role)

    @property
    def num_slots(self) -> int:
        """Number of slots: tokens of all pages; of a state, pages."""
        return int(self.planes[0].tensor.shape[0]) * self.rows_per_block * self.role.tokens_per_row


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """What a layer sees under one tag: its own cache, or that of the layer it reads. Roles are in the contract's
    order."""

    layer: int
    group: Group
    roles: Mapping[str, RoleView]

    def __getitem__(self, role: str) -> torch.Tensor:
        return self.role(role).tensor

    def role(self, name: str) -> RoleView:
        if name not in self.roles:
            raise UnknownName(f"role of layer {self.layer} under tag {self.tag!r}", name, self.roles)
        return self.roles[name]

    @property
    def tag(self) -> str:
        return self.group.tag

    @property
    def reach(self) -> Reach:
        return self.group.cache.reach

    @property
    def block_tokens(self) -> int:
        return self.group.block_tokens

    @property
    def kernel_tokens(self) -> int:
        return self.group.kernel_tokens

    @property
    def dtypes(self) -> dict[str, DType]:
        return {name: view.role.dtype for name, view in self.roles.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(view.name for view in self.roles.values())

    @property
    def kv(self) -> torch.Tensor | None:
        """Keys and values as `[kernel_blocks, 2, heads, kernel_tokens, dim]`; None if their shapes differ or they are
        not adjacent."""
        key, value = self.roles.get("key"), self.roles.get("value")
        if key is None or value is None or not _side_by_side(key, value):
            return None
        tensor = key.tensor
        apart = value.tensor.storage_offset() - tensor.storage_offset()
        shape, strides = tensor.shape, tensor.stride()
        both = tensor.as_strided((shape[0], 2, *shape[1:]), (strides[0], apart, *strides[1:]))
        return both.movedim(2 + key.role.token_axis, -2)


def _side_by_side(key: RoleView, value: RoleView) -> bool:
    same = (key.layer, key.role.shape, key.role.dtype, key.role.token_axis, key.role.tokens_per_row)
    if same != (value.layer, value.role.shape, value.role.dtype, value.role.token_axis, value.role.tokens_per_row):
        return False
    own = not (key.role.parts or key.role.alias_of or value.role.alias_of)
    return own and len(key.role.shape) == 2 and key.group.cache.reach.per_token


def layer_view(
    plan: Plan, bytes_of: Callable[[str], torch.Tensor], where: Callable[[str], str], layer: int, tag: str | None
) -> LayerView:
    """The view of a layer over the pools' bytes; `where` names the device in tensor names."""
    tag = _tag_of(plan, layer, tag)
    group = plan.group(tag)
    roles = {}
    for role in group.cache.roles:
        if _sees(plan, layer, tag, role.name):
            view = plan.view(layer, role.name, tag)
            name = tensor_name(plan, view.layer, tag, role.name, where(view.pool))
            roles[role.name] = _role_view(plan, group, role, view, bytes_of(view.pool), name)
    return LayerView(layer, group, roles)


def _tag_of(plan: Plan, layer: int, tag: str | None) -> str:
    """The tag asked for; without one, the only tag of the layer."""
    own = [group.tag for group in plan.groups if layer in group.layers]
    tags = list(dict.fromkeys([*own, *(read.tag for reader, read in plan.reads if reader == layer)]))
    if tag is None:
        if len(tags) != 1:
            raise PlanError(f"layer {layer} has the caches {', '.join(tags) or '(none)'}: say which tag")
        return tags[0]
    if tag not in tags:
        raise UnknownName(f"tag of layer {layer}", tag, tags)
    return tag


def _sees(plan: Plan, layer: int, tag: str, role: str) -> bool:
    if layer in plan.group(tag).layers:
        return True
    return any(
        reader == layer and read.tag == tag and (not read.roles or role in read.roles) for reader, read in plan.reads
    )


def _role_view(plan: Plan, group: Group, role: Role, view: View, memory: torch.Tensor, name: str) -> RoleView:
    tensor = strided(memory, view)
    if role.parts:
        planes = [
            Plane(part.name, part.dtype, shown.shape[2:], strided(memory, shown))
            for part, shown in zip(role.parts, view.parts, strict=True)
        ]
    else:
        rows = tensor.movedim(1 + role.token_axis, 1) if group.cache.reach.per_token else tensor.unsqueeze(1)
        planes = [Plane(role.name, role.dtype, tuple(rows.shape[2:]), rows)]
    return RoleView(name, view.layer, role, group, plan.parallel.cp_rank, tensor, tuple(planes))


def strided(memory: torch.Tensor, view: View) -> torch.Tensor:
    """A view of the plan as a tensor over a pool's bytes; elements that are not aligned become an axis of bytes."""
    dtype = torch_dtype(view.dtype)
    if all(n % dtype.itemsize == 0 for n in (view.offset, *view.strides)):
        strides = [stride // dtype.itemsize for stride in view.strides]
        return torch.as_strided(memory.view(dtype), view.shape, strides, view.offset // dtype.itemsize)
    return torch.as_strided(memory, (*view.shape, dtype.itemsize), (*view.strides, 1), view.offset)
