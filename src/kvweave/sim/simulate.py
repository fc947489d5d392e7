"""A simulation: one trace, several memories and policies, oracles beside each memory, tiers below it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from kvweave.errors import BadOption
from kvweave.plan import Plan
from kvweave.prefix import Retention
from kvweave.sim.advice import advice
from kvweave.sim.foresight import Foresight
from kvweave.sim.geometry import Geometry, usable_bytes
from kvweave.sim.oracles import ORACLES, oracle_hits
from kvweave.sim.policies import AnyPolicy, policy_of_replay
from kvweave.sim.replay import STEP_TOKENS, Replay, replay
from kvweave.sim.result import Cell, OracleHits, Simulation, splits, timeline, total
from kvweave.sim.tiers import PREFILL_SPEED, SimulatedTier, tier_uses
from kvweave.sim.trace import Trace
from kvweave.sim.upper_bound import bound_tokens

PlanOf = Callable[[int], Plan]
"""Makes the plan of a model for a number of bytes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be simulated. `policies` by name, built in or a user's own: each replay makes an object of a class,
    and uses a function or an object as it is."""

    memories: Sequence[int]
    policies: Mapping[str, AnyPolicy] = field(default_factory=lambda: {"adaptive": "adaptive"})
    retention: Retention = field(default_factory=Retention)
    tiers: Sequence[SimulatedTier] = ()
    prefill_speed: float = PREFILL_SPEED
    step_tokens: int = STEP_TOKENS
    whole_outputs: bool = True
    with_oracles: bool = True

    def __post_init__(self) -> None:
        if not self.memories or not self.policies:
            raise BadOption("a simulation needs at least one memory and one policy")
        if not 0 < self.prefill_speed < math.inf or self.step_tokens < 1:
            raise BadOption(
                "prefill speed and tokens a step must be finite and above 0, got"
                f" {self.prefill_speed:g} and {self.step_tokens}"
            )
        sizes = [max(self.memories), *(tier.memory for tier in self.tiers)]
        if any(lower <= upper for upper, lower in itertools.pairwise(sizes)):
            raise BadOption(f"a tier holds all that is above it, so it must be larger; got {sizes} bytes")

    @property
    def num_replays(self) -> int:
        """How often the trace will be replayed; tiers once more for each memory that refuses other requests."""
        tiers, own = len(self.tiers) * len(self.policies), len(self.memories) if self.with_oracles else 0
        return len(self.memories) * len(self.policies) + tiers + own

    @property
    def assumptions(self) -> tuple[str, ...]:
        told = (
            f"requests run one at a time, in the order of their arrival, in steps of {self.step_tokens:,} tokens",
            "outputs are computed in one step, or a block at a time where there are windows"
            if self.whole_outputs
            else "outputs are computed a block at a time, as token by token evicts",
            f"prefill computes {self.prefill_speed:,.0f} tokens a second, whatever the length",
        )
        tiers = "a tier holds what a cache of its size would under the same policy; loads do not overlap computing"
        return (*told, tiers) if self.tiers else told


def simulate(
    trace: Trace, plan_of: PlanOf, options: Options, *, model: str = "", on_request: Callable[[], None] | None = None
) -> Simulation:
    """Replay a trace with every policy and memory. `on_request` is called after each request of each replay."""
    return _Simulator(trace, plan_of, options, on_request).run(model)


class _Simulator:
    def __init__(self, trace: Trace, plan_of: PlanOf, options: Options, on_request: Callable[[], None] | None) -> None:
        trace.check_content()
        self.trace, self.options, self.on_request = trace, options, on_request
        self.plan_of = cache(plan_of)
        self.foresight = cache(partial(Foresight, trace))
        self.replay = cache(self._replay)
        self.first = next(iter(options.policies))

    def run(self, model: str) -> Simulation:
        cells = tuple(self._cells())
        said = advice([cell for cell in cells if cell.policy == self.first])
        return Simulation(self.trace, model, cells, said, self.options.assumptions)

    def _cells(self) -> Iterator[Cell]:
        for memory in sorted(set(self.options.memories)):
            oracles = self._oracles(memory) if self.options.with_oracles else None
            for policy in self.options.policies:
                yield self._cell(policy, memory, oracles)

    def _replay(self, policy: str, memory: int, refused: frozenset[int] = frozenset()) -> Replay:
        return replay(
            self.trace,
            self.plan_of(memory),
            policy=policy_of_replay(self.options.policies[policy]),
            retention=self.options.retention,
            step_tokens=self.options.step_tokens,
            whole_outputs=self.options.whole_outputs,
            refused=refused,
            on_request=self.on_request,
        )

    def _oracles(self, memory: int) -> OracleHits:
        plan = self.plan_of(memory)
        geometry, capacity = Geometry.of(plan), usable_bytes(plan)
        # what never fits is refused whatever the policy
        foresight = self.foresight(geometry.grid, self.replay(self.first, memory).refused_requests)
        found = {oracle.name: sum(oracle_hits(foresight, geometry, oracle, capacity)) for oracle in ORACLES}
        own = replay(
            self.trace,
            plan,
            policy="lru",
            placement=foresight,
            step_tokens=self.options.step_tokens,
            whole_outputs=self.options.whole_outputs,
            on_request=self.on_request,
        )
        bound = bound_tokens(foresight, geometry, capacity)
        return OracleHits(**found, bound=bound, cache_with_placement=own.hit_tokens)

    def _cell(self, policy: str, memory: int, oracles: OracleHits | None) -> Cell:
        trace, plan, options = self.trace, self.plan_of(memory), self.options
        done = self.replay(policy, memory)
        geometry = Geometry.of(plan)
        columns = splits(self.foresight(geometry.grid, frozenset()), done)
        split = total(columns)
        refused = done.refused_requests
        tiers = [(tier, self.replay(policy, tier.memory, refused).hits) for tier in options.tiers]
        computed = sum(r.num_computed for n, r in enumerate(trace.requests) if n not in refused) - split.hit
        return Cell(
            trace=trace.name,
            policy=policy,
            memory=memory,
            requests=len(trace.requests),
            refused=int(done.refused.sum()),
            split=split,
            output_tokens=trace.output_tokens,
            kinds=done.hits_by_kind(),
            saved_seconds=split.hit / options.prefill_speed,
            evicted_bytes=done.evicted_bytes,
            computed_bytes=computed // geometry.grid * geometry.row_bytes,
            oracles=oracles,
            tiers=tuple(tier_uses(done.hits, tiers, geometry, options.prefill_speed)),
            timeline=timeline(trace, columns),
            occupancy=done.occupancy,
            groups=tuple(group.tag for group in plan.groups),
            replay=done,
        )
