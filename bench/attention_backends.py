"""On a GPU with FlashInfer: our Triton kernels against its own, over the same pages; milliseconds of a call in a graph.

FlashInfer plans each step on the host, which cannot be captured: `plan` is the time of that, once for all layers of a
step, and not part of the others. `ratio` is the better of FlashInfer's kernels over ours.

Run: PYTHONPATH=src:. python3 -m bench.attention_backends
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import torch

from bench.attention import Case, Shape, floor, layer, on_gpu, options, step
from kvweave.attention import Step
from kvweave.attention.flashinfer_attention import WORKSPACE_BYTES, FlashInferAttention, PlannedWrapper
from kvweave.attention.triton_attention import TritonAttention

PLAIN, WINDOW = Shape(24, 8, 128), Shape(24, 8, 128, window=1024)
CASES = [
    *(Case("24/8 x 128", PLAIN, rows, context) for rows in (1, 32) for context in (2048, 32768)),
    *(Case("window 1024", WINDOW, rows, context) for rows in (1, 32) for context in (2048, 32768)),
    Case("24/8 x 128", PLAIN, 1, 8192, 2048),
    Case("24/8 x 128", PLAIN, 1, 32768, 2048),
    Case("24/8 x 128", PLAIN, 8, 2048, 256),
    Case("24/8 x 128", PLAIN, 1, 32768, 64),
    Case("window 1024", WINDOW, 1, 8192, 2048),
]


def measure(case: Case) -> dict[str, Any]:
    arena, view = layer(case, "cuda", torch.bfloat16)
    with arena:
        taken = step(case, view, "cuda")
        queries = torch.randn(case.rows * case.queries, case.shape.heads, case.shape.dim, device="cuda").bfloat16()
        triton, other = TritonAttention(view, options(case)), FlashInferAttention(view, options(case))
        out = triton.attend(queries, taken)
        found = {
            "ours": on_gpu(lambda: triton.attend(queries, taken, out)),
            "plan": plan_seconds(other, queries, taken),
        }
        kernels = ("fa2",) if case.shape.window else ("fa2", "fa3")
        for name in kernels:
            wrapper = planned(other, queries, taken, name).wrapper
            found[name] = on_gpu(partial(wrapper.run, queries, other._pages, out=out))
    what = "decode" if case.queries == 1 else f"chunk of {case.queries}"
    line: dict[str, Any] = {
        "claim": f"{what}, {case.name}, {case.rows} rows of {case.context}, Triton against FlashInfer"
    }
    line |= {name: float(f"{seconds * 1e3:.4g}") for name, seconds in found.items()}
    peer = min(found[name] for name in kernels)
    more = {"peer": peer * 1e3, "unit": "ms", "ratio": peer / found["ours"]}
    return line | more | {"floor": floor(case, torch.bfloat16) * 1e3}


def plan_seconds(attention: FlashInferAttention, queries: torch.Tensor, taken: Step, times: int = 5) -> float:
    attention.plan(queries, taken)
    begun = time.perf_counter()
    for _ in range(times):
        taken.lengths.add_(0)  # another version: the plan is made anew
        attention.plan(queries, taken)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def planned(attention: FlashInferAttention, queries: torch.Tensor, taken: Step, kernels: str) -> PlannedWrapper:
    """A plan for some of FlashInfer's kernels, whichever ours would take."""
    usual = attention._plan_of(queries.shape[1], is_decode=taken.max_queries == 1)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    plan = PlannedWrapper(attention._wrapper_class(workspace, "NHD", backend=kernels), usual.shape, usual.how)
    numbers = taken.query_starts, taken.lengths, taken.tables[attention.view.tag]
    plan.make(numbers, attention._pages_of(*(tensor.cpu().numpy() for tensor in numbers)))
    return plan


def main() -> None:
    for case in CASES:
        print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
