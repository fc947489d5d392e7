"""What `kvweave plan` was asked for, and the plan that answers it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial

from kvweave.cli.gpu import GpuBudget, GpuRequest, gpu_budget
from kvweave.cli.option_syntax import PerTag, PoolOption
from kvweave.cli.read_config import model_dtype, read_config
from kvweave.errors import CoarseReuse, PlanError
from kvweave.plan import Parallel, Plan, PoolRequest, make_plan, merge_draft
from kvweave.spec import ModelSpec
from kvweave.spec.hf import from_config
from kvweave.units import format_bytes

LENGTHS = (4_096, 32_768, 131_072)
DEFAULT_MEMORY = "80GiB"
NOT_GIVEN = PerTag(None, {})


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of `kvweave plan`, read and typed."""

    config: str
    memory: str = DEFAULT_MEMORY
    gpu: GpuRequest | None = None
    """A GPU to plan for, instead of `memory` for the cache alone."""
    parallel: Parallel = field(default_factory=Parallel)
    block_tokens: PerTag = NOT_GIVEN
    kernel_tokens: PerTag = NOT_GIVEN
    dtype: str = "auto"
    pools: str = "auto"
    own_pools: tuple[PoolOption, ...] = ()
    layout: str | None = None
    draft: str | None = None
    draft_own_groups: bool = False
    mtp: bool = False
    context: int | None = None
    reserve: str = "0"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, the model it is for (before it was divided among ranks), and what keys and values are kept in; how the
    memory came about, where a GPU was named."""

    plan: Plan
    spec: ModelSpec
    dtype: str
    context: int | None = None
    gpu: GpuBudget | None = None

    @property
    def lengths(self) -> list[int]:
        """The lengths in tokens to report on: the usual ones, and the one that was asked for."""
        return sorted({*LENGTHS, *([self.context] if self.context else [])})


def answer(request: PlanRequest) -> PlanResult:
    """Read the configs and plan; nothing is written."""
    if request.draft_own_groups and request.draft is None:
        raise PlanError("--draft-own-groups says how to add a draft model, but there is no --draft")
    config = read_config(request.config)
    spec = from_config(config, dtype=request.dtype, draft_layers=request.mtp)
    dtype = model_dtype(config) if request.dtype == "auto" else request.dtype
    if request.draft is not None:
        draft = from_config(read_config(request.draft), dtype=dtype)
        spec = merge_draft(spec, draft, own_groups=request.draft_own_groups)
    gpu = gpu_budget(request.gpu, request.config, config, request.parallel) if request.gpu else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoarseReuse)  # it is among the plan's notes, which are shown
        made = _plan(request, spec, gpu.cache if gpu else request.memory)
    if not made.pools:
        raise PlanError(f"stage {made.parallel.pp_rank} of {made.parallel.pp} has no layer that keeps anything")
    return PlanResult(made, spec, dtype, request.context, gpu)


def _plan(request: PlanRequest, spec: ModelSpec, memory: int | str) -> Plan:
    make = partial(
        make_plan,
        spec,
        memory,
        block_tokens=request.block_tokens.blocks(spec),
        kernel_tokens=request.kernel_tokens.kernels(spec),
        pools=request.pools,
        layout=request.layout,
        parallel=request.parallel,
        reserve=request.reserve,
    )
    requests = {pool_option.tag: pool_option.request for pool_option in request.own_pools}
    if any(pool_option.percent for pool_option in request.own_pools):
        trial = make(own_pools=requests)
        requests |= {
            pool_option.tag: _share(pool_option, trial) for pool_option in request.own_pools if pool_option.percent
        }
    return make(own_pools=requests, context=request.context)


def _share(pool_option: PoolOption, trial: Plan) -> PoolRequest:
    """The pages that make up a percentage of the memory, with the NULL page, by the page size of a trial plan."""
    if not trial.group(pool_option.tag).layers:
        return pool_option.request
    share = int((trial.memory - trial.reserve) * (pool_option.percent or 0) / 100)
    page_bytes = trial.pool(pool_option.tag).unit_bytes
    if share < 2 * page_bytes:
        raise PlanError(
            f"--pool: {pool_option.percent:g}% is {format_bytes(share)}, less than a page of {pool_option.tag!r}"
            " and the NULL page"
        )
    return PoolRequest(share // page_bytes - 1, place=pool_option.place)
