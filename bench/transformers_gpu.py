"""On a GPU: a warm first token at 32k shared tokens against a cold one, for models of a few billion random parameters.

bfloat16, seeded random weights, made on the device: windows and full attention (as Gemma 3), and states and full
attention (as Qwen3-Next, dense). Peers and lines are those of transformers_cpu.

Run: PYTHONPATH=src python3 -m bench.transformers_gpu [shared tokens]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from transformers import Gemma3TextConfig, Qwen3NextConfig

from bench.transformers_measure import report
from kvweave.integrations.transformers import KVWeave

SIZES: dict[str, Any] = {"vocab_size": 65536, "max_position_embeddings": 65536, "head_dim": 128}


def gemma() -> Any:
    """About 3.5 billion parameters."""
    return Gemma3TextConfig(
        **SIZES,
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=10240,
        sliding_window=1024,
        sliding_window_pattern=6,
    )


def qwen() -> Any:
    """About 3 billion parameters, with dense layers for experts."""
    return Qwen3NextConfig(
        **SIZES,
        hidden_size=2560,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=10240,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mlp_only_layers=list(range(24)),
    )


def build(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def main() -> None:
    transformers.logging.set_verbosity_error()
    shared = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
    models = {
        "windows + full": (transformers.Gemma3ForCausalLM, gemma),
        "states + full": (transformers.Qwen3NextForCausalLM, qwen),
    }
    for name, (model_class, config) in models.items():
        model = build(model_class, config())
        print(
            f"{name}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} billion parameters", flush=True
        )
        with KVWeave(model, "24GiB", prefill_tokens=8192) as weave:
            report(name, model, weave, shared, rounds=3)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
