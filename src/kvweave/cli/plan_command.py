"""`kvweave plan`: what a model keeps, and how memory is cut for it."""

from __future__ import annotations

import sys

import typer

from kvweave.cli import plan_options as option
from kvweave.cli.gpu import GpuRequest
from kvweave.cli.json_report import json_report
from kvweave.cli.option_syntax import PerTag, parse_pools
from kvweave.cli.plan_request import DEFAULT_MEMORY, PlanRequest, answer
from kvweave.cli.read_config import written
from kvweave.cli.svg import plan_svg
from kvweave.cli.table import print_plan
from kvweave.errors import PlanError
from kvweave.plan import Parallel


def plan_command(
    config: option.Config,
    *,
    dtype: option.Dtype = "auto",
    block_tokens: option.BlockTokens = None,
    kernel_tokens: option.KernelTokens = None,
    memory: option.Memory = None,
    gpu: option.Gpu = None,
    weights: option.Weights = None,
    activations: option.Activations = None,
    reserve: option.Reserve = None,
    pools: option.Pools = "auto",
    pool: option.OwnPools = None,
    layout: option.LayoutName = None,
    context: option.Context = None,
    tp: option.Tp = 1,
    cp: option.Cp = 1,
    pp: option.Pp = 1,
    pp_rank: option.PpRank = 0,
    draft: option.Draft = None,
    draft_own_groups: option.DraftOwnGroups = False,
    mtp: option.Mtp = False,
    explain: option.Explain = False,
    json: option.Json = False,
    svg: option.Svg = None,
) -> None:
    """Plan the cache of a model: what its layers keep, in which pages, and how many sequences fit.

    Needs neither weights nor a GPU, only the config.json.

    [bold]Examples[/bold]

      kvweave plan qwen3-next-80b
      kvweave plan ./my-model --gpu 80GiB --dtype fp8 --tp 2
      kvweave plan deepseek-v3.2 --block-tokens 64 --block-tokens indexer=128
      kvweave plan gemma-3-27b --pool window=20% --svg memory.svg
      kvweave plan llama-3.1-8b --draft eagle3-llama-3.1-8b --json
    """
    found = answer(
        PlanRequest(
            config=config,
            memory=memory or DEFAULT_MEMORY,
            gpu=_gpu(gpu, memory, weights, activations, reserve),
            parallel=Parallel(tp, cp, pp, pp_rank=pp_rank),
            block_tokens=PerTag.parse("--block-tokens", block_tokens or []),
            kernel_tokens=PerTag.parse("--kernel-tokens", kernel_tokens or []),
            dtype=dtype,
            pools=pools,
            own_pools=tuple(parse_pools(pool or [])),
            layout=layout,
            draft=draft,
            draft_own_groups=draft_own_groups,
            mtp=mtp,
            context=context,
            reserve="0" if gpu or reserve is None else reserve,
        )
    )
    if svg is not None:
        print(f"wrote {written(svg, plan_svg(found))}", file=sys.stderr)
    if json:
        typer.echo(json_report(found, with_explain=explain))
    else:
        print_plan(found, with_explain=explain)


def _gpu(
    gpu: str | None, memory: str | None, weights: str | None, activations: str | None, reserve: str | None
) -> GpuRequest | None:
    """The GPU to plan for, if one is named. Raises `PlanError` for options that contradict one another."""
    if gpu is None and (weights or activations):
        raise PlanError("--weights and --activations are subtracted from a GPU: give --gpu, too")
    if gpu is not None and memory is not None:
        raise PlanError("--memory is for the cache alone, --gpu for a GPU with weights on it: give one of them")
    return None if gpu is None else GpuRequest(gpu, weights, activations, reserve)
