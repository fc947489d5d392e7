"""On a GPU: a warm first token at 32k shared tokens against a cold one, for models of a few billion random parameters.

bfloat16, seeded random weights, made on the device: windows and full attention (as Gemma 3), and states and full
attention (as Qwen3-Next, dense). Peers and lines are those of transformers_cpu.

Run: PYTHONPATH=src:. python3 -m bench.transformers_gpu [shared tokens]
"""

from __future__ import annotations

import sys

import torch
import transformers

from bench.gpu_models import build, gemma, qwen
from bench.transformers_measure import report
from kvweave.integrations.transformers import KVWeave


def main() -> None:
    transformers.logging.set_verbosity_error()
    shared = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
    for name, config in {"windows + full": gemma, "states + full": qwen}.items():
        model = build(config())
        print(
            f"{name}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} billion parameters", flush=True
        )
        with KVWeave(model, "24GiB", prefill_tokens=8192) as weave:
            report(name, model, weave, shared, rounds=3)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
