"""The report of simulations: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvweave.cli.format import count
from kvweave.cli.format import format_size as short_size
from kvweave.cli.report.html import Tile, data, document, figure, section, table, tiles
from kvweave.cli.run.format_outcomes import format_seconds
from kvweave.cli.simulate.simulation_charts import curve_drawing, occupancy_drawing, split_drawing, timeline_drawing
from kvweave.cli.simulate.simulation_table import TIER_HEADS, tier_rows
from kvweave.sim import Cell, Simulation
from kvweave.units import format_size


def simulation_html(simulations: Sequence[Simulation]) -> str:
    """A part a trace, one below the other."""
    names = ", ".join(simulation.trace.name for simulation in simulations)
    parts = [part for simulation in simulations for part in _parts(simulation)]
    numbers = [cell.to_dict() for simulation in simulations for cell in simulation.cells]
    return document(f"kvweave simulate, {names}", [*parts, data("simulation", numbers)])


def _parts(simulation: Simulation) -> list[str]:
    trace = simulation.trace
    facts = (
        f"{count(len(trace.requests), 'request')} of {count(trace.sessions, 'session')} ({trace.format}),"
        f" {trace.prompt_tokens:,} prompt tokens, {trace.output_tokens:,} generated"
    )
    notes = "".join(f"<p>{escape(line)}</p>" for line in [*trace.invented, *simulation.assumptions])
    head = f"<h1>{escape(trace.name)} on {escape(simulation.model)}</h1>\n<p>{escape(facts)}</p>"
    return [
        head,
        tiles(_tiles(simulation)),
        f"<p><b>{escape(simulation.advice)}</b></p>",
        *_sections(simulation),
        notes,
    ]


def _tiles(simulation: Simulation) -> list[Tile]:
    cell = simulation.cells[-1]
    shown: list[Tile] = [
        (f"{cell.split.hit_rate:.1%}", f"of prompt tokens hit with {format_size(cell.memory)}", "good"),
        (format_seconds(cell.saved_seconds_with_tiers), "of prefill saved", "good"),
        (f"{cell.split.overlap / max(1, cell.split.prompt):.1%}", "with infinite memory, resuming anywhere", ""),
        (short_size(cell.evicted_bytes), "evicted", ""),
    ]
    return [*shown, (f"{cell.refused:,}", "requests refused: they do not fit", "bad")] if cell.refused else shown


def _sections(simulation: Simulation) -> list[str]:
    cell = simulation.cells[-1]
    return [
        section(
            "Curve",
            "How much is hit with how much memory. Dashed: caches that know the future, with the same bytes; nothing"
            " exceeds the bound.",
            figure(lambda sheet: curve_drawing(sheet, simulation)),
        ),
        section(
            "Misses",
            "Not kept: seen before; the rows were evicted, or never cached. No point there: rows are cached, but no"
            " state or window from which to go on.",
            figure(lambda sheet: split_drawing(sheet, simulation)),
        ),
        section(
            "Timeline", "The last policy and memory of the table.", figure(lambda sheet: timeline_drawing(sheet, cell))
        ),
        section("Occupancy", "", figure(lambda sheet: occupancy_drawing(sheet, cell))),
        section("Numbers", "", table(HEADS, (_row(cell) for cell in simulation.cells)) + _tiers(simulation)),
    ]


HEADS = (
    "memory",
    "policy",
    "hit",
    "never seen",
    "not kept",
    "no point",
    "placement",
    "Belady",
    "both",
    "bound",
    "saved",
)


def _row(cell: Cell) -> list[str]:
    split, oracles = cell.split, cell.oracles
    found = [split.hit, split.never_seen, split.evicted, split.no_point]
    shares = [f"{tokens / max(1, split.prompt):.3f}" for tokens in found]
    if oracles is None:
        shares += ["-"] * 4
    else:
        known = (oracles.placement, oracles.belady, oracles.both, oracles.bound)
        shares += [f"{tokens / max(1, split.prompt):.3f}" for tokens in known]
    return [format_size(cell.memory), cell.policy, *shares, format_seconds(cell.saved_seconds)]


def _tiers(simulation: Simulation) -> str:
    rows = [row for cell in simulation.cells for row in tier_rows(cell)]
    heads = ("memory", "policy", *(" ".join(head.split()) for head in TIER_HEADS))
    return table(heads, rows) if rows else ""
