"""A plan as a table that fits a terminal, a pipe and a pasted message."""

from __future__ import annotations

import os
import shutil
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvweave.cli.format import (
    count,
    exact,
    format_blocks,
    format_cost,
    format_kept,
    format_pools,
    format_reach,
    format_size,
    format_title,
    held_bytes,
)
from kvweave.cli.plan_request import PlanResult
from kvweave.plan import Group, Plan, explain, one_page_size
from kvweave.plan.plan import TYPICAL_TOKENS

PIPE_COLUMNS = 120
"""Width where there is no terminal to ask."""


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says; plain text, markup is never read out of a model's names."""
    on_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if on_terminal else PIPE_COLUMNS
    return Console(width=width, markup=False, highlight=False, emoji=False)


def plain_table() -> Table:
    """A head, a line and columns; no edges that a narrow terminal could break."""
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))


def plain_text(text: str) -> Text:
    """What clients and servers called something: not to be obeyed by a terminal, nor read as markup."""
    from kvweave.server.report import printable  # noqa: PLC0415 - an extra

    return Text(printable(text))


def print_plan(answer: PlanResult, with_explain: bool = False) -> None:
    out = console()
    out.print(Text(format_title(answer), style="bold"))
    for part in (_keeps(answer.plan), _pages(answer.plan), _summary(answer)):
        out.print()
        out.print(part)
    remarks = explain(answer.plan).splitlines() if with_explain else _remarks(answer.plan)
    if remarks:
        out.print()
        out.print("\n".join(remarks))


def _remarks(plan: Plan) -> list[str]:
    usual = [_usual_scheme(plan)] if sum(bool(group.layers) for group in plan.groups) > 1 else []
    return [*usual, *(f"note: {note}" for note in plan.notes)]


def _keeps(plan: Plan) -> Table:
    """What the layers of each group keep."""
    table = plain_table()
    table.add_column("group", style="bold cyan", no_wrap=True)
    table.add_column("layers", justify="right")
    table.add_column("reach")
    table.add_column("what a layer keeps")
    for group in plan.groups:
        keeps = format_kept(group) if group.layers else "(nothing here: its layers are on other stages)"
        table.add_row(group.tag, str(len(group.layers)), format_reach(group.cache.reach), keeps)
    return table


def _pages(plan: Plan) -> Table:
    """What that is in bytes, and in which pages."""
    table = plain_table()
    table.add_column("group", style="bold cyan", no_wrap=True)
    for name in ("block\ntokens", "bytes\na token", "bytes\na sequence", "\npage", "\npadding", "pages\nup to"):
        table.add_column(name, justify="right")
    for group in plan.groups:
        if group.layers:
            table.add_row(*_cells(plan, group))
    return table


def _cells(plan: Plan, group: Group) -> list[str]:
    per_token = group.cache.bytes_per_token() * len(group.layers) / group.context_shards
    fixed = group.cache.fixed_bytes() * len(group.layers)
    return [
        group.tag,
        format_blocks(group),
        f"{exact(per_token):,}" if per_token else "-",
        format_size(fixed) if fixed else "-",
        format_size(group.payload_bytes),
        f"{plan.padding_bytes(group.tag) / plan.stride_bytes(group.tag):.2%}",
        f"{plan.num_pages(group.tag):,}",
    ]


def _summary(answer: PlanResult) -> Table:
    plan = answer.plan
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("a sequence", format_cost(plan))
    table.add_row("memory", _memory(plan))
    for line in format_pools(plan):
        table.add_row("", line)
    fits = ", ".join(f"{plan.sequences(length):,} x {length:,} tokens" for length in answer.lengths)
    table.add_row("fits at once", fits)
    if (most := answer.spec.max_tokens) and most < max(answer.lengths):
        table.add_row("", f"(the model itself ends at {count(most, 'token')})")
    return table


def _memory(plan: Plan) -> str:
    reserve = f", {format_size(plan.reserve)} of it reserved" if plan.reserve else ""
    host = f"; {format_size(plan.host_bytes)} on the host" if plan.host_bytes else ""
    return f"{format_size(plan.num_bytes)} of {format_size(plan.memory)} used{reserve}{host} ({plan.layout})"


def _usual_scheme(plan: Plan) -> str:
    usual, held = one_page_size(plan), held_bytes(plan, TYPICAL_TOKENS)
    rows = [group for group in plan.groups if group.layers and group.cache.reach.per_token]
    blocks = ", ".join(f"{group.tag} {usual.block_tokens[group.tag]:,}" for group in rows)
    return (
        f"One padded page size for all groups would take pages of {format_size(usual.page_bytes)} a layer, blocks of"
        f" {blocks or 'no'} tokens and {usual.padding_share:.2%} padding: a sequence of {TYPICAL_TOKENS:,} tokens"
        f" would hold {format_size(usual.bytes_per_sequence)}, {usual.bytes_per_sequence / held:.2f} times the"
        f" {format_size(held)} here ({plan.padding_share():.2%} padding)."
    )
