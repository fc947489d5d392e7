"""`kvweave plan --json`: the plan and its numbers as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from kvweave.cli.format import exact, held_bytes, pools_kind
from kvweave.cli.plan_request import PlanResult
from kvweave.plan import Group, Plan, Pool, explain, one_page_size
from kvweave.plan.plan import TYPICAL_TOKENS
from kvweave.spec import Role, codec


def json_report(answer: PlanResult, with_explain: bool = False) -> str:
    report = _report(answer) | ({"explain": explain(answer.plan)} if with_explain else {})
    return json.dumps(report, indent=2)


def _report(answer: PlanResult) -> dict[str, Any]:
    plan = answer.plan
    return {
        "model_type": plan.model_type,
        "num_layers": plan.num_layers,
        "draft_layers": list(plan.draft_layers),
        "max_tokens": answer.spec.max_tokens,
        "dtype": answer.dtype,
        "parallel": asdict(plan.parallel),
        "groups": [_group(plan, group) for group in plan.groups],
        "bytes_per_token": exact(plan.bytes_per_token()),
        "window_bytes_per_sequence": plan.window_bytes(),
        "state_bytes_per_sequence": plan.state_bytes(),
        "reuse_tokens": plan.reuse_tokens,
        "memory": plan.memory,
        "gpu": asdict(answer.gpu) | {"cache": answer.gpu.cache} if answer.gpu else None,
        "reserve": plan.reserve,
        "pool": _all_pools(plan),
        "pools": [_pool(pool) for pool in plan.pools],
        "sequences": {str(length): plan.sequences(length) for length in answer.lengths},
        "one_page_size": _one_page_size(plan),
        "notes": list(plan.notes),
        "plan": plan.to_dict(),
    }


def _group(plan: Plan, group: Group) -> dict[str, Any]:
    return {
        "tag": group.tag,
        "reach": codec.to_dict(group.cache.reach),
        "layers": list(group.layers),
        "roles": [_role(role) for role in group.cache.roles],
        "block_tokens": group.block_tokens,
        "kernel_tokens": group.kernel_tokens,
        "bytes_per_token": exact(group.cache.bytes_per_token() * len(group.layers) / group.context_shards),
        "fixed_bytes_per_sequence": group.cache.fixed_bytes() * len(group.layers),
        "page_bytes": group.payload_bytes,
        "padding_bytes": plan.padding_bytes(group.tag),
        "stride_bytes": plan.stride_bytes(group.tag),
        "num_pages": plan.num_pages(group.tag),
        "pages_per_superpage": group.pages_per_superpage,
        "pool": group.pool,
    }


def _role(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "shape": list(role.shape),
        "dtype": str(role.dtype),
        "tokens_per_row": role.tokens_per_row,
        "row_bytes": role.row_bytes,
        "parts": [codec.to_dict(part) for part in role.parts],
        "planar": role.planar,
        "alias_of": role.alias_of,
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return asdict(pool) | {
        "num_usable": pool.num_usable,
        "unit_bytes": pool.unit_bytes,
        "bytes": pool.num_bytes,
    }


def _all_pools(plan: Plan) -> dict[str, Any]:
    """All pools as one: device bytes, pages of each group, padding of a typical sequence."""
    return {
        "kind": pools_kind(plan),
        "layout": str(plan.layout),
        "bytes": plan.num_bytes - plan.reserve,
        "host_bytes": plan.host_bytes,
        "pages": {group.tag: plan.num_pages(group.tag) for group in plan.groups},
        "padding_share": plan.padding_share(),
    }


def _one_page_size(plan: Plan) -> dict[str, Any]:
    """What padding every group to one page size would have cost, beside what this plan takes."""
    usual = one_page_size(plan)
    ours = {"plan_bytes_per_sequence": held_bytes(plan, TYPICAL_TOKENS), "plan_padding_share": plan.padding_share()}
    return asdict(usual) | ours
