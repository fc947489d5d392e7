"""On a GPU: many requests at once, against transformers' `generate_batch` and a static batch of its own.

32 requests of 2,048 tokens, of which 1,536 are shared in four families, and 64 new tokens each; a model of about three
billion random parameters in bfloat16. Ours is the engine, cold, with all that it computes. Then the first token after
32k shared tokens and a question of 32, by the engine, against a past kept by hand and copied.

Run: PYTHONPATH=src:. python3 -m bench.engine_gpu [--models llama ...] [--no-peers]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, GenerationConfig

from bench.gpu_models import MODELS, build, timed
from kvweave.engine import Engine, Sampling

FAMILIES, EACH, SHARED, OWN, NEW, LONG, QUESTION = 4, 8, 1536, 512, 64, 32768, 32


def tokens(count: int) -> list[int]:
    found: list[int] = torch.randint(3, 60000, (count,)).tolist()
    return found


def prompts() -> list[list[int]]:
    systems = [tokens(SHARED) for _ in range(FAMILIES)]
    return [systems[number % FAMILIES] + tokens(OWN) for number in range(FAMILIES * EACH)]


def by_engine(engine: Engine, asked: list[list[int]]) -> None:
    engine.generate(asked, Sampling(NEW, stop_tokens=()))


def static_batch(model: Any, asked: list[list[int]]) -> None:
    ids = torch.tensor(asked, device="cuda")
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **how)


def generate_batch(model: Any, asked: list[list[int]]) -> None:
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(asked, generation_config=how)


def peer_rate(way: Callable[[Any, list[list[int]]], None], model: Any) -> float | None:
    """Tokens a second, the second time; None where the peer does not serve the model."""
    try:
        way(model, prompts())
        asked = prompts()
        return FAMILIES * EACH * NEW / timed(lambda: way(model, asked))
    except Exception as error:
        print(way.__name__, "cannot:", repr(error)[:160], flush=True)
        return None


def first_token(engine: Engine, rounds: int = 5) -> float:
    shared = tokens(LONG)
    times = []
    for _ in range(rounds + 3):
        request = engine.submit(shared + tokens(QUESTION), Sampling(1, stop_tokens=()))
        times.append(timed(request.result))
    return statistics.median(times[3:])


def first_token_by_hand(model: Any, rounds: int = 3) -> float:
    shared, cache = torch.tensor([tokens(LONG)], device="cuda"), DynamicCache(config=model.config)
    times = []
    with torch.no_grad():
        for start in range(0, LONG, 8192):
            model(shared[:, start : start + 8192], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(rounds):
            question = torch.tensor([tokens(QUESTION)], device="cuda")

            def ask(question: torch.Tensor = question) -> None:
                past = copy.deepcopy(cache)
                model(question, past_key_values=past, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

            times.append(timed(ask))
    return statistics.median(times)


def line(claim: str, ours: float, peers: dict[str, float], unit: str, is_rate: bool) -> None:
    best = (max if is_rate else min)(peers.values(), default=float("nan"))
    ratio = ours / best if is_rate else best / ours
    print(json.dumps({"claim": claim, "ours": ours, "peer": best, "unit": unit, "ratio": ratio, **peers}), flush=True)


def main() -> None:
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        torch.manual_seed(0)
        model, peers = build(MODELS[name]()), {}
        with Engine(model, "40GiB", budget=8192, max_running=32, max_tokens=40960) as engine:
            by_engine(engine, prompts())
            seconds = timed(lambda engine=engine: by_engine(engine, prompts()))  # type: ignore[misc]
            first = first_token(engine)
            print(name, engine.stats().steps, seconds, first, flush=True)
        torch.cuda.empty_cache()
        if not options.no_peers:
            peers = {way.__name__: rate for way in (static_batch, generate_batch) if (rate := peer_rate(way, model))}
        line(f"{name}: 32 requests of 2,048 tokens", FAMILIES * EACH * NEW / seconds, peers, "tokens/s", True)
        by_hand = {} if options.no_peers else {"by_hand": first_token_by_hand(model) * 1e3}
        line(f"{name}: first token after {LONG} shared", first * 1e3, by_hand, "ms", False)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
