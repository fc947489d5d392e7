"""Which rank of a parallel model: what it keeps of each role, and of which layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvweave.errors import PlanError, SpecError
from kvweave.spec import ModelSpec, Segment


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of tensor, context and pipeline parallelism, and the rank in each."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    tp_rank: int = 0
    cp_rank: int = 0
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp"):
            degree, rank = getattr(self, name), getattr(self, f"{name}_rank")
            if not isinstance(degree, int) or not isinstance(rank, int):
                raise PlanError(f"{name} and its rank must be whole numbers, got {degree!r} and {rank!r}")
            if degree < 1:
                raise PlanError(f"{name} must be at least 1, got {degree}")
            if not 0 <= rank < degree:
                raise PlanError(f"{name}_rank {rank} is not among the ranks 0 to {degree - 1}")

    def stage(self, num_layers: int) -> range:
        """The layers of this pipeline stage: as even as can be, the first stages the smaller ones."""
        if self.pp > num_layers:
            raise PlanError(f"pp={self.pp} stages for {num_layers} layers: some would be empty")
        return range(num_layers * self.pp_rank // self.pp, num_layers * (self.pp_rank + 1) // self.pp)


def shard(spec: ModelSpec, parallel: Parallel) -> ModelSpec:
    """The model as one rank keeps it. Layers keep their numbers: those of other stages are there, but empty."""
    mine = spec.map_caches(lambda cache: replace(cache, roles=tuple(role.shard(parallel.tp) for role in cache.roles)))
    if parallel.pp == 1:
        return mine
    stage = parallel.stage(len(spec.layers))
    try:
        return mine.restrict(stage)
    except SpecError as error:
        held = f"stage {parallel.pp_rank} of {parallel.pp} holds layers {stage.start} to {stage.stop - 1}"
        raise PlanError(f"{held}, but {error}; choose pp so that both are in one stage") from None


def replicas(spec: ModelSpec, tp: int) -> Iterator[str]:
    """What tensor-parallel ranks do not divide among them, a sentence a group and cause."""
    for tag, (cache, _) in spec.groups().items():
        if tp > 1 and not any(role.split for role in cache.roles):
            yield f"group {tag!r} has no heads to divide: each of the {tp} tp ranks keeps all of it"
        for units in sorted({segment.units for role in cache.roles for segment in role.split}):
            names = ", ".join(role.name for role in cache.roles if any(s.units == units for s in role.split))
            yield from _replicas(tag, names, units, tp)


def _replicas(tag: str, names: str, units: int, tp: int) -> Iterator[str]:
    kept = Segment(units).shard(tp).units
    if kept * tp <= units:
        return
    what, copies = f"group {tag!r}: the {units} heads or groups of {names}", tp * kept // units
    if tp % units == 0:
        yield f"{what} are fewer than the {tp} tp ranks: each rank keeps {kept}, and each is on {copies} ranks"
        return
    degrees = ", ".join(str(degree) for degree in range(2, units + 1) if units % degree == 0)
    yield (
        f"{what} are not divided by tp {tp}: each rank keeps {'all' if kept == units else kept} of them, and each is on"
        f" {copies} ranks; tp of {degrees} divides them"
    )
