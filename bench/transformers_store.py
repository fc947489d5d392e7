"""A first token after a restart, from disk, against a cold one, and what keeping it costs; a GPU's models, or a CPU's.

The store is a directory; a new KVWeave over it has nothing in memory. The page cache is warm: it was just written.
What comes from the store is bit for bit what went there. But prompts are cut elsewhere where there is a store, so in
bfloat16 (a GPU's models) near ties may fall otherwise than without one.

Run: PYTHONPATH=src:. python3 -m bench.transformers_store [shared tokens]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import transformers

from bench.gpu_models import build, gemma, qwen
from kvweave.integrations.transformers import KVWeave


def small(config: Any) -> Any:
    """As much as two cores compute in a minute."""
    for name, value in {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}.items():
        setattr(config, name, value)
    return config


def model_of(config: Any) -> Any:
    return build(config) if torch.cuda.is_available() else build(small(config), "cpu", torch.float32)


def ask(model: Any, store: str | None, ids: torch.Tensor, memory: str) -> tuple[list[int], Any, Any]:
    """The answer, its record, and what the store was used for; everything is on disk when this returns."""
    options: dict[str, Any] = {"prefill_tokens": 8192, "store": store, "weights": "bench", "store_wait_s": 60.0}
    with KVWeave(model, memory, **options) as weave:
        weave.generate(ids[:, :64], max_new_tokens=2, do_sample=False)
        answer = weave.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)
        return answer[0].tolist(), weave.records[-1], weave.stats().store


def main() -> None:
    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    shared = int(sys.argv[1]) if len(sys.argv) > 1 else 32768 if cuda else 2048
    for name, config in {"windows + full": gemma, "states + full": qwen}.items():
        model = model_of(config())
        ids = torch.randint(3, 500, (1, shared + 100), device=model.device)
        memory = "24GiB" if cuda else "1GiB"
        with tempfile.TemporaryDirectory() as folder:
            runs = [ask(model, store, ids, memory) for store in (None, folder, folder)]
        for what, (_, record, use) in zip(("without a store", "cold", "restarted"), runs, strict=True):
            print(
                f"{name}, {what}: first token {record.first_token_seconds:.3f} s, all {record.seconds:.3f} s, of which"
                f" saving {record.save_seconds:.3f} s; {record.stored_tokens:,} of {record.prompt_tokens:,} tokens from"
                f" the store in {use.load_seconds if use else 0:.3f} s, {use.stored if use else 0} blobs stored,"
                f" {use.dropped if use else 0} dropped",
                flush=True,
            )
        without, cold, restarted = (answer for answer, _, _ in runs)
        print(f"{name}: restarted as cold: {restarted == cold}; cold as without a store: {cold == without}", flush=True)
        del model
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
