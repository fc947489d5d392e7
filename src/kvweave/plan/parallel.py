"""Which rank of a parallel model: what it keeps of each role, and of which layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvweave.errors import PlanError, SpecError
from kvweave.spec import ModelSpec


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
