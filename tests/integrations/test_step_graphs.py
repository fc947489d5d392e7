"""Forwards as graphs under `generate`; on a CPU the same steps at fixed addresses, uncaptured."""

from __future__ import annotations

import copy
import functools
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvweave.attention import StepSize
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.captured_forward import CapturedForward
from kvweave.integrations.transformers.compiled_layers import CompiledLayers, MemoryLinear
from kvweave.integrations.transformers.fixed_cache import FixedCache, LayersByCall
from kvweave.integrations.transformers.layers.state_layers import LayerState
from kvweave.integrations.transformers.paged_forward import PagedForward
from kvweave.integrations.transformers.step_graphs import StepGraphs
from kvweave.tensor import carry_out
from tests.integrations.checks import CLOSE
from tests.integrations.models import difference, greedy, model_of, plain, prompt

CAPTURED = (
    "llama", "mistral", "gemma3_text", "gpt_oss", "mimo_v2_flash", "mixtral", "qwen3_next", "falcon_h1", "lfm2",
    "llama4_text", "mamba", "mamba2", "deepseek_v3", "kimi_linear",
)  # fmt: skip
"""Full attention, windows, sinks, unequal widths, experts, states, states beside attention, convolutions, scales that
depend on the length of the cache, states only, latents, latents beside states."""
OTHERS = ("bloom", "deepseek_v32", "minimax")
"""Positions of their own, a selection of tokens, a cache class."""


def weave_of(name: str, **options: Any) -> KVWeave:
    return KVWeave(model_of(name), "64MiB", **{"rows": 16, "max_tokens": 512, "graphs": True, **options})


