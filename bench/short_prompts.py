"""Where reuse does not pay: the first token of short prompts that share all but 16 tokens, or nothing, against
transformers alone.

CPU time of one thread, so that other processes do not count; the two models of transformers_cpu, float32. The peer is
`model.generate` with its own DynamicCache. Where the ratio is below 1, a request costs more than it saves.

Run: OMP_NUM_THREADS=1 make bench NAME=short_prompts
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.transformers_cpu import gemma, qwen
from kvweave.integrations.transformers import KVWeave

LENGTHS = (32, 64, 128, 256, 512, 1024)
COLD = 64
ROUNDS = 7


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def first_token(generate: Any, prompt: torch.Tensor) -> float:
    return seconds(lambda: generate(prompt, max_new_tokens=1, do_sample=False))


def ratio(model: Any, shared: int) -> float:
    """How many times sooner a first token comes, with `shared` tokens that were seen before."""
    prompts = torch.randint(3, 8192, (ROUNDS + 3, shared + 16))
    prompts[:, :shared] = prompts[0, :shared]
    with KVWeave(model, memory="256MiB") as weave:
        for prompt in prompts[:3]:  # the third finds the point that the second left
            weave.generate(prompt[None], max_new_tokens=1, do_sample=False)
        plain = [first_token(model.generate, prompt[None]) for prompt in prompts[3:]]
        woven = [first_token(weave.generate, prompt[None]) for prompt in prompts[3:]]
    return statistics.median(plain) / statistics.median(woven)


def cold(model: Any) -> float:
    """As `ratio`, of prompts of `COLD` tokens of which none was seen before; by turns."""
    prompts = torch.randint(3, 8192, (2 * (ROUNDS + 1), 1, COLD))
    plain, woven = [], []
    with KVWeave(model, memory="256MiB") as weave:
        for one, other in zip(prompts[::2], prompts[1::2], strict=True):
            plain.append(first_token(model.generate, one))
            woven.append(first_token(weave.generate, other))
    return statistics.median(plain[1:]) / statistics.median(woven[1:])


def main() -> None:
    torch.set_num_threads(1)
    for name, build in (("windows + full", gemma), ("states + full", qwen)):
        torch.manual_seed(0)
        model = build().eval()
        print(json.dumps({"model": name, "cold tokens": COLD, "times sooner": round(cold(model), 2)}))
        for shared in LENGTHS:
            print(json.dumps({"model": name, "shared tokens": shared, "times sooner": round(ratio(model, shared), 2)}))


if __name__ == "__main__":
    main()
