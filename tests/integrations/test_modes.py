"""Every way to generate, on at least one family of each kind: what comes out is what transformers' own cache gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvweave.errors import BadTokens
from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import difference, greedy, model_of, plain, prompt

KINDS = {
    "full": "llama",
    "absolute positions": "gpt2",
    "alibi": "bloom",
    "window": "gemma3_text",
    "window alone": "mistral",
    "shared": "gemma3n_text",
    "chunk": "llama4_text",
    "latent": "deepseek_v3",
    "indexed": "deepseek_v32",
    "states": "qwen3_next",
    "states alone": "mamba2",
    "scan": "jamba",
    "conv": "lfm2",
    "hybrid": "falcon_h1",
    "hybrid window": "zaya",
    "own cache": "minimax",
    "sparse": "minimax_m3_vl_text",
    "compressed": "deepseek_v4:close",
}
STATELESS = ("full", "absolute positions", "window", "window alone", "shared", "chunk", "latent", "indexed", "sparse")
TOGETHER = ("sparse", "compressed")
CLOSE = 2e-5


def parametrize(kinds: Iterable[str] = KINDS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds)


@pytest.fixture
def weave(kind: str) -> Iterator[KVWeave]:
    with KVWeave(model_of(KINDS[kind]), "64MiB", rows=32, max_tokens=1024) as made:
        yield made
        assert made.core.stats().sequences == 0, "a row was left open"


def left_padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length)[0]
        mask[row, width - length :] = 1
    return ids, mask


@parametrize([kind for kind in KINDS if kind not in TOGETHER])
def test_a_batch_with_left_padding(kind: str, weave: KVWeave) -> None:
    """Rows share a prefix, hit it at different lengths, and one is a single token."""
    ids, mask = left_padded((70, 1, 53, 70))
    for _ in range(2):
        ours = weave.generate(ids, attention_mask=mask, **greedy())
        assert difference(ours, plain(weave.model, ids, mask)) < CLOSE
    assert weave.records[0].prompt_tokens == 194
    assert weave.records[0].reused_tokens > 0
    assert weave.records[1].reused_tokens > weave.records[0].reused_tokens


@parametrize(TOGETHER)
def test_models_that_take_tokens_together_take_no_padding(kind: str, weave: KVWeave) -> None:
    ids, mask = left_padded((70, 53))
    with pytest.raises(BadTokens, match="prompts of one length only"):
        weave.generate(ids, attention_mask=mask)
    even = torch.cat([prompt(70), prompt(70, seed=1)])
    for _ in range(2):
        assert difference(weave.generate(even, **greedy()), plain(weave.model, even)) < CLOSE
    assert weave.records[1].reused_tokens == 128


@parametrize()
def test_beams(kind: str, weave: KVWeave) -> None:
    """transformers' own V4 layers do not follow beams with their compressed rows, so there the oracle has no cache."""
    ids = prompt(53)
    theirs = plain(weave.model, ids, num_beams=3, num_return_sequences=2, use_cache=kind != "compressed")
    for _ in range(2):
        ours = weave.generate(ids, **greedy(num_beams=3, num_return_sequences=2))
        assert torch.equal(ours.sequences, theirs.sequences)
    assert weave.records[1].reused_tokens > 0


def test_twenty_beam_searches_of_a_window_model_are_those_of_transformers() -> None:
    """Beams part and die while their window moves on: no two of them write to one page."""
    model = model_of("gemma3_text")
    with KVWeave(model, "16MiB", rows=32, max_tokens=512) as weave:
        for seed in range(20):
            ids = prompt(20 + 7 * seed, seed)
            options: dict[str, Any] = {"num_beams": 2 + seed % 4, "num_tokens": 24}
            theirs = plain(model, ids, **options)
            assert difference(weave.generate(ids, **greedy(**options)), theirs) < CLOSE, f"search {seed}"
        assert weave.core.stats().sequences == 0


@parametrize()
def test_sampling_with_a_seed_several_answers_a_prompt(kind: str, weave: KVWeave) -> None:
    ids = prompt(53)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "temperature": 3.0}
    answers = []
    for generate in (plain, weave.generate, weave.generate):
        torch.manual_seed(7)
        answers.append(generate(weave.model, ids, **(options if generate is plain else greedy(**options))).sequences)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert len({tuple(row) for row in answers[0].tolist()}) > 1
    assert weave.records[1].reused_tokens > 0


@parametrize(STATELESS)
def test_prompt_lookup_takes_tokens_back(kind: str, weave: KVWeave) -> None:
    ids = prompt(12).repeat(1, 5)
    theirs = plain(weave.model, ids, num_tokens=8, prompt_lookup_num_tokens=4)
    for _ in range(2):
        ours = weave.generate(ids, **greedy(8, prompt_lookup_num_tokens=4))
        assert torch.equal(ours.sequences, theirs.sequences)
    assert weave.records[1].reused_tokens > 0


