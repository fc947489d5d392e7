"""WHAT IF: real traces through the real cache, oracles beside it, and what memory and tiers would save."""

from kvweave.sim.foresight import Foresight
from kvweave.sim.geometry import Geometry, usable_bytes
from kvweave.sim.offered_load import Load, load_of
from kvweave.sim.oracles import ORACLES, Oracle, oracle_hits
from kvweave.sim.policies import load_policy
from kvweave.sim.replay import Replay, replay
from kvweave.sim.result import Cell, OracleHits, Simulation, TokenSplit
from kvweave.sim.simulate import Options, simulate
from kvweave.sim.tiers import SimulatedTier, TierUse
from kvweave.sim.trace import Request, Trace
from kvweave.sim.traces import FORMATS, Reading, load_tokenizer, read_trace
from kvweave.sim.upper_bound import bound_tokens
from kvweave.trace_writer import TraceWriter

__all__ = [
    "FORMATS",
    "ORACLES",
    "Cell",
    "Foresight",
    "Geometry",
    "Load",
    "Options",
    "Oracle",
    "OracleHits",
    "Reading",
    "Replay",
    "Request",
    "SimulatedTier",
    "Simulation",
    "TierUse",
    "TokenSplit",
    "Trace",
    "TraceWriter",
    "bound_tokens",
    "load_of",
    "load_policy",
    "load_tokenizer",
    "oracle_hits",
    "read_trace",
    "replay",
    "simulate",
    "usable_bytes",
]