def count_steps(weave: KVWeave, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step that is computed at fixed addresses."""
    steps: list[int] = []
    run = weave.graphs.run

    def counted(sequences: Any, *arguments: Any) -> torch.Tensor:
        steps.append(len(sequences))
        return run(sequences, *arguments)

    monkeypatch.setattr(weave.graphs, "run", counted)
    return steps


def same(weave: KVWeave, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> bool:
    mask = torch.ones_like(ids) if mask is None else mask
    torch.manual_seed(3)
    ours = weave.generate(ids, attention_mask=mask, **greedy(8, **options))
    torch.manual_seed(3)
    return difference(ours, plain(weave.model, ids, mask, num_tokens=8, **options)) < CLOSE


@pytest.mark.parametrize("name", CAPTURED)
def test_generate_gives_the_answers_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with weave_of(name) as weave:
        steps = count_steps(weave, monkeypatch)
        assert same(weave, prompt(60))
        assert len(steps) >= 7, "all but the prompt"
        assert same(weave, prompt(60))
        both = torch.cat([prompt(50, seed=1), prompt(50, seed=2)])
        mask = torch.ones_like(both)
        mask[1, :9] = 0
        assert same(weave, both, mask)
        assert same(weave, prompt(40, seed=3), num_beams=3)
        assert same(weave, prompt(40, seed=4), do_sample=True, num_return_sequences=3)
        assert {1, 2, 3} <= set(steps)
        assert weave.core.stats().sequences == 0


class NoNumbers(TorchDispatchMode):
    """Within this mode no operation gives a number of a tensor to Python, or a shape that depends on one: on a GPU it
    would wait, and could not be captured."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        assert not waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*CAPTURED, "jamba", "falcon_mamba"])
def test_a_step_at_fixed_addresses_asks_for_no_number_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, size = torch.cat([prompt(30), prompt(30, seed=1)]), StepSize(2, 2)
    with weave_of(name) as weave, weave.past(both) as past, torch.no_grad():
        carry_out(weave.arena, weave.core.extend(past.sequences, 1))
        weave.graphs._fitting_buffers().load(past.sequences, [1, 1], np.array([5, 6]), size)
        with monkeypatch.context() as patch, NoNumbers():  # type: ignore[no-untyped-call]
            patch.setattr(torch.Tensor, "tolist", None, raising=False)  # which no mode sees
            assert weave.graphs._forward(size).shape[0] == 2
    with pytest.raises(AssertionError, match="waits for the device"), NoNumbers():  # type: ignore[no-untyped-call]
        assert torch.ones(1)


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_need_more_than_ids_positions_and_pages_are_seen(name: str) -> None:
    with weave_of(name) as weave:
        assert not weave.graphs.is_useful
        assert "forward" not in vars(weave.model)
        assert same(weave, prompt(60))


def test_a_model_whose_outcome_depends_on_the_length_of_its_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    rotate = model.model.rotary_emb.forward

    def by_length(states: torch.Tensor, position_ids: torch.Tensor, **named: Any) -> Any:
        cos, sin = rotate(states, position_ids, **named)
        past = lengths[-1]
        return cos * (1 + 0.1 * (past % 7)), sin

    lengths = [0]
    hook = model.model.register_forward_pre_hook(
        lambda _m, _a, named: lengths.append(named["past_key_values"].get_seq_length()), with_kwargs=True
    )
    monkeypatch.setattr(model.model.rotary_emb, "forward", by_length)
    try:
        with weave_of("llama") as weave:
            assert not weave.graphs.is_useful
    finally:
        hook.remove()


def test_states_that_forwards_left_in_working_tensors_are_in_the_pages_for_a_replay() -> None:
    """Steps by turns: computed by the model's own forward, and at fixed addresses."""
    ids = torch.cat([prompt(30, seed=1), prompt(30, seed=2)])
    with weave_of("qwen3_next") as weave, weave.past(ids) as past, torch.no_grad():
        model = weave.model
        step, whole = ids[:, -1:], ids
        for number in range(6):
            weave.graphs.is_useful = bool(number % 2)
            logits = model(step, past_key_values=past, use_cache=True).logits[:, -1]
            theirs = model(whole, use_cache=False).logits[:, -1]
            assert (logits - theirs).abs().max() < CLOSE
            step = logits.argmax(-1, keepdim=True)
            whole = torch.cat([whole, step], dim=1)


@pytest.mark.parametrize(
    ("name", "stay"),
    [
        ("qwen3_next", True),
        ("lfm2", True),
        ("falcon_h1", True),
        ("jamba", True),
        ("mamba2", True),
        ("kimi_linear", True),
    ],
)
def test_states_stay_in_their_pages_if_functions_of_ours_update_them(
    name: str, stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    gather = LayerState.gather

    def noting(state: LayerState, slots: torch.Tensor) -> None:
        copied.append(state.name)
        gather(state, slots)

    monkeypatch.setattr(LayerState, "gather", noting)
    with weave_of(name) as weave:
        copied.clear()
        assert same(weave, prompt(60))
        assert bool(copied) != stay


@pytest.mark.parametrize("reads", ["conv_states", "recurrent_states"])
def test_a_model_that_reads_its_states_otherwise_gets_copies_of_them(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model_of("qwen3_next"))
    layer = next(layer for layer in model.model.layers if hasattr(layer, "linear_attn"))

    own, number = layer.linear_attn.forward, layer.linear_attn.layer_idx

    def forward(hidden_states: torch.Tensor, cache_params: Any = None, **named: Any) -> torch.Tensor:
        is_decode = cache_params is not None and hidden_states.shape[1] == 1
        extra = getattr(cache_params.layers[number], reads)[0].flatten(1).mean(1) if is_decode else torch.zeros(1)
        out: torch.Tensor = own(hidden_states, cache_params=cache_params, **named)
        return out + extra[:, None, None]

    monkeypatch.setattr(layer.linear_attn, "forward", forward)
    with KVWeave(model, "64MiB", rows=16, max_tokens=512, graphs=True) as weave:
        steps = count_steps(weave, monkeypatch)
        assert same(weave, prompt(60))
        assert len(steps) >= 7
        assert not weave.graphs._states_stay


def test_states_that_a_step_did_not_update_are_noticed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    where = PagedForward.states_of

    def of_a_copy(forward: PagedForward, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        pages, slots = where(forward, tensor)
        return pages if slots is None else pages.clone(), slots

    monkeypatch.setattr(PagedForward, "states_of", of_a_copy)
    with weave_of("qwen3_next") as weave:
        assert not weave.graphs._states_stay
        assert same(weave, prompt(60))


def test_copies_of_a_model_have_their_own_forward_and_close_gives_it_back() -> None:
    model = model_of("llama")
    with weave_of("llama"):
        assert isinstance(vars(model)["forward"], CapturedForward)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(plain(other, prompt(20)).sequences, plain(model, prompt(20)).sequences)
            assert not isinstance(other.forward, CapturedForward)
    assert "forward" not in vars(model)


def test_close_gives_back_a_forward_that_was_the_users_own() -> None:
    model = copy.deepcopy(model_of("llama"))
    mine = model.forward = functools.wraps(model.forward)(functools.partial(model.forward))
    with KVWeave(model, "16MiB", rows=8, max_tokens=256, graphs=True):
        assert isinstance(vars(model)["forward"], CapturedForward)
    assert vars(model)["forward"] is mine


def test_a_cache_with_more_rows_than_it_was_made_for_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with weave_of("llama", rows=2) as weave:
        steps = count_steps(weave, monkeypatch)
        assert same(weave, prompt(30))
        assert same(weave, prompt(30, seed=1), num_beams=5)
        assert 5 in steps


def test_states_are_as_they_were_after_forwards_that_only_prepare_a_capture_even_if_they_fail() -> None:
    with weave_of("qwen3_next") as weave, weave.past(prompt(30)) as past:
        (sequence,) = past.sequences
        weave.graphs._fitting_buffers().load([sequence], [1], np.array([5]), StepSize(1, 1))
        fixed = weave.graphs._step(StepSize(1, 1))
        cache = FixedCache(weave.memory, fixed)
        states = [(state, fixed.states[state.tag]) for layer in cache._states for state in layer.states]
        before = [state.pages[slots].clone() for state, slots in states]
        with pytest.raises(RuntimeError, match="out of memory"), cache.unchanged_states():
            for state, slots in states:
                state.pages[slots] += 1
            raise RuntimeError("out of memory")
        assert all(torch.equal(state.pages[slots], was) for (state, slots), was in zip(states, before, strict=True))


def test_a_forward_that_cannot_be_captured_is_computed_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    with weave_of("llama") as weave:
        weave.graphs._captures = True
        assert same(weave, prompt(30))
        assert not weave.graphs.is_useful
        assert same(weave, prompt(30, seed=1))
    assert "computed without graphs" in caplog.text


def test_a_model_that_changes_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, of_before = copy.deepcopy(model_of("llama")), StepSize(999, 999)
    norm = model.model.norm
    with KVWeave(model, "64MiB", graphs=True) as weave:
        steps = count_steps(weave, monkeypatch)

        def is_kept() -> bool:
            """Whether a graph outlives the next request, which is right and computed at fixed addresses."""
            weave.graphs._captured[of_before] = None  # type: ignore[assignment]
            steps.clear()
            assert same(weave, prompt(30))
            assert steps
            return of_before in weave.graphs._captured

        assert is_kept()
        norm.weight = torch.nn.Parameter(norm.weight * 3)
        assert not is_kept()
        norm.weight.data.mul_(0.5)
        assert not is_kept()
        assert is_kept()


@pytest.mark.parametrize("asked", [{"output_hidden_states": True}, {"return_dict": False}], ids=str)
@pytest.mark.parametrize("place", ["call", "config"])
def test_calls_that_ask_for_more_than_logits_get_it(
    asked: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "config" and "return_dict" in asked:
        pytest.skip("transformers' own Llama fails with it")
    model = copy.deepcopy(model_of("llama"))
    with KVWeave(model, "64MiB", graphs=True) as weave, torch.no_grad():
        steps = count_steps(weave, monkeypatch)
        model.config.output_hidden_states = place == "config"
        given = asked if place == "call" else {}
        theirs = model(prompt(30), use_cache=False, **given)
        with weave.past(prompt(30)) as past:
            steps.clear()
            ours = model(prompt(30)[:, -1:], past_key_values=past, use_cache=True, **given)
        assert type(ours) is type(theirs)
        assert len(getattr(ours, "hidden_states", ())) == len(getattr(theirs, "hidden_states", ()))
        assert not steps


def test_hooks_of_the_user_are_called_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("llama"))
    with KVWeave(model, "64MiB", graphs=True) as weave:
        steps = count_steps(weave, monkeypatch)
        called: list[int] = []
        hook = model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
        weave.generate(prompt(30), **greedy(8))
        assert len(called) == 8
        assert not steps
        hook.remove()
        assert same(weave, prompt(30))
        assert len(steps) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_compiled_layers_give_the_same_answers_by_one_code_for_all_of_a_kind(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with weave_of(name, compile_layers=True) as weave:
        for rows in (1, 2, 3):
            assert same(weave, torch.cat([prompt(40, seed=n) for n in range(rows)]))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 30
        assert not any(layer._compiled_call_impl for layer in weave.model.modules())


class AsksByNumber(torch.nn.Module):
    """A layer that asks a cache for its own layer, as models of some versions of transformers do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number

    def forward(self, hidden: torch.Tensor, layers: Any) -> torch.Tensor:
        return hidden + 1 if layers[self.layer_idx].record_past else hidden - 1


@pytest.mark.parametrize(("layers_of", "most"), [(LayersByCall, 3), (list, 6)], ids=["by call", "a list"])
def test_layers_that_are_asked_for_by_number_are_compiled_once_and_not_each(layers_of: Any, most: int) -> None:
    layers = layers_of([SimpleNamespace(record_past=number == 5) for number in range(6)])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64):
        found = [torch.compile(AsksByNumber(number), backend="eager")(torch.zeros(3), layers) for number in range(6)]
    assert [float(tensor[0]) for tensor in found] == [-1, -1, -1, -1, -1, 1]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= most
    assert layers_of is LayersByCall or graphs == most, "what it is for"


def test_only_products_that_alone_read_their_input_read_it_from_memory() -> None:
    config = copy.deepcopy(model_of("llama").config)
    config.intermediate_size = 160
    model = type(model_of("llama"))(config)
    layer, hidden = model.model.layers[0], torch.randn(1, 1, config.intermediate_size)
    expected = layer.mlp.down_proj(hidden)
    with pytest.raises(ZeroDivisionError), CompiledLayers(model):
        assert type(layer.mlp.down_proj) is MemoryLinear
        assert {type(linear) for linear in (layer.self_attn.k_proj, layer.mlp.up_proj)} == {torch.nn.Linear}
        assert torch.equal(layer.mlp.down_proj(hidden), expected)
        raise ZeroDivisionError
    assert type(layer.mlp.down_proj) is torch.nn.Linear
    latents = model_of("deepseek_v3")
    with CompiledLayers(latents):
        attention = latents.model.layers[0].self_attn
        assert type(attention.q_b_proj) is MemoryLinear
        assert type(attention.q_a_proj) is torch.nn.Linear
