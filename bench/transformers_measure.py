"""What the benches of the transformers integration share: clocks around `generate`, and lines of JSON."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvweave.integrations.transformers import KVWeave

Generate = Callable[..., Any]


class Clock(BaseStreamer):  # type: ignore[misc]
    """When the first token came."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002  (the prompt comes first, then token by token)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first_token(self) -> float:
        return self.times[2] - self.times[0]


def clocked(generate: Generate, device: torch.device, ids: torch.Tensor, num_tokens: int, **options: Any) -> Clock:
    how = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    clock = Clock(device)
    generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, streamer=clock, **how, **options)
    return clock


def by_hand(model: Any, prefix: torch.Tensor) -> Callable[[], DynamicCache]:
    """transformers' own best: the past of the prefix kept by hand, and copied for each use."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return lambda: copy.deepcopy(cache)


def first_tokens(model: Any, weave: KVWeave, shared: int, tail: int, rounds: int) -> dict[str, float]:
    """Median seconds to the first token of prompts that share their first tokens, in five ways.

    With the second prompt on pages it shows where prompts part, so from the third on all of the shared part is found.
    """
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (1, count), generator=random).to(model.device)

    prefix = tokens(shared)
    seconds: dict[str, list[float]] = {"dynamic": [], "by_hand": [], "cold": [], "sibling": [], "warm": []}
    kept = by_hand(model, prefix)
    for _ in range(rounds):
        weave.reset()
        for way in ("dynamic", "by_hand", "cold", "sibling", "warm"):
            ids = torch.cat([prefix, tokens(tail)], dim=1)
            start = time.perf_counter()
            extra = {"past_key_values": kept()} if way == "by_hand" else {}
            copied = time.perf_counter() - start
            generate = model.generate if way in ("dynamic", "by_hand") else weave.generate
            seconds[way].append(clocked(generate, model.device, ids, 2, **extra).first_token + copied)
        assert weave.records[-1].reused_tokens >= shared - 2 * weave.core.grid, weave.records[-1]
    return {way: statistics.median(values) for way, values in seconds.items()}


def steps(model: Any, weave: KVWeave, context: int, num_tokens: int) -> dict[str, float]:
    """Median seconds of the model for a token after so many, on pages and on DynamicCache, step by step in turns."""
    ids = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    seconds: dict[str, list[float]] = {"pages": [], "dynamic": []}
    with weave.past(ids) as past, torch.no_grad():
        caches = {"pages": past, "dynamic": by_hand(model, ids[:, :-1])()}
        for token in ids[0, -1:].repeat(num_tokens):
            for way, cache in caches.items():
                start = time.perf_counter()
                model(token.view(1, 1), past_key_values=cache, use_cache=True).logits.argmax().item()
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(values) for way, values in seconds.items()}


def line(claim: str, ours: float, peer: float, unit: str) -> None:
    ratio = ours / peer if unit.endswith("/s") else peer / ours
    print(json.dumps({"claim": claim, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}), flush=True)


def report(name: str, model: Any, weave: KVWeave, shared: int, rounds: int) -> None:
    first = first_tokens(model, weave, shared, tail=32, rounds=rounds)
    wanted = f"{name}: first token, {shared} shared tokens"
    line(f"{wanted}, warm against a cold DynamicCache", first["warm"], first["dynamic"], "s")
    line(f"{wanted}, second prompt against a cold DynamicCache", first["sibling"], first["dynamic"], "s")
    line(f"{wanted}, warm against past_key_values kept by hand", first["warm"], first["by_hand"], "s")
    line(f"{wanted}, cold against a cold DynamicCache", first["cold"], first["dynamic"], "s")
    each = steps(model, weave, shared, num_tokens=64)
    line(f"{name}: a decoded token after {shared}, against DynamicCache", each["pages"], each["dynamic"], "s")
    line(f"{name}: decoded tokens/s after {shared}", 1 / each["pages"], 1 / each["dynamic"], "tokens/s")
