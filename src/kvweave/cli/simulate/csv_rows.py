"""`kvweave simulate --csv`: a row a request, policy and memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from kvweave.prefix import Kind
from kvweave.sim import Cell, Simulation

HEADS = [
    "trace",
    "policy",
    "memory",
    "request",
    "arrival",
    "session",
    "prompt_tokens",
    "output_tokens",
    "hit_tokens",
    "row_tokens",
    "kind",
    "refused",
]


def requests_csv(simulations: Sequence[Simulation]) -> str:
    """`row_tokens`: tokens of which rows were there; `kind`: of the point that was hit, before it was hit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADS)
    for simulation in simulations:
        for cell in simulation.cells:
            writer.writerows(_rows(simulation, cell))
    return out.getvalue()


def _rows(simulation: Simulation, cell: Cell) -> Iterator[tuple[object, ...]]:
    done, names = cell.replay, {int(kind): kind.name.lower() for kind in Kind}
    for number, request in enumerate(simulation.trace.requests):
        yield (
            cell.trace,
            cell.policy,
            cell.memory,
            number,
            round(request.arrival, 6),
            request.session,
            request.prompt_tokens,
            request.output_tokens,
            int(done.hits[number]),
            int(done.rows[number]),
            names.get(int(done.kinds[number]), ""),
            int(done.refused[number]),
        )
