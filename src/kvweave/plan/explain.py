"""A plan in sentences: why each page has its size, what padding costs, what the usual scheme would have cost."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.plan.group import Group
from kvweave.plan.one_page_size import one_page_size
from kvweave.plan.plan import TYPICAL_TOKENS, Plan
from kvweave.spec.role import Role
from kvweave.units import format_bytes


def explain(plan: Plan, num_tokens: int = TYPICAL_TOKENS) -> str:
    return "\n".join(_lines(plan, num_tokens))


def _lines(plan: Plan, num_tokens: int) -> Iterator[str]:
    for group in plan.groups:
        yield from _group(plan, group)
    for pool in plan.pools:
        yield (
            f"pool {pool.name} ({pool.place}, {plan.layout}): {pool.num_superpages:,} super-pages of"
            f" {format_bytes(pool.unit_bytes)} = {format_bytes(pool.num_bytes)}"
        )
    used, left = format_bytes(plan.num_bytes), format_bytes(plan.memory - plan.num_bytes)
    yield f"budget: {used} of {format_bytes(plan.memory)}; {left} left over"
    held = sum(plan.stride_bytes(g.tag) * g.num_blocks_held(num_tokens) for g in plan.groups)
    yield (
        f"a sequence of {num_tokens:,} tokens holds {format_bytes(held)} in whole pages,"
        f" of which {plan.padding_share(num_tokens):.2%} is padding"
    )
    if sum(bool(group.layers) for group in plan.groups) > 1:
        yield from _usual_scheme(plan, num_tokens, held)
    yield from (f"note: {note}" for note in plan.notes)


def _group(plan: Plan, group: Group) -> Iterator[str]:
    if not group.layers:
        yield f"group {group.tag}: a placeholder, none of its layers is here"
        return
    rows = " + ".join(_role(role) for role in group.cache.roles)
    kernel = f", read in kernel blocks of {group.kernel_tokens}" if group.kernel_blocks > 1 else ""
    unit = f"blocks of {group.block_tokens} tokens{kernel}" if group.cache.reach.per_token else "one state a page"
    yield f"group {group.tag}: {len(group.layers)} layers x {rows}; {unit}"
    padding = plan.padding_bytes(group.tag)
    yield (
        f"  page {format_bytes(group.payload_bytes)} + {format_bytes(padding)} padding"
        f" ({padding / plan.stride_bytes(group.tag):.2%}); {group.pages_per_superpage} in a super-page,"
        f" up to {plan.num_pages(group.tag):,} pages"
    )


def _role(role: Role) -> str:
    if role.alias_of:
        return f"{role.name} (is {role.alias_of})"
    shape = "x".join(map(str, role.shape))
    per = f" per {role.tokens_per_row} tokens" if role.tokens_per_row > 1 else ""
    packed = " planar" if role.planar else " packed" if role.parts else ""
    return f"{role.name} {shape} {role.dtype}{packed}{per}"


def _usual_scheme(plan: Plan, num_tokens: int, held: int) -> Iterator[str]:
    usual = one_page_size(plan, num_tokens)
    blocks = ", ".join(f"{tag} {tokens}" for tag, tokens in usual.block_tokens.items() if _is_rows(plan, tag))
    yield (
        f"one padded page size for all groups instead: pages of {format_bytes(usual.page_bytes)} a layer,"
        f" blocks of {blocks or 'one state'} tokens, {usual.padding_share:.2%} padding;"
        f" that sequence holds {format_bytes(usual.bytes_per_sequence)}: {usual.bytes_per_sequence / held:.2f} x ours"
    )


def _is_rows(plan: Plan, tag: str) -> bool:
    return plan.group(tag).cache.reach.per_token
