"""HOW memory is cut: groups by tag, shards, budgets, super-pages, drafts; a plan explains itself."""

from kvweave.plan.group import Group
from kvweave.plan.parallel import Parallel
from kvweave.plan.plan import Plan
from kvweave.plan.planner import plan
from kvweave.plan.pool import Layout, Place, Pool, PoolRequest
from kvweave.plan.view import View

__all__ = ["Group", "Layout", "Parallel", "Place", "Plan", "Pool", "PoolRequest", "View", "plan"]
