"""A plan as tables that fit a terminal, a pipe and a pasted message: first what a user decides by, then the layers."""

from __future__ import annotations

import os
import shutil
import sys

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvweave.cli.format import (
    count,
    exact,
    fits_words,
    format_blocks,
    format_cost,
    format_kept,
    format_reach,
    format_size,
    format_title,
    held_bytes,
    memory_words,
    window_bytes,
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


def plain_table(*columns: str) -> Table:
    """A head, a line and columns; no edges that a narrow terminal could break.

    `>tokens` is a column of numbers, on the right; `~reach` is one of words that may be wrapped; others are names.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for number, column in enumerate(columns):
        is_number, is_text = column.startswith(">"), column.startswith("~")
        table.add_column(
            column.lstrip(">~"),
            justify="right" if is_number else "left",
            no_wrap=not is_text,
            style="" if number else "bold cyan",
        )
    return table


def print_table(out: Console, table: Table) -> None:
    """The table; where the console is so narrow that something would be cut short, a line a cell."""
    least = sum(map(_least_width, table.columns)) + 2 * (len(table.columns) - 1)
    out.print(table if least <= out.width else _records(table))


def _least_width(column: Column) -> int:
    cells = [str(cell) for cell in (column.header, *column.cells)]
    parts = [cell.split("\n") if column.no_wrap else cell.split() for cell in cells]
    return max((cell_len(part) for each in parts for part in each), default=0)


def _records(table: Table) -> Table:
    """Rows one below the other: what a column is called, and its cell."""
    grid = Table.grid(padding=(0, 2))
    heads = [" ".join(str(column.header).split()) for column in table.columns]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    for row in rows:
        for head, cell in zip(heads, row, strict=True):
            grid.add_row(head, cell, style="bold" if head == heads[0] else "")
        if row is not rows[-1]:
            grid.add_row()
    return grid


def plain_text(text: str) -> Text:
    """What clients and servers called something: not to be obeyed by a terminal, nor read as markup."""
    from kvweave.server.report import printable  # noqa: PLC0415 - an extra

    return Text(printable(text))


def print_plan(answer: PlanResult, with_explain: bool = False) -> None:
    out = console()
    out.print(Text(format_title(answer), style="bold"))
    out.print()
    out.print(_decisions(answer))
    for table in (_keeps(answer), _pages(answer)):
        out.print()
        print_table(out, table)
    remarks = explain(answer.plan).splitlines() if with_explain else [f"note: {note}" for note in answer.plan.notes]
    if remarks:
        out.print()
        out.print("\n".join(remarks))


def _decisions(answer: PlanResult) -> Table:
    """What a user decides by."""
    plan, table = answer.plan, Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("fits at once", fits_words(answer))
    table.add_row("a sequence", f"keeps {format_cost(answer)}")
    table.add_row("prefix reuse", _reuse(plan))
    if sum(bool(group.layers) for group in plan.groups) > 1:
        table.add_row("one page size", _usual_scheme(plan))
    for name, words in memory_words(answer):
        table.add_row(name, words)
    return table


def _reuse(plan: Plan) -> str:
    """`in steps of 128 tokens (blocks of 4 to 128)`."""
    blocks = sorted({group.block_tokens for group in plan.groups if group.cache.reach.per_token})
    said = f" (blocks of {' to '.join(f'{tokens:,}' for tokens in (*blocks[:1], *blocks[1:][-1:]))})" if blocks else ""
    return f"in steps of {count(plan.reuse_tokens, 'token')}{said}"


def _usual_scheme(plan: Plan) -> str:
    """What engines that pad every group to one page size would make of it."""
    usual, held = one_page_size(plan), held_bytes(plan, TYPICAL_TOKENS)
    return (
        f"for all groups instead: steps of {count(usual.reuse_tokens, 'token')}; a sequence of {TYPICAL_TOKENS:,}"
        f" tokens holds {usual.bytes_per_sequence / held:.2f} times the bytes ({usual.padding_share:.2%} padding, here"
        f" {plan.padding_share():.2%}); {(plan.memory - plan.reserve) // usual.bytes_per_sequence:,} fit"
    )


def _keeps(answer: PlanResult) -> Table:
    """What the layers of each group keep."""
    table = plain_table("group", ">layers", "~reach", "~what a layer keeps")
    for group in answer.plan.groups:
        keeps = format_kept(group) if group.layers else "(nothing here: its layers are on other stages)"
        table.add_row(group.tag, str(len(group.layers)), format_reach(group.cache.reach, answer.spec.max_tokens), keeps)
    return table


def _pages(answer: PlanResult) -> Table:
    """What that is in bytes, and in which pages."""
    heads = (">block\ntokens", ">bytes\na token", ">bytes\na sequence", ">\npage", ">\npadding", ">pages\nup to")
    table = plain_table("\ngroup", *heads)
    for group in answer.plan.groups:
        if group.layers:
            table.add_row(*_cells(answer, group))
    return table


def _cells(answer: PlanResult, group: Group) -> list[str]:
    plan = answer.plan
    per_token = group.cache.bytes_per_token() * len(group.layers) / group.context_shards
    fixed = window_bytes(group, answer.spec.max_tokens)
    most = "up to " if group.cache.reach.per_token else ""
    return [
        group.tag,
        format_blocks(group),
        f"{exact(per_token):,}" if per_token else "-",
        f"{most}{format_size(fixed)}" if fixed else "-",
        format_size(group.payload_bytes),
        f"{plan.padding_bytes(group.tag) / plan.stride_bytes(group.tag):.2%}",
        f"{plan.num_pages(group.tag):,}",
    ]
