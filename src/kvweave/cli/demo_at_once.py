"""The part of the demo with many requests at once: an engine on pages, and transformers' own batch. Needs torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import torch

from kvweave.cli.run.load_model import load
from kvweave.cli.run.workload import PromptWriter, WorkloadSize, agents, play
from kvweave.engine import Engine, Sampling


@dataclass(frozen=True, slots=True)
class AtOnceOutcome:
    """Requests that came at once: seconds until the last answer, in both ways."""

    name: str
    requests: int
    batch_seconds: float
    engine_seconds: float
    cached_share: float
    are_equal: bool


def ask_at_once(example: str, parameters: str, memory: str, size: WorkloadSize, new_tokens: int) -> AtOnceOutcome:
    """The first requests of all parties, greedily; `size` has one turn."""
    loaded = load(example, size=parameters, dtype="auto", device="cpu", seed=0)
    model = loaded.model
    asks = agents(PromptWriter(loaded.text, Random(1)), size)
    prompts = [ask.prompt for ask in play(asks, lambda _: [])]
    ids = torch.tensor(prompts)
    how = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    start = time.perf_counter()
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, ids.shape[1] :].tolist()
    batch_seconds = time.perf_counter() - start
    with Engine(model, memory) as engine:
        start = time.perf_counter()
        results = engine.generate(prompts, Sampling(new_tokens, stop_tokens=()))
        engine_seconds = time.perf_counter() - start
    share = sum(result.cached_tokens for result in results) / ids.numel()
    are_equal = [list(result.tokens) for result in results] == theirs
    return AtOnceOutcome(loaded.name, len(prompts), batch_seconds, engine_seconds, share, are_equal)
