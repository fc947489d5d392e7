"""On a GPU: a decode step on pages, replayed as a graph, takes less than twice the time to read weights and KV once.

Models of about 3 billion parameters in bfloat16, 2k and 32k tokens of context, 1 row and 32 (16 with 32k). Ours is a
whole step as the engine makes it, one ahead of what is known here: pages from the core, the replay, the next tokens,
the commit. Contexts are not computed but filled in, in pages of their own. Peers: DynamicCache, and StaticCache
compiled, by transformers' `generate` after a real prompt, the time of a token out of two lengths of answers; `generate`
of KVWeave beside them, where there is one row. `of_floor` is our time over the floor, `ratio` the best peer over ours.

Run: PYTHONPATH=src:. python3 -m bench.decode_gpu [--models llama ...] [--no-peers] [--no-compile]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from typing import Any

import numpy as np
import torch
import transformers

from bench.gpu_models import MODELS, build, floor_seconds
from kvweave.attention import UNKNOWN_ID, StepSize
from kvweave.cache import Sequence
from kvweave.integrations.transformers import KVWeave
from kvweave.tensor import carry_out

CELLS = ((1, 2048), (32, 2048), (1, 32768), (16, 32768))
STEPS, ANSWERS = 64, (16, 48)


def filled(weave: KVWeave, rows: int, context: int) -> list[Sequence]:
    """Sequences of so many tokens whose KV nobody has computed."""
    sequences = []
    for _ in range(rows):
        sequence = weave.core.open(np.random.randint(3, 60000, context), reuse=False)
        while sequence.length < context:
            end = min(sequence.stop or context, context, sequence.length + 4096)
            carry_out(weave.arena, weave.core.extend(sequence, end - sequence.length))
            carry_out(weave.arena, weave.core.commit(sequence, share=False))
        sequences.append(sequence)
    return sequences


def fill_pages(weave: KVWeave) -> None:
    """Random numbers in all pages: zeros are read faster than data, and what was there may be NaN."""
    for group in weave.plan.groups:
        for layer in group.layers:
            for role in weave.arena.layer(layer, group.tag).roles.values():
                role.tensor.normal_(std=0.5)


@torch.no_grad()
def on_pages(weave: KVWeave, rows: int, context: int) -> dict[str, float]:
    """Seconds of a step, and of its parts on the host."""
    sequences, counts = filled(weave, rows, context), [1] * rows
    size = weave.graphs.size_of(counts, [context] * rows)
    assert size, "the model decodes by graphs"
    ids, launched = np.full(rows, 7), deque[torch.cuda.Event]()
    start, host = time.perf_counter(), 0.0
    for step in range(STEPS + 8):
        if step == 8:
            torch.cuda.synchronize()
            start, host = time.perf_counter(), 0.0
        began = time.perf_counter()
        carry_out(weave.arena, weave.core.extend(sequences, 1))
        chosen = weave.graphs.run(sequences, counts, ids, size).argmax(-1)
        weave.graphs.note_tokens(sequences, chosen)
        chosen.to("cpu", non_blocking=True)
        launched.append(torch.cuda.current_stream().record_event())
        ids = np.full(rows, UNKNOWN_ID)
        host += time.perf_counter() - began
        if len(launched) > 1:  # the engine runs one step ahead
            launched.popleft().synchronize()
            began = time.perf_counter()
            lengths = [context + step + 1 - len(launched)] * rows
            carry_out(weave.arena, weave.core.commit(sequences, lengths, share=False))
            host += time.perf_counter() - began
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / STEPS
    replay = replay_seconds(weave, size)
    for sequence in sequences:
        weave.core.close(sequence, keep=False)
    return {"step": whole, "host": host / STEPS, "replay": replay}


def replay_seconds(weave: KVWeave, size: StepSize) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        weave.graphs.replay(size)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 20e3


def by_generate(generate: Any, rows: int, context: int, **options: Any) -> float:
    """Seconds a token of transformers' own loop."""
    ids = torch.randint(3, 60000, (rows, context), device="cuda")
    times = []
    for new in (*ANSWERS, *ANSWERS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **how, **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return (times[3] - times[2]) / (ANSWERS[1] - ANSWERS[0])


def peer_seconds(model: Any, rows: int, context: int) -> dict[str, float]:
    found = {}
    for way, options in {"dynamic": {}, "static": {"cache_implementation": "static"}}.items():
        try:
            found[way] = by_generate(model.generate, rows, context, **options)
            print(way, rows, context, found[way] * 1e3, "ms", flush=True)
        except Exception as error:  # a peer that does not serve the model, or has no memory for it
            print(way, "cannot:", repr(error)[:160], flush=True)
        torch.cuda.empty_cache()
    return found


def measure(name: str, *, with_peers: bool, compile_layers: bool) -> None:
    model = build(MODELS[name]())
    ours = our_seconds(name, model, compile_layers=compile_layers)
    gc.collect()
    torch.cuda.empty_cache()
    for (rows, context), found in ours.items():
        peers: dict[str, float] = {}
        if with_peers and (rows == 1 or context < 8192):
            peers = peer_seconds(model, rows, context)
        best = min(peers.values(), default=float("nan"))
        facts = {"claim": f"decode {name} {rows} x {context}", "ours": found["step"] * 1e3, "peer": best * 1e3}
        facts |= {"unit": "ms a step", "ratio": best / found["step"], "of_floor": found["step"] / found["floor"]}
        print(json.dumps(facts | {way: seconds * 1e3 for way, seconds in peers.items()}), flush=True)


def our_seconds(name: str, model: Any, *, compile_layers: bool) -> dict[tuple[int, int], dict[str, float]]:
    ours: dict[tuple[int, int], dict[str, float]] = {}
    with KVWeave(model, "76GiB", rows=64, max_tokens=40960, compile_layers=compile_layers) as weave:
        fill_pages(weave)
        for rows, context in CELLS:
            start = time.perf_counter()
            ours[rows, context] = on_pages(weave, rows, context)
            floor = floor_seconds(model, weave.served.spec, rows, context)
            ours[rows, context] |= {"floor": floor, "with setting up": time.perf_counter() - start}
            if rows == 1:
                ours[rows, context]["generate"] = by_generate(weave.generate, rows, context)
            print(name, rows, context, {k: round(v * 1e3, 3) for k, v in ours[rows, context].items()}, flush=True)
    return ours


def main() -> None:
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        measure(name, with_peers=not options.no_peers, compile_layers=not options.no_compile)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
