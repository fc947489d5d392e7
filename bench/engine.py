"""Many requests at once: 32 prompts in families that share their beginnings, answered in four ways.

Prompts share a system prompt with others of their family and end in a question of their own, as bots of one service get
them. The ways: transformers' `generate` one by one and in one batch, `KVWeave.generate` one by one, and the engine.
Seeded random weights, float32 on a CPU; seconds that the process computed, whoever else computes, and how
many answers are those of transformers one by one.

Run: make bench NAME=engine
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.decode import llama
from bench.transformers_cpu import gemma, qwen
from kvweave.engine import Engine, Sampling
from kvweave.integrations.transformers import KVWeave

FAMILIES, EACH, SHARED, OWN, NEW = 8, 4, 256, 32, 16
HOW: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
Answers = list[list[int]]


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(3, 8000, (count,), generator=random).tolist()
        return found

    systems = [tokens(SHARED) for _ in range(FAMILIES)]
    return [systems[number % FAMILIES] + tokens(OWN) for number in range(FAMILIES * EACH)]


def by_engine(model: Any, asked: list[list[int]]) -> Answers:
    with Engine(model, "1GiB", budget=512, max_tokens=4096) as engine:
        return [list(result.tokens) for result in engine.generate(asked, Sampling(NEW, stop_tokens=()))]


def one_by_one(model: Any, asked: list[list[int]]) -> Answers:
    with KVWeave(model, "1GiB", max_tokens=4096) as weave:
        return [_new(weave.generate(torch.tensor([ids]), **HOW), len(ids))[0] for ids in asked]


def padded_batch(model: Any, asked: list[list[int]]) -> Answers:
    ids = torch.tensor(asked)
    return _new(model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **HOW), ids.shape[1])


def plain_one_by_one(model: Any, asked: list[list[int]]) -> Answers:
    return [padded_batch(model, [ids])[0] for ids in asked]


def _new(sequences: torch.Tensor, start: int) -> Answers:
    found: Answers = sequences[:, start:].tolist()
    return found


WAYS: dict[str, Callable[[Any, list[list[int]]], Answers]] = {
    "transformers one by one": plain_one_by_one,
    "transformers padded batch": padded_batch,
    "KVWeave one by one": one_by_one,
    "engine": by_engine,
}


def main() -> None:
    transformers.logging.set_verbosity_error()
    asked = prompts()
    for name, build in {"llama": llama, "gemma-3": gemma, "qwen3-next": qwen}.items():
        torch.manual_seed(0)
        model, expected = build().eval(), None
        for way, serve in WAYS.items():
            start = time.process_time()
            answers = serve(model, asked)
            used = time.process_time() - start
            expected = expected or answers
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            facts = {"cpu_s": round(used, 2), "tokens_a_cpu_s": round(len(asked) * NEW / used, 1)}
            print(json.dumps({"model": name, "way": way, **facts, "equal": f"{same}/{len(asked)}"}), flush=True)


if __name__ == "__main__":
    main()
