"""Why a plan is as it is, in sentences: its groups, blocks, super-pages, steps of prefix reuse, and what fills it."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.errors import PlanError
from kvweave.plan.group import Group
from kvweave.plan.one_page_size import OnePageSize, one_page_size
from kvweave.plan.plan import TYPICAL_TOKENS, Plan
from kvweave.plan.pool import Layout, Pool
from kvweave.plan.superpage import GOOD
from kvweave.units import format_bytes


def explain(plan: Plan, num_tokens: int = TYPICAL_TOKENS) -> str:
    """The reasons, a line each; those of capacity are for sequences of `num_tokens`."""
    if num_tokens < 1:
        raise PlanError(f"no sequence has {num_tokens} tokens")
    return "\n".join(_lines(plan, num_tokens))


def _lines(plan: Plan, num_tokens: int) -> Iterator[str]:
    yield (
        "groups: layers that keep equal rows and reach equally far share one block table, so a page is one block of all"
        " of them"
    )
    for group in plan.groups:
        yield f"group {group.tag}: {_why_group(group, num_tokens)}"
    for pool in plan.pools:
        yield f"pool {pool.name}: {_why_pool(plan, pool)}"
    if plan.pools:
        yield f"{plan.layout}: {_WHY_LAYOUT[plan.layout]}"
    yield f"reuse: {_why_reuse(plan)}"
    if plan.pools:
        yield f"capacity: {_why_capacity(plan, num_tokens)}"
    if sum(bool(group.layers) for group in plan.groups) > 1:
        yield f"one padded page size for all groups: {_why_not_one_size(plan, one_page_size(plan, num_tokens))}"
    yield from (f"note: {note}" for note in plan.notes)


def _why_group(group: Group, num_tokens: int) -> str:
    if not group.layers:
        return "a placeholder, because its layers are on other ranks and tables must agree everywhere"
    layers = f"{len(group.layers)} layer{'s' if len(group.layers) > 1 else ''}"
    if not group.cache.reach.per_token:
        return (
            f"{layers}; a state has no tokens to cut by, so a page is one snapshot, and a sequence goes on only from"
            " where one was taken"
        )
    why = f"{layers} in blocks of {group.block_tokens} tokens{_why_block(group)}"
    if group.cache.reach.span is not None:
        held, span = group.num_blocks_held(num_tokens), group.cache.reach.span
        why += f"; it reaches {span:,} tokens back, so a sequence never holds more than {held:,} blocks"
    if group.context_shards > 1:
        why += f"; {group.context_shards} context-parallel ranks take turns with its blocks"
    return why


def _why_block(group: Group) -> str:
    if group.cache.block_tokens == group.block_tokens:
        return ", the size that its cache asks for"
    if group.cache.unit_tokens > 1:
        return f", a multiple of the {group.cache.unit_tokens} that its rows and kernel need"
    return ""


def _why_pool(plan: Plan, pool: Pool) -> str:
    groups = [plan.group(tag) for tag in pool.tags]
    first = "the first one is NULL, which tables name where there is no page"
    if len(groups) == 1:
        return f"one group has it, so a super-page is one of its pages and nothing is padded to another's; {first}"
    cuts = ", ".join(f"{g.pages_per_superpage:,} of {g.tag}" for g in groups)
    worst = max(plan.padding_bytes(group.tag) / plan.stride_bytes(group.tag) for group in groups)
    return (
        f"pages differ in size, so groups take super-pages of {format_bytes(pool.unit_bytes)} and give them back as"
        f" demand moves; one holds {cuts}, with {worst:.2%} padding for the worst: {_why_size(worst)}; {first}"
    )


def _why_size(worst: float) -> str:
    least = "the size found that wastes the least of this memory, padding and super-pages that are not full together"
    return f"the smallest size found below {GOOD:.0%}" if worst <= GOOD else least


_WHY_LAYOUT = {
    Layout.PAGE_MAJOR: "all layers of a page are one run of bytes, so a super-page changes groups, and a page is"
    " copied, as a whole",
    Layout.LAYER_MAJOR: "all pages of a layer are contiguous, as most kernels expect, and no other group needs them",
}


def _why_reuse(plan: Plan) -> str:
    rows = [group for group in plan.groups if group.cache.reach.per_token]
    blocks = ", ".join(f"{group.tag} {group.block_tokens * group.context_shards:,}" for group in rows)
    why = f"prefixes are shared in steps of {plan.reuse_tokens:,} tokens"
    why += f", where blocks of all groups end ({blocks})" if blocks else ""
    states = any(not group.cache.reach.per_token for group in plan.groups)
    return why + ("; within that, states go on only from their snapshots" if states else "")


def _why_capacity(plan: Plan, num_tokens: int) -> str:
    held = {g.tag: plan.stride_bytes(g.tag) * g.num_blocks_held(num_tokens) for g in plan.groups if g.layers}
    whole = sum(held.values())
    shares = ", ".join(
        f"{tag} {size / whole:.0%}" for tag, size in sorted(held.items(), key=lambda item: item[1], reverse=True)
    )
    left = plan.memory - plan.num_bytes
    why = f"a sequence of {num_tokens:,} tokens holds {format_bytes(whole)}, of which {shares}"
    why += f", {plan.padding_share(num_tokens):.2%} of it padding"
    more = min(pool.unit_bytes for pool in plan.pools)
    return why + (f"; {format_bytes(left)} is left over, less than one more super-page" if 0 < left < more else "")


def _why_not_one_size(plan: Plan, usual: OnePageSize) -> str:
    held = sum(plan.stride_bytes(g.tag) * g.num_blocks_held(usual.num_tokens) for g in plan.groups)
    states = [g for g in plan.groups if g.layers and not g.cache.reach.per_token]
    grown = {
        tag: tokens
        for tag, tokens in usual.block_tokens.items()
        if plan.group(tag).cache.reach.per_token and tokens > plan.group(tag).block_tokens
    }
    why = f"pages of {format_bytes(usual.page_bytes)} a layer"
    if grown:
        sizes = ", ".join(f"{tag} from {plan.group(tag).block_tokens:,} to {tokens:,}" for tag, tokens in grown.items())
        cause = "a state cannot be cut" if states else "rows differ in size"
        why += f": {cause}, so blocks grow ({sizes} tokens), and prefixes are shared in steps of {usual.reuse_tokens:,}"
    return (
        f"{why}; in groups of {usual.layers_per_group} layers, filled up where kinds do not divide by it, and with"
        f" {usual.padding_share:.2%} padding that sequence would hold"
        f" {usual.bytes_per_sequence / held:.2f} times the bytes"
    )
