"""The planner: a model spec and a budget -> a plan."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace

from kvweave.errors import CoarseReuse, NeverFits, PlanError, UnknownName
from kvweave.plan.group import Group
from kvweave.plan.parallel import Parallel, replicas, shard
from kvweave.plan.plan import TYPICAL_TOKENS, Plan
from kvweave.plan.pool import Layout, Pool, PoolRequest, cut, size
from kvweave.spec import LayerCache, ModelSpec
from kvweave.units import format_bytes, parse_bytes

POOLS = ("auto", "uniform", "shared", "independent")
COARSE = 4
"""How many of the largest blocks a step of prefix reuse may be before a plan warns."""
MOST_IDS = 2**31 - 1
MOST_CONTEXT = 2**40
"""The longest sequence that is planned for: anything above is a typing error."""

PerGroup = int | Mapping[str, int]
"""One number for all groups, or numbers by tag."""


def make_plan(
    spec: ModelSpec,
    memory: int | str,
    *,
    block_tokens: PerGroup = 16,
    kernel_tokens: PerGroup | None = None,
    pools: str = "auto",
    own_pools: Mapping[str, PoolRequest] | None = None,
    layout: Layout | str | None = None,
    parallel: Parallel | None = None,
    reserve: int | str = 0,
    context: int | None = None,
) -> Plan:
    """Cut `memory` bytes for a model.

    `block_tokens` and `kernel_tokens` are for all groups, or by tag; a group whose rows or kernel need more gets
    more, and the plan's notes say so, unless its tag was named: then it is an error. `pools` is "uniform" (one group,
    one page size), "shared" (elastic super-pages), "independent" (a pool a group) or "auto" (uniform for one group,
    else shared); groups in `own_pools` have their own in any case. `layout` defaults to page-major for shared pools
    and layer-major else. `reserve` bytes stay unused. `context` is a length that must fit at least once.
    """
    parallel = parallel or Parallel()
    budget, kept_back = parse_bytes(memory), parse_bytes(reserve, what="reserve", least=0)
    notes = [*spec.notes, *replicas(spec, parallel.tp), *_beyond_the_context(spec)]
    mine = shard(spec, parallel)
    groups = _groups(mine, parallel, block_tokens, kernel_tokens, notes)
    requests = dict(own_pools or {})
    for tag in requests:
        if tag not in {group.tag for group in groups}:
            raise UnknownName("tag of a pool", tag, [group.tag for group in groups])
    chosen = _layout(layout, pools, groups)
    if context is not None and not 1 <= context <= MOST_CONTEXT:
        raise PlanError(f"context must be 1 to {MOST_CONTEXT:,} tokens, got {context}")
    cut_pools, placed, floors = _cut(groups, pools, requests, chosen, context or 1, budget - kept_back)
    by_tag = {group.tag: group for group in placed}
    draft = Plan(
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        groups=tuple(by_tag.get(group.tag, group) for group in groups),
        pools=tuple(cut_pools),
        memory=budget,
        reads=tuple((index, read) for index, layer in enumerate(mine.layers) for read in layer.reads),
        draft_layers=tuple(index for index, layer in enumerate(mine.layers) if layer.draft),
        reserve=kept_back,
        layout=chosen,
        parallel=parallel,
        digest=spec.digest(),
        notes=tuple(notes),
    )
    draft = _warned(draft)
    _check_fits(draft, floors, context or 1)
    demand = {
        pool.name: draft.superpages_for(pool, context or TYPICAL_TOKENS) * pool.unit_bytes for pool in draft.pools
    }
    made = replace(draft, pools=tuple(size(draft.pools, budget - kept_back, requests, demand, floors)))
    _check_ids(made)
    return made


def _check_ids(plan: Plan) -> None:
    """Pages and kernel blocks have int32 ids in tables."""
    for group in plan.groups:
        if group.layers:
            count = plan.pool(group.pool).num_superpages * group.pages_per_superpage * group.kernel_blocks
            if count > MOST_IDS:
                raise PlanError(
                    f"group {group.tag!r} would have {count:,} kernel blocks in {format_bytes(plan.memory)}, and their"
                    f" ids end at {MOST_IDS:,}: plan with less memory or larger blocks"
                )


def _beyond_the_context(spec: ModelSpec) -> list[str]:
    """Windows that a sequence never fills."""
    spans = {tag: cache.reach.span for tag, (cache, _) in spec.groups().items() if cache.reach.per_token}
    return [
        f"group {tag!r} reaches {span:,} tokens back, and the model's context ends at {spec.max_tokens:,}: there it is"
        " full attention, and grows with every token"
        for tag, span in spans.items()
        if span and spec.max_tokens and span >= spec.max_tokens
    ]


def _warned(plan: Plan) -> Plan:
    """The plan with a note, and a warning, where prefixes can be reused in far larger steps than blocks."""
    blocks = {group.tag: group.block_tokens * group.context_shards for group in plan.groups}
    if plan.reuse_tokens <= COARSE * max(blocks.values()):
        return plan
    note = (
        f"prefixes are reused in steps of {plan.reuse_tokens:,} tokens, where blocks of"
        f" {', '.join(f'{tag} {tokens:,}' for tag, tokens in blocks.items())} tokens end together, and a shorter prompt"
        " reuses nothing: choose block_tokens that divide one another"
    )
    warnings.warn(note, CoarseReuse, stacklevel=3)
    return replace(plan, notes=(*plan.notes, note))


def _groups(
    spec: ModelSpec, parallel: Parallel, block_tokens: PerGroup, kernel_tokens: PerGroup | None, notes: list[str]
) -> list[Group]:
    """A group a tag; those without a layer on this rank are placeholders."""
    tags = spec.groups()
    if not tags:
        raise PlanError(f"model {spec.model_type!r} keeps no cache in any layer: there is nothing to plan")
    _check_numbers("block_tokens", block_tokens, tags)
    _check_numbers("kernel_tokens", kernel_tokens, tags)
    groups = []
    for tag, (cache, layers) in tags.items():
        block = _block_tokens(cache, block_tokens, notes)
        kernel = _kernel_tokens(cache, block, kernel_tokens)
        groups.append(Group(tag, cache, layers, block, kernel, parallel.cp if cache.context_split else 1))
    return groups


def _check_numbers(name: str, wish: PerGroup | None, tags: Collection[str]) -> None:
    for tag in wish if isinstance(wish, Mapping) else ():
        if tag not in tags:
            raise UnknownName("tag", tag, tags)
    for number in wish.values() if isinstance(wish, Mapping) else (wish,):
        if number is not None and type(number) is not int:
            raise PlanError(f"{name} is a number of tokens, or numbers by tag, not {number!r}")


def _block_tokens(cache: LayerCache, wish: PerGroup, notes: list[str]) -> int:
    named = wish.get(cache.tag) if isinstance(wish, Mapping) else None
    asked = named if named is not None else wish if isinstance(wish, int) else 16
    if asked < 1:
        raise PlanError(f"group {cache.tag!r}: block_tokens must be at least 1, got {asked}")
    if named is None and cache.block_tokens is not None:
        return cache.block_tokens
    unit = cache.unit_tokens if cache.reach.per_token else 1
    if asked % unit == 0:
        return asked
    if named is not None:
        raise PlanError(f"group {cache.tag!r}: block_tokens {asked} is no multiple of {unit}, which its rows need")
    block = -(-asked // unit) * unit
    notes.append(f"group {cache.tag!r} has blocks of {block} tokens, not {asked}: its rows and kernel need {unit}")
    return block


def _kernel_tokens(cache: LayerCache, block: int, wish: PerGroup | None) -> int:
    """A divisor of the block. States have none; a page is never split below what its kernel can read."""
    if not cache.reach.per_token:
        return block
    unit = cache.unit_tokens
    named = wish.get(cache.tag) if isinstance(wish, Mapping) else None
    asked = named if named is not None else wish if isinstance(wish, int) else None
    if asked is None:
        return unit if cache.kernel_tokens > 1 else block
    if asked < 1 or (named is not None and asked % unit):
        raise PlanError(f"group {cache.tag!r}: kernel_tokens {asked} is no multiple of {unit}, which its kernel needs")
    kernel = asked if asked % unit == 0 else unit
    if cache.block_tokens is not None and named is None:
        kernel = min(kernel, block)
    if block % kernel:
        raise PlanError(f"group {cache.tag!r}: kernel_tokens {kernel} does not divide block_tokens {block}")
    return kernel


def _layout(layout: Layout | str | None, pools: str, groups: list[Group]) -> Layout:
    if pools not in POOLS:
        raise UnknownName("kind of pools", pools, POOLS)
    if layout is None:
        return Layout.PAGE_MAJOR if _is_shared(pools, groups) else Layout.LAYER_MAJOR
    if layout not in list(Layout):
        raise UnknownName("layout", layout, list(Layout))
    return Layout(layout)


def _is_shared(pools: str, groups: list[Group]) -> bool:
    return pools == "shared" or (pools == "auto" and sum(bool(group.layers) for group in groups) > 1)


def _cut(
    groups: list[Group],
    pools: str,
    requests: Mapping[str, PoolRequest],
    layout: Layout,
    num_tokens: int,
    memory: int,
) -> tuple[list[Pool], list[Group], dict[str, int]]:
    """The pools, without memory yet; the groups in them; and the fewest super-pages that each pool must have."""
    present = [group for group in groups if group.layers]
    if pools == "uniform" and len(present) > 1:
        tags = ", ".join(group.tag for group in present)
        raise PlanError(
            f"a uniform pool has one group, this model has {len(present)} ({tags}); take shared or independent"
        )
    own = [g for g in present if g.tag in requests or pools == "independent"]
    together = [g for g in present if g not in own]
    cuts = [cut(g.tag, [g], layout, num_tokens, place=requests.get(g.tag, PoolRequest()).place) for g in own]
    floors = {pool.name: _floor(pool, requests, needed, num_tokens) for pool, _, needed in cuts}
    if together:
        name = together[0].tag if len(together) == 1 else "shared"
        while len(together) > 1 and name in floors:
            name += "+"
        left = memory - sum(pool.unit_bytes * floors[pool.name] for pool, _, _ in cuts if pool.is_on_device)
        cuts.insert(0, cut(name, together, layout, num_tokens, left))
        floors[name] = cuts[0][2]
    return [pool for pool, _, _ in cuts], [group for _, placed, _ in cuts for group in placed], floors


def _floor(pool: Pool, requests: Mapping[str, PoolRequest], needed: int, num_tokens: int) -> int:
    """The super-pages that were asked for a group's own pool, or else those that are needed, NULL included."""
    pages = requests[pool.name].pages if pool.name in requests else None
    if pages is not None and pages < needed - 1:
        raise PlanError(
            f"pool {pool.name!r} has {pages} pages, but one sequence of {num_tokens} tokens takes {needed - 1}"
        )
    return needed if pages is None else 1 + pages


def _check_fits(draft: Plan, floors: Mapping[str, int], num_tokens: int) -> None:
    """The fewest super-pages that pools must have, for one sequence of `num_tokens` tokens, must fit the memory."""
    smallest = draft.reserve + sum(pool.unit_bytes * floors[pool.name] for pool in draft.pools if pool.is_on_device)
    if smallest > draft.memory:
        raise NeverFits(
            f"{draft.memory} bytes do not hold one sequence of {num_tokens} tokens and the NULL pages"
            f" ({' + '.join(pool.name for pool in draft.pools)}): {smallest} bytes ({format_bytes(smallest)}) would",
            available_bytes=draft.memory,
            smallest_bytes=smallest,
        )
