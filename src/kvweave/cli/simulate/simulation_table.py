"""A simulation as tables that fit a terminal, a pipe and a pasted message."""

from __future__ import annotations

from rich.table import Table

from kvweave.cli.format import count
from kvweave.cli.format import format_size as short_size
from kvweave.cli.run.format_outcomes import format_seconds
from kvweave.cli.table import console, plain_table, print_table
from kvweave.sim import Cell, Load, Simulation, Trace
from kvweave.units import format_size

ORACLE_HEADS = ("cache, perfect\nplaces", "oracle:\nplacement", "\nbelady", "\nboth", "\nbound", "infinite\nmemory")

TIER_HEADS = (
    "\ntier",
    "\nits size",
    "found\nbeyond",
    "tokens\nloaded",
    "bytes\nloaded",
    "time to\nload",
    "time\nsaved",
)


def print_simulation(simulation: Simulation) -> None:
    out, trace = console(), simulation.trace
    words = f"{trace.name} ({trace.format}) on {simulation.model}: {count(len(trace.requests), 'request')}"
    out.print(f"{words}, {trace.prompt_tokens:,} prompt tokens, {trace.output_tokens:,} generated", style="bold")
    for table in (_hits(simulation), _oracles(simulation), _misses(simulation), _tiers(simulation)):
        if table is not None:
            out.print()
            print_table(out, table)
    out.print()
    out.print(simulation.advice, style="bold")
    if trace.recorded_hits is not None:
        out.print(f"The engine that recorded the trace found {trace.recorded_hits:,} tokens.")
    for line in [*trace.invented, *simulation.assumptions]:
        out.print(f"note: {line}")
    out.print()


def _table(*heads: str) -> Table:
    return plain_table("\nmemory", "~\npolicy", *(f">{head}" for head in heads))


def _hits(simulation: Simulation) -> Table:
    table = _table("tokens\nhit", "share of\nprompts", "prefill\nsaved", "\nevicted", "\nrefused", "requests\na second")
    for cell in simulation.cells:
        table.add_row(
            format_size(cell.memory),
            cell.policy,
            f"{cell.split.hit:,}",
            f"{cell.split.hit_rate:.1%}",
            format_seconds(cell.saved_seconds),
            short_size(cell.evicted_bytes),
            f"{cell.refused:,}",
            f"{cell.requests / max(cell.replay.seconds, 1e-9):,.0f}",
        )
    return table


def _oracles(simulation: Simulation) -> Table | None:
    """The policy beside what could have been had with the same memory."""
    table = _table("\nhit", *ORACLE_HEADS)
    for cell in simulation.cells:
        if (oracles := cell.oracles) is None:
            return None
        own, placement = oracles.cache_with_placement, oracles.placement
        found = (cell.split.hit, own, placement, oracles.belady, oracles.both, oracles.bound, cell.split.overlap)
        shares = [f"{tokens / max(1, cell.split.prompt):.3f}" for tokens in found]
        table.add_row(format_size(cell.memory), cell.policy, *shares)
    return table


def _misses(simulation: Simulation) -> Table:
    """Where misses came from, and at which kind of point hits were."""
    kinds = list(dict.fromkeys(kind for cell in simulation.cells for kind in cell.kinds))
    heads = [f"hits at\n{kind}" for kind in kinds] if kinds != ["between"] else []
    table = _table("never\nseen", "not\nkept", "no point\nthere", *heads)
    for cell in simulation.cells:
        split = cell.split
        shares = [f"{n / max(1, split.prompt):.1%}" for n in (split.never_seen, split.evicted, split.no_point)]
        hits = [f"{cell.kinds.get(kind, (0, 0))[0]:,}" for kind in kinds] if heads else []
        table.add_row(format_size(cell.memory), cell.policy, *shares, *hits)
    return table


def _tiers(simulation: Simulation) -> Table | None:
    if not any(cell.tiers for cell in simulation.cells):
        return None
    table = _table(*TIER_HEADS)
    for cell in simulation.cells:
        for row in tier_rows(cell):
            table.add_row(*row)
    return table


def tier_rows(cell: Cell) -> list[list[str]]:
    """A row for each tier: memory and policy of the cell, then a cell for each of `TIER_HEADS`."""
    return [
        [
            format_size(cell.memory),
            cell.policy,
            use.name,
            format_size(use.memory),
            f"{use.found_tokens:,}",
            f"{use.loaded_tokens:,}",
            short_size(use.loaded_bytes),
            format_seconds(use.load_seconds),
            format_seconds(use.saved_seconds),
        ]
        for use in cell.tiers
    ]


def print_load(trace: Trace, load: Load) -> None:
    out = console()
    out.print(
        f"{trace.name} ({trace.format}): {count(load.requests, 'request')} in {load.seconds:,.0f} s", style="bold"
    )
    table = plain_table("tokens of", ">mean", ">median", ">95%", ">most")
    for name, spread in (("prompts", load.prompt), ("outputs", load.output)):
        table.add_row(name, *(f"{number:,.0f}" for number in spread))
    print_table(out, table)
    out.print(
        f"{load.requests_per_second:,.2f} requests and {load.prompt_tokens_per_second:,.0f} prompt tokens a second;"
        f" {load.busiest_minute_tokens:,} prompt tokens in the busiest minute"
    )
