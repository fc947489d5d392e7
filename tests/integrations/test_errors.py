"""What cannot be done is said by name, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvweave.errors import BadOption, BadTokens, CannotServe, CannotTruncate, KVWeaveError, NeverFits, OutOfPages
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.support import examine
from kvweave.integrations.transformers.weave import plan_for
from tests.integrations.models import difference, greedy, model_of, plain, prompt


@pytest.fixture
def weave() -> Iterator[KVWeave]:
    with KVWeave(model_of("gemma3_text"), "16MiB", rows=16, max_tokens=512) as made:
        yield made
        assert made.core.stats().sequences == 0
        assert all(group.held == 0 for group in made.core.stats().groups)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_batch_too_large_for_the_memory_is_an_error_and_the_next_one_works(name: str) -> None:
    model = model_of(name)
    with pytest.raises(NeverFits) as told:
        plan_for(examine(model), 1, 16, context=48)
    with KVWeave(model, 2 * told.value.smallest_bytes, rows=32, max_tokens=512) as weave:
        with pytest.raises((OutOfPages, NeverFits)):
            weave.generate(torch.cat([prompt(200, seed) for seed in range(30)]), **greedy())
        assert weave.core.stats().sequences == 0
        assert all(group.held == 0 for group in weave.core.stats().groups)
        ours = weave.generate(prompt(30), **greedy())
        assert difference(ours, plain(model, prompt(30))) < 2e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_prompt_that_the_plan_promised_is_computed_in_pieces_as_long_as_pages_allow(name: str) -> None:
    model, length = model_of(name), 200
    with pytest.raises(NeverFits) as told:
        plan_for(examine(model), 1, 16, context=length + 16)
    with KVWeave(model, told.value.smallest_bytes, rows=4, max_tokens=512) as weave:
        for seed in range(3):
            ours = weave.generate(prompt(length, seed), **greedy(8))
            assert difference(ours, plain(model, prompt(length, seed), **greedy(8))) < 2e-5


def test_memory_that_ends_while_generating_is_an_error_and_what_was_computed_is_found() -> None:
    model = model_of("llama")
    with pytest.raises(NeverFits) as told:
        plan_for(examine(model), 1, 16, context=48)
    with KVWeave(model, told.value.smallest_bytes, rows=8, max_tokens=512) as weave:
        with pytest.raises((OutOfPages, NeverFits)):
            weave.generate(prompt(30), **greedy(40))
        assert weave.core.stats().sequences == 0
        weave.generate(prompt(30), **greedy())
        assert weave.records[-1].reused_tokens == 16


def test_a_model_that_fails_leaves_no_row_open(weave: KVWeave, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the model broke")

    layer = weave.model.get_decoder().layers[-1]
    monkeypatch.setattr(layer, "forward", fail)
    with pytest.raises(RuntimeError, match="the model broke"):
        weave.generate(prompt(40), **greedy())
    monkeypatch.undo()
    assert difference(weave.generate(prompt(40), **greedy()), plain(weave.model, prompt(40))) < 2e-5
    assert weave.records[-1].reused_tokens == 0, "what a broken step left was taken for true"


def test_prompts_are_padded_on_the_left_only(weave: KVWeave) -> None:
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, -3:] = 0
    with pytest.raises(BadTokens, match="padded on the left"):
        weave.generate(prompt(20), attention_mask=mask)
    with pytest.raises(BadTokens, match="not of one shape"):
        weave.generate(prompt(20), attention_mask=mask[:, 1:])


def test_other_tensors_than_tokens_are_refused(weave: KVWeave) -> None:
    with pytest.raises(BadTokens, match="pixel_values"):
        weave.generate(prompt(20), pixel_values=torch.zeros(1, 3, 8, 8))
    with pytest.raises(BadTokens, match="input_ids"):
        weave.generate(inputs_embeds=torch.zeros(1, 4, 64))


def test_a_past_is_of_the_tokens_it_was_opened_for(weave: KVWeave) -> None:
    with weave.past(prompt(20)) as past, pytest.raises(BadTokens, match="not the tokens"), torch.no_grad():
        weave.model(prompt(1, seed=5), past_key_values=past)


def test_only_what_is_not_committed_can_be_taken_back(weave: KVWeave) -> None:
    ids = prompt(60)
    with weave.past(ids) as past, torch.no_grad():
        weave.model(ids[:, -1:], past_key_values=past)
        past.crop(-1)
        assert past.get_seq_length() == 59
        weave.model(ids[:, -1:], past_key_values=past)
        with pytest.raises(CannotTruncate):
            past.crop(-40)


def test_how_much_is_taken_back_may_be_a_tensor_as_transformers_gives_it(weave: KVWeave) -> None:
    ids = prompt(60)
    with weave.past(ids) as past, torch.no_grad():
        weave.model(ids[:, -1:], past_key_values=past)
        past.crop(torch.tensor(-1))
        assert type(past.get_seq_length()) is int
        assert all(type(sequence.num_tokens) is int for sequence in past.sequences)


def test_an_encoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=9))
    with pytest.raises(CannotServe, match="encoder") as told:
        KVWeave(model)
    assert isinstance(told.value, KVWeaveError)


def test_what_is_no_model_that_generates_is_refused() -> None:
    for model in ("gpt2", None, torch.nn.Linear(2, 2), model_of("llama").model):
        with pytest.raises(CannotServe, match="no transformers model that generates"):
            KVWeave(model, "16MiB")


def test_prompts_are_computed_at_least_one_token_at_a_time() -> None:
    with pytest.raises(BadOption, match="prefill_tokens must be at least 1, not 0"):
        KVWeave(model_of("llama"), "16MiB", prefill_tokens=0)


def test_a_session_takes_what_a_tokenizer_returns_and_one_conversation(weave: KVWeave) -> None:
    session = weave.session()
    for turn in range(2):
        given = {"input_ids": prompt(20, seed=turn), "attention_mask": torch.ones(1, 20, dtype=torch.long)}
        assert session.generate(**given, **greedy(3)).shape == (1, 3)
    said = session.tokens
    padded = torch.tensor([[0] * 5 + [1] * 15])
    for wrong in ((prompt(5)[0],), (prompt(6).view(2, 3),), ([1, 2],), (prompt(20), padded)):
        with pytest.raises(BadTokens, match="one conversation"):
            session.generate(*wrong)
    assert torch.equal(session.tokens, said)


def test_a_closed_weave_leaves_the_model_as_it_was() -> None:
    model = model_of("llama")
    weave = KVWeave(model, "16MiB")
    assert len(model._forward_pre_hooks) == 1
    weave.close()
    weave.close()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_records_and_stats_add_up(weave: KVWeave) -> None:
    ids = torch.cat([prompt(40), prompt(40, seed=1)])
    weave.generate(ids, **greedy(3))
    weave.generate(ids, **greedy(3))
    first, second = weave.records
    assert (first.rows, first.prompt_tokens, first.reused_tokens, first.computed_tokens) == (2, 80, 0, 80)
    assert (second.reused_tokens, second.computed_tokens, second.new_tokens) == (64, 16, 6)
    assert 0 < second.first_token_seconds <= second.seconds
    stats = weave.stats()
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens, stats.new_tokens) == (2, 160, 64, 12)
    assert stats.core.hit_tokens == 64


def test_namespaces_share_nothing(weave: KVWeave) -> None:
    for namespace in ("one", "other", "one"):
        weave.generate(prompt(40), namespace=namespace, **greedy())
    assert [record.reused_tokens for record in weave.records] == [0, 0, 32]
