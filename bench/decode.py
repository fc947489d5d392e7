"""Decoding on pages in place is as fast as on DynamicCache, or faster: 1 and 8 rows after 512, 2k and 8k tokens.

Four shapes with seeded random weights: full attention (as Llama), windows and full attention (as Gemma 3), states and
full attention (as Qwen3-Next), latents (as DeepSeek-V3); float32 on a CPU, bfloat16 on a GPU. Contexts are not computed
but filled in: rows of random tokens in pages of their own, random rows in DynamicCache. Ways take turns step by step;
medians, on a CPU of the seconds that the process computed, which other processes do not disturb.

Run: make bench NAME=decode; or .venv/bin/python -m bench.decode [--models llama ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.transformers_cpu import SIZES, gemma, qwen
from kvweave.integrations.transformers import KVWeave, PagedCache
from kvweave.tensor import carry_out

CONTEXTS, ROWS, STEPS = (512, 2048, 8000), (1, 8), 40
LEARNED = 3
"""Steps before the clock starts: the first one tells how layers attend."""


def llama() -> Any:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, num_hidden_layers=12, intermediate_size=1536))


def deepseek() -> Any:
    """Latents a quarter as wide as the keys and values of all heads; no experts."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 64, "v_head_dim": 64}
    latents = {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 32}
    layers = {"num_hidden_layers": 12, "first_k_dense_replace": 12, "intermediate_size": 1536}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **latents, **layers))


MODELS = {"llama": llama, "gemma-3": gemma, "qwen3-next": qwen, "deepseek-v3": deepseek}


def on_pages(weave: KVWeave, rows: int, context: int) -> PagedCache:
    """A cache of so many tokens a row whose KV nobody has computed."""
    sequences = [weave.core.open(torch.randint(3, 8000, (context + 1,)).numpy(), reuse=False) for _ in range(rows)]
    for sequence in sequences:
        while sequence.length < context:
            carry_out(
                weave.arena, weave.core.extend(sequence, min(sequence.stop or context, context) - sequence.length)
            )
            carry_out(weave.arena, weave.core.commit(sequence, share=False))
    return PagedCache(weave.memory, sequences, context)


def dynamic(model: Any, rows: int, context: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.full((rows, 1), 5, device=model.device), past_key_values=cache)
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            more = ((*held.shape[:2], context - 1, held.shape[3]) for held in (layer.keys, layer.values))
            layer.update(*(torch.randn(shape, dtype=layer.keys.dtype, device=model.device) for shape in more))
    return cache


@torch.no_grad()
def seconds(model: Any, weave: KVWeave, rows: int, context: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"pages": [], "dynamic": []}
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    with on_pages(weave, rows, context) as pages:
        caches = {"pages": pages, "dynamic": dynamic(model, rows, context)}
        lasts = torch.stack([torch.from_numpy(s.run(context, context + 1)) for s in pages.sequences]).long()
        tokens = lasts.to(model.device)
        for _ in range(STEPS + LEARNED):
            for way, cache in caches.items():
                start = clock()
                model(tokens, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()
                times[way].append(clock() - start)
            tokens = torch.full_like(tokens, 7)
    return {way: statistics.median(values[LEARNED:]) for way, values in times.items()}


def main() -> None:
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    for name in parser.parse_args().models:
        torch.manual_seed(0)
        model = MODELS[name]().eval().to(device, dtype)
        with KVWeave(model, "1GiB", rows=16, max_tokens=16384) as weave:
            for context in CONTEXTS:
                for rows in ROWS:
                    found = seconds(model, weave, rows, context)
                    ratio = found["dynamic"] / found["pages"]
                    print(
                        json.dumps({"model": name, "rows": rows, "context": context, **found, "ratio": ratio}),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
