"""A chat under transformers whose next process starts warm. Needs kvweave[transformers].

Give the directory of a model, as `save_pretrained` writes it; without one, a tiny random Gemma 3 talks noise.
What was computed is kept in a directory, and the next process finds it.

Run: python examples/transformers_chat.py [model directory] [store directory]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from kvweave.integrations.transformers import KVWeave

SYSTEM = "You are a patient librarian. " * 40
QUESTIONS = ("What do you keep?", "And for how long?", "Who else may read it?")

Encode = Callable[[str], torch.Tensor]
Decode = Callable[[torch.Tensor], str]


def loaded(directory: str) -> tuple[Any, Encode, Decode]:
    """A model of yours and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return model, lambda text: tokenizer(text, return_tensors="pt").input_ids, tokenizer.decode


def random_model() -> tuple[Any, Encode, Decode]:
    """Windows and full attention, as Gemma 3 has; a token is a byte, and the answers are noise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64}
    config = Gemma3TextConfig(vocab_size=256, pad_token_id=0, eos_token_id=0, bos_token_id=1, **sizes, **heads)

    def encode(text: str) -> torch.Tensor:
        return torch.tensor([[*text.encode()]])

    return Gemma3ForCausalLM(config).eval(), encode, lambda ids: bytes(ids.tolist()).decode("latin-1")


def chat(model: Any, encode: Encode, decode: Decode, store: str) -> list[int]:
    """Talk; returns how many tokens of each prompt were not computed."""
    reused = []
    with KVWeave(model, memory="64MiB", store=store) as weave:
        session = weave.session()
        for number, question in enumerate(QUESTIONS):
            said = f"{SYSTEM if number == 0 else ''}\nUser: {question}\nLibrarian:"
            answer = session.generate(encode(said), max_new_tokens=24, do_sample=False)
            record = weave.records[-1]
            reused.append(record.reused_tokens)
            print(f"> {question}\n{decode(answer[0])!r}")
            source = f"{record.stored_tokens:,} of them from the store"
            print(f"  {record.reused_tokens:,} of {record.prompt_tokens:,} prompt tokens reused ({source}),")
            print(f"  first token after {record.first_token_seconds * 1000:.0f} ms")
    return reused


def main(directory: str = "", store: str = "") -> None:
    store = store or tempfile.mkdtemp()
    for process in ("this process", "the next one"):
        print(f"---- {process}, store at {store}")
        chat(*(loaded(directory) if directory else random_model()), store)


if __name__ == "__main__":
    main(*sys.argv[1:])
