"""HOW memory is cut: groups by tag, shards, budgets, super-pages, drafts; a plan explains itself."""

from kvweave.plan.draft import merge_draft
from kvweave.plan.explain import explain
from kvweave.plan.group import Group
from kvweave.plan.one_page_size import OnePageSize, one_page_size
from kvweave.plan.parallel import Parallel
from kvweave.plan.plan import Plan
from kvweave.plan.planner import make_plan
from kvweave.plan.pool import Layout, Place, Pool, PoolRequest
from kvweave.plan.view import View

__all__ = [
    "Group",
    "Layout",
    "OnePageSize",
    "Parallel",
    "Place",
    "Plan",
    "Pool",
    "PoolRequest",
    "View",
    "explain",
    "make_plan",
    "merge_draft",
    "one_page_size",
]