@parametrize(STATELESS)
def test_an_assistant_drafts(kind: str, weave: KVWeave) -> None:
    ids = prompt(53)
    theirs = plain(weave.model, ids, num_tokens=8, assistant_model=model_of("llama"))
    for _ in range(2):
        ours = weave.generate(ids, **greedy(8, assistant_model=model_of("llama")))
        assert torch.equal(ours.sequences, theirs.sequences)
    assert weave.records[1].reused_tokens > 0


@parametrize()
def test_prefill_in_chunks(kind: str, weave: KVWeave) -> None:
    ids = prompt(54)
    ours = weave.generate(ids, prefill_chunk_size=7, **greedy())
    assert difference(ours, plain(weave.model, ids)) < CLOSE


class Listener(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard += value.reshape(-1).tolist()

    def end(self) -> None:
        self.heard.append(-1)


@parametrize(("full", "window", "states"))
def test_streaming_from_a_thread(kind: str, weave: KVWeave) -> None:
    ids, listener, theirs = prompt(93), Listener(), plain(model_of(KINDS[kind]), prompt(93))
    thread = Thread(target=weave.generate, args=(ids,), kwargs=greedy(streamer=listener))
    thread.start()
    thread.join()
    assert listener.heard == [*theirs.sequences[0].tolist(), -1]
    weave.generate(ids, **greedy())
    assert weave.records[1].reused_tokens > 0


@parametrize(("full", "window", "chunk", "latent", "indexed", "states", "states alone", "hybrid", "compressed"))
def test_a_conversation_hits_prompt_and_answer(kind: str, weave: KVWeave) -> None:
    session, said = weave.session(), torch.empty(1, 0, dtype=torch.long)
    for turn in range(3):
        before = said.shape[1] - 1
        said = torch.cat([said, prompt(21, seed=turn)], dim=1)
        theirs = plain(weave.model, said, num_tokens=17).sequences
        answer = session.generate(prompt(21, seed=turn), **greedy(17))
        assert torch.equal(answer, theirs[:, said.shape[1] :])
        assert weave.records[-1].reused_tokens > before - weave.core.grid, "the answer was not found"
        said = theirs


@parametrize([kind for kind in KINDS if kind != "scan"])
def test_a_past_goes_on_by_as_many_tokens_as_its_prompt_has(kind: str, weave: KVWeave) -> None:
    for length in (2, 17):
        ids, rest = prompt(length), prompt(length, seed=4)
        with torch.no_grad():
            theirs = weave.model(torch.cat([ids, rest], dim=1), use_cache=False).logits[:, -1]
        for given in (torch.cat([ids[:, -1:], rest], dim=1), torch.cat([ids, rest], dim=1)):
            with weave.past(ids) as past, torch.no_grad():
                ours = weave.model(given, use_cache=True, **{weave.served.cache_name: past}).logits[:, -1]
            assert (ours - theirs).abs().max() < CLOSE


@parametrize(("states", "states alone", "conv", "hybrid", "own cache"))
def test_a_call_across_the_end_of_a_prompt_leaves_no_state_there_that_was_not_computed(
    kind: str, weave: KVWeave
) -> None:
    for length in (16, 17, 32):
        ids = prompt(length, seed=length)
        with weave.past(ids) as past, torch.no_grad():
            given = torch.cat([ids[:, -1:], prompt(3, seed=4)], dim=1)
            weave.model(given, use_cache=True, **{weave.served.cache_name: past})
        longer = torch.cat([ids, prompt(4, seed=5)], dim=1)
        assert difference(weave.generate(longer, **greedy()), plain(weave.model, longer)) < CLOSE


@parametrize()
def test_a_model_called_by_hand(kind: str, weave: KVWeave) -> None:
    ids = prompt(53)
    theirs = plain(weave.model, ids)
    with weave.past(ids) as past, torch.no_grad():
        for i, expected in enumerate(theirs.logits):
            token = theirs.sequences[:, 52 + i : 53 + i]
            out = weave.model(token, use_cache=True, **{weave.served.cache_name: past})
            assert (out.logits[:, -1] - expected).abs().max() < CLOSE


@parametrize(("full", "window", "states", "latent"))
def test_the_same_pieces_give_the_same_bits(kind: str, weave: KVWeave) -> None:
    """Where the model is called with the same pieces, pages change no bit; attention in place rounds differently."""
    ids, mask = prompt(37), torch.ones(1, 37, dtype=torch.long)
    cache = DynamicCache(config=weave.model.config)
    gathering = KVWeave(weave.model, "16MiB", prefill_tokens=16, in_place=False)
    with gathering, gathering.past(ids) as past, torch.no_grad():
        for start, end in ((0, 16), (16, 32), (32, 36), (36, 37)):
            position_ids = torch.arange(start, end)[None]
            theirs = weave.model(
                ids[:, start:end], past_key_values=cache, attention_mask=mask[:, :end], position_ids=position_ids
            )
        ours = weave.model(ids[:, 36:], past_key_values=past, attention_mask=mask, position_ids=position_ids)
    assert torch.equal(ours.logits, theirs.logits)
