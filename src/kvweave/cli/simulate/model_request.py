"""The model that `kvweave simulate` was asked about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvweave.cli.read_config import read_config
from kvweave.errors import ConfigError
from kvweave.plan import Parallel, Plan, make_plan
from kvweave.prefix import Retention
from kvweave.sim import Trace
from kvweave.sim.replay import STEP_TOKENS
from kvweave.sim.simulate import PlanOf
from kvweave.sim.trace import checked_tokens
from kvweave.spec import codec
from kvweave.spec.hf import from_config
from kvweave.units import parse_bytes

MEMORIES = ("20GiB", "80GiB", "320GiB")
"""A quarter of a large GPU, one, and four."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The retention and the most tokens of a step of an engine that was recorded with its plan."""

    retention: Retention
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A model's name, its plan for a memory, the memories to try, and how the engine that recorded the trace, and its
    plan, kept points and took steps."""

    model: str
    plan_of: PlanOf
    memories: list[int]
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The model, as far as a plan needs it; `config` None: the plan that a recording carries."""

    config: str | None
    memories: tuple[str, ...]
    dtype: str = "auto"
    block_tokens: int = 16
    tp: int = 1

    def subject(self, trace: Trace) -> Subject:
        if self.config is None:
            return self._recorded(trace)
        spec = from_config(read_config(self.config), dtype=self.dtype)
        plan_of = partial(make_plan, spec, block_tokens=self.block_tokens, parallel=Parallel(tp=self.tp))
        return Subject(self.config, plan_of, [parse_bytes(size) for size in self.memories or MEMORIES])

    def _recorded(self, trace: Trace) -> Subject:
        recorded = trace.recorded_with
        if "plan" not in recorded:
            raise ConfigError(f"{trace.name} says nothing of a model: give one with --model, such as llama-3.1-8b")
        plan = Plan.from_dict(recorded["plan"])
        retention = codec.from_dict(Retention, recorded.get("retention", {}), "retention")
        step_tokens = checked_tokens(trace.name, "step_tokens", recorded.get("step_tokens", STEP_TOKENS), least=1)
        memories = [parse_bytes(size) for size in self.memories] or [plan.memory]
        how = Recorded(retention, step_tokens)
        return Subject(plan.model_type, partial(_only, trace.name, plan), memories, how)


def _only(name: str, plan: Plan, memory: int) -> Plan:
    """The plan of a recording, for its own memory."""
    if memory != plan.memory:
        raise ConfigError(
            f"{name} carries a plan for {plan.memory:,} bytes and no model: give --model to try {memory:,} bytes"
        )
    return plan
