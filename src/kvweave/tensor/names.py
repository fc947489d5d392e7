"""Names of tensors, made only here. They are for lookup by users; kvweave itself goes by layer and role.

layer.12/full/key@pp0.tp1.cp0:cuda:1        a draft's: draft.61/latent/latent@pp0.tp0.cp0:cuda:0
"""

from __future__ import annotations

from urllib.parse import quote

from kvweave.plan import Plan, View
from kvweave.spec.role import role_order


def tensor_name(plan: Plan, layer: int, tag: str, role: str, where: str) -> str:
    """Unique over layers, groups, roles, ranks and places (`where`), and the same in every run."""
    kind = "draft" if layer in plan.draft_layers else "layer"
    rank = plan.parallel
    path = "/".join((f"{kind}.{layer}", *(quote(part, safe="") for part in (tag, role))))
    return f"{path}@pp{rank.pp_rank}.tp{rank.tp_rank}.cp{rank.cp_rank}:{where}"


def ordered(plan: Plan) -> list[View]:
    """Every role of every layer in the contract's order: by layer, then role priority, then tag."""
    return sorted(plan.views(), key=lambda view: (view.layer, role_order(view.role), view.tag))
