"""Attention over pages in place against torch's SDPA over dense tensors, as DynamicCache would hold them.

Decodes, and chunks of a prompt. On a CPU: float32, one thread, CPU time. On a GPU: bfloat16, calls captured as graphs,
and `of_floor`, our time over what the memory needs for the bytes of keys and values. `ratio` is SDPA's time over ours;
for MLA, SDPA has all heads as queries of one head.

Run: make bench NAME=attention
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvweave import make_plan
from kvweave.attention import Attention, AttentionOptions, Step, open_attention
from kvweave.plan import PoolRequest
from kvweave.spec import DType, Reach, Window
from kvweave.tensor import GQA, MLA, Arena, LayerRequest, LayerView, assemble

BYTES_PER_SECOND = 4.17e12
"""What a copy on an H200 reaches."""
sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    latent: int = 0
    """Of `dim` columns, those that are the value too (MLA)."""
    window: int | None = None
    quant: str = "auto"

    @property
    def reach(self) -> Reach | None:
        return None if self.window is None else Window(self.window)


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    rows: int
    context: int
    queries: int = 1

    @property
    def seen(self) -> int:
        """Tokens of context that are read, a row."""
        window = self.shape.window
        return self.context if window is None else min(self.context, window + self.queries - 1)


LLAMA, GEMMA, LATENT = Shape(32, 8, 128), Shape(16, 8, 256), Shape(128, 1, 576, latent=512)
ON_CPU = {"Llama 32/8 x 128": LLAMA, "MHA 8 x 64": Shape(8, 8, 64), "GQA 8/2 x 64": Shape(8, 2, 64)}
ON_GPU = {"Llama 32/8 x 128": LLAMA, "Gemma-3 16/8 x 256": GEMMA, "MLA 128/1 x 576": LATENT}


def cases(device: str) -> list[Case]:
    if device == "cpu":
        decodes = [
            Case(name, shape, rows, context)
            for name, shape in ON_CPU.items()
            for rows in (1, 8)
            for context in (512, 2048, 8192)
        ]
        return [*decodes, *(Case(name, shape, 1, 2048, 256) for name, shape in ON_CPU.items())]
    decodes = [
        Case(name, shape, rows, context)
        for name, shape in ON_GPU.items()
        for rows in (1, 32)
        for context in (2048, 32768)
    ]
    window, narrow = replace(GEMMA, window=1024), replace(LLAMA, quant="fp8_token_head")
    decodes += [Case("Gemma-3 window 1024", window, rows, 32768) for rows in (1, 32)]
    decodes += [Case("Llama, fp8 and scales", narrow, rows, 32768) for rows in (1, 32)]
    return [*decodes, *(Case(name, shape, 1, 8192, 2048) for name, shape in ON_GPU.items())]


def layer(case: Case, device: str, dtype: torch.dtype) -> tuple[Arena, LayerView]:
    """A layer whose pages of 16 tokens hold random numbers."""
    shape, name = case.shape, DType.parse(dtype)
    request = LayerRequest(0, heads=shape.kv_heads, key_dim=shape.dim, dtype=name, quant=shape.quant)
    backend = MLA(shape.latent, shape.dim - shape.latent) if shape.latent else GQA()
    tag = "latent" if shape.latent else "full"
    pages = case.rows * case.context // 16 + 1
    plan = make_plan(assemble("bench", [(backend, request)]), "100GB", own_pools={tag: PoolRequest(pages=pages)})
    arena = Arena(plan, device)
    view = arena.layer(0)
    for role in view.roles.values():
        for plane in role.planes:
            _fill(plane.tensor)
    return arena, view


def _fill(rows: torch.Tensor) -> None:
    """Numbers of any type; those of 8 bits are small whole ones."""
    if rows.dtype.itemsize > 1:
        rows.normal_()
    else:
        rows.copy_(torch.randint(-4, 5, rows.shape, device=rows.device).to(rows.dtype))


def step(case: Case, view: LayerView, device: str) -> Step:
    """All pages in random order."""
    first, blocks = view.group.pages_per_superpage, case.rows * case.context // 16
    table = (first + np.random.default_rng(0).permutation(blocks)).reshape(case.rows, -1).astype(np.int32)
    starts = torch.arange(case.rows + 1, dtype=torch.int32, device=device) * case.queries
    lengths = torch.full((case.rows,), case.context, dtype=torch.int32, device=device)
    return Step(starts, lengths, {view.tag: torch.from_numpy(table).to(device)}, {}, case.queries)


def dense(case: Case, queries: torch.Tensor) -> Callable[[], torch.Tensor]:
    """SDPA over keys and values of the tokens seen."""
    shape = case.shape
    keys = torch.randn(case.rows, shape.kv_heads, case.seen, shape.dim, dtype=queries.dtype, device=queries.device)
    values = keys[..., : shape.latent] if shape.latent else torch.randn_like(keys)
    q = queries.view(case.rows, case.queries, shape.heads, shape.dim).transpose(1, 2)
    mask = None
    if case.queries > 1:
        mask = torch.ones(case.queries, case.seen, dtype=torch.bool, device=queries.device)
        mask = mask.tril(case.seen - case.queries)
    if shape.latent:
        q = queries.view(case.rows, 1, -1, shape.dim)
        mask = mask if mask is None else mask.repeat_interleave(shape.heads, 0)
    return lambda: sdpa(q, keys, values, attn_mask=mask, enable_gqa=not shape.latent)


# ---- clocks


def on_cpu(acts: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The least CPU seconds of each, turn and turn about, after one call to warm up."""
    least = dict.fromkeys(acts, float("inf"))
    for act in acts.values():
        act()
    for _ in range(turns):
        for name, act in acts.items():
            begun = time.thread_time()
            act()
            least[name] = min(least[name], time.thread_time() - begun)
    return least


def on_gpu(act: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of a call within a graph of some."""
    for _ in range(3):
        act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            act()
    graph.replay()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / repeats


def options(case: Case) -> AttentionOptions:
    return AttentionOptions(reach=case.shape.reach, value_dim=case.shape.latent or None)


def floor(case: Case, dtype: torch.dtype) -> float:
    """Seconds that the memory needs for the rows alone."""
    shape = case.shape
    row = shape.dim * dtype.itemsize if shape.quant == "auto" else shape.dim + 4
    return case.rows * case.seen * shape.kv_heads * row * (1 if shape.latent else 2) / BYTES_PER_SECOND


def measure(case: Case, device: str, turns: int) -> dict[str, Any]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    arena, view = layer(case, device, dtype)
    with arena:
        taken = step(case, view, device)
        queries = torch.randn(case.rows * case.queries, case.shape.heads, case.shape.dim, device=device).to(dtype)
        attention: Attention = open_attention(view, options(case))
        out = attention.attend(queries, taken)
        acts = {"ours": lambda: attention.attend(queries, taken, out), "peer": dense(case, queries)}
        took = on_cpu(acts, turns) if device == "cpu" else {name: on_gpu(act) for name, act in acts.items()}
    what = "decode" if case.queries == 1 else f"chunk of {case.queries}"
    claim = f"{what}, {case.name}, {case.rows} rows of {case.context}, {attention.name} against SDPA on dense tensors"
    line = {"claim": claim, **{name: seconds * 1e3 for name, seconds in took.items()}, "unit": "ms"}
    more = {} if device == "cpu" or case.queries > 1 else {"of_floor": took["ours"] / floor(case, dtype)}
    return line | {"ratio": took["peer"] / took["ours"]} | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    for case in cases(device):
        found = measure(case, device, turns) | {"load": os.getloadavg()[0]}
        print(json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
