"""One test a trap, one test a family rule: what config.json files say, leave out, and say otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave import from_config
from kvweave.errors import ConfigError, KVWeaveError, SpecError, UnknownName
from kvweave.spec import Chunk, DType, Full, LayerCache, ModelSpec, Part, Read, State, Window
from kvweave.spec.hf.fields import SAME_AS

EXAMPLES = {Path(str(path)).stem: path for path in (files("kvweave") / "examples").iterdir() if path.name != "py.typed"}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
MLA: dict[str, Any] = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def example(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(EXAMPLES[name].read_text())
    return config


def read(config: Mapping[str, Any], **how: Any) -> ModelSpec:
    return from_config(config, **how)


def tags(spec: ModelSpec) -> list[str]:
    """The tags of every layer, joined by +; the tags of what it reads behind a <."""
    return [
        "+".join(cache.tag for cache in layer.caches) + "".join(f"<{read.layer}" for read in layer.reads)
        for layer in spec.layers
    ]


def kept(spec: ModelSpec, tag: str) -> LayerCache:
    return spec.groups()[tag][0]


def shapes(spec: ModelSpec, tag: str) -> dict[str, tuple[int, ...]]:
    return {role.name: role.shape for role in kept(spec, tag).roles}


def pattern(config: Mapping[str, Any], **letters: str) -> str:
    """The layers as letters, f for full, w for window, unless said otherwise."""
    names = {"full": "f", "window": "w", "state": "s", "chunk": "c", "latent": "l", **letters}
    return "".join(names[tag] for tag in tags(read(config)))


# ---- traps: where fields hide


def test_the_language_model_may_be_nested_under_text_config() -> None:
    outer = {"model_type": "llava", "vision_config": {"hidden_size": 7, "num_hidden_layers": 9}, "text_config": LLAMA}
    assert read(outer) == read(LLAMA)


@pytest.mark.parametrize("name", ["llm_config", "language_config", "thinker_config", "decoder"])
def test_the_language_model_may_be_nested_under_other_names(name: str) -> None:
    assert read({"model_type": "some_vlm", name: LLAMA}) == read(LLAMA)


def test_nested_configs_may_be_nested_again() -> None:
    assert read({"model_type": "qwen3_omni", "thinker_config": {"text_config": LLAMA}}) == read(LLAMA)


def test_the_outer_config_names_the_dtype_for_a_silent_inner_one() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "dtype"}
    spec = read({"model_type": "llava", "torch_dtype": "float32", "text_config": inner})
    assert kept(spec, "full").roles[0].dtype is DType.FLOAT32
    spec = read({"model_type": "llava", "torch_dtype": "float32", "text_config": {**inner, "dtype": "float16"}})
    assert kept(spec, "full").roles[0].dtype is DType.FLOAT16


def test_an_inner_config_without_a_model_type_is_the_outer_ones_text() -> None:
    config = example("minimax-m3")
    assert "model_type" not in config["text_config"]
    assert read(config).model_type == "minimax_m3_vl_text"


def test_an_empty_inner_config_is_no_language_model() -> None:
    assert read({**LLAMA, "text_config": {}}) == read(LLAMA)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(name: str) -> None:
    config = {**{key: value for key, value in LLAMA.items() if key != "dtype"}, name: "float16"}
    spec = read(config)
    assert kept(spec, "full").roles[0].dtype is DType.FLOAT16
    assert spec.notes == ()


def test_a_config_without_a_dtype_is_bfloat16_and_says_so() -> None:
    spec = read({key: value for key, value in LLAMA.items() if key != "dtype"})
    assert kept(spec, "full").roles[0].dtype is DType.BFLOAT16
    assert "config.json names no dtype: bfloat16 is assumed" in spec.notes


def test_an_unknown_dtype_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'bfloat16'"):
        read({**LLAMA, "dtype": "bfloat17"})
    with pytest.raises(UnknownName, match=r"cache dtype 'fp9'; did you mean 'fp8'\?"):
        read(LLAMA, dtype="fp9")


# ---- traps: fields that are null, missing, or not what they seem


def test_a_null_head_dim_is_hidden_size_over_heads() -> None:
    assert shapes(read({**LLAMA, "head_dim": None}), "full") == {"key": (8, 128), "value": (8, 128)}


def test_a_null_head_dim_is_derived_even_where_the_class_has_a_default() -> None:
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 8}
    assert shapes(read({**gemma, "head_dim": None}), "full")["key"] == (8, 128)
    assert shapes(read(gemma), "full")["key"] == (8, 256)


def test_head_dim_wins_over_hidden_size() -> None:
    assert shapes(read({**LLAMA, "head_dim": 64}), "full")["key"] == (8, 64)


def test_hidden_size_over_heads_need_not_be_a_power_of_two() -> None:
    assert shapes(read(example("hunyuan-large")), "full")["key"] == (8, 80)


def test_null_kv_heads_are_as_many_as_query_heads() -> None:
    assert shapes(read({**LLAMA, "num_key_value_heads": None}), "full")["key"] == (32, 128)


def test_multi_query_is_one_head_where_no_count_is_given() -> None:
    config = {"n_layer": 2, "n_head": 4, "n_embd": 64, "multi_query": True, "dtype": "float16"}
    assert shapes(read({**config, "model_type": "gpt_bigcode"}), "full")["key"] == (1, 16)
    assert shapes(read({**config, "model_type": "gpt_bigcode", "multi_query": False}), "full")["key"] == (4, 16)


def test_the_head_dim_of_a_latent_model_is_its_rope_width_and_is_not_used() -> None:
    assert shapes(read({**MLA, "head_dim": 64}), "latent") == {"latent": (576,)}
    assert read({**MLA, "head_dim": 64}) == read({**MLA, "head_dim": 128})


def test_a_window_that_is_switched_off_is_no_window() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 2}
    assert pattern({**qwen, "use_sliding_window": False}) == "ffff"
    assert pattern({**qwen, "use_sliding_window": True}) == "ffww"
    assert pattern({**LLAMA, "model_type": "nobody_knows", "sliding_window": 9, "use_sliding_window": False}) == "ffff"


def test_gemma_3_configs_that_leave_their_heads_out_get_the_class_defaults_and_say_so() -> None:
    """google/gemma-3-4b-it on the hub names neither head counts nor head_dim."""
    text = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    spec = read({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert shapes(spec, "full") == {"key": (4, 256), "value": (4, 256)}
    assert len(spec.groups()["full"][1]) == 5
    assert any("num_key_value_heads = 4 is the default of gemma3_text" in note for note in spec.notes)
    assert any("head_dim = 256" in note for note in spec.notes)


def test_a_note_is_made_once_not_once_a_layer() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    notes = read(text).notes
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize(
    ("names", "of"),
    [
        ({"n_layer": 4, "n_embd": 4096, "n_head": 32, "num_kv_heads": 8}, LLAMA),
        ({"num_layers": 4, "d_model": 4096, "num_heads": 32, "n_head_kv": 8}, LLAMA),
        ({"n_layers": 4, "dim": 4096, "n_heads": 32, "multi_query_group_num": 8}, LLAMA),
        ({"decoder_layers": 4, "embed_dim": 4096, "decoder_attention_heads": 32, "num_attention_groups": 8}, LLAMA),
    ],
)
def test_fields_have_other_names_in_older_configs(names: dict[str, Any], of: dict[str, Any]) -> None:
    spec = read({**names, "model_type": "nobody_knows", "dtype": "bfloat16"})
    assert spec.layers == read(of).layers


# ---- traps: lists of layers


@pytest.mark.parametrize(
    ("legacy", "kind"),
    [
        ("attention", "full"),
        ("global", "full"),
        ("sliding", "window"),
        ("local", "window"),
        ("swa", "window"),
        ("mamba", "state"),
        ("mamba2", "state"),
        ("gated_deltanet", "state"),
        ("kda", "state"),
        ("full_attention", "full"),
        ("sliding_attention", "window"),
        ("linear_attention", "state"),
    ],
)
def test_layer_types_have_older_names(legacy: str, kind: str) -> None:
    linear = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1}
    config = {**LLAMA, **linear, "model_type": "nobody_knows", "sliding_window": 64, "num_hidden_layers": 2}
    assert tags(read({**config, "layer_types": [legacy, "full"]})) == [kind, "full"]


def test_deepseek_sparse_attention_is_a_latent_and_an_indexer() -> None:
    config = {**MLA, "model_type": "deepseek_v32", "index_head_dim": 128, "num_hidden_layers": 2}
    assert tags(read({**config, "layer_types": ["deepseek_sparse_attention"] * 2})) == ["latent+indexer"] * 2


def test_a_layer_of_unknown_kind_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"layer 1 of model_type 'llama' is of unknown kind 'telepathy'; known: .*full"
    ):
        read({**LLAMA, "layer_types": ["full_attention", "telepathy", "full_attention", "full_attention"]})


def test_too_few_layer_types_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="3 layer types for 4 layers"):
        read({**LLAMA, "layer_types": ["full_attention"] * 3})


def test_layer_types_count_the_layers_where_nothing_else_does() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    assert read({**config, "model_type": "nobody_knows", "layer_types": ["full_attention"] * 7}).num_layers == 7


def test_a_list_may_go_on_with_the_draft_layers() -> None:
    """DeepSeek V4: 43 layers, 44 ratios; the last is the MTP layer's, a window alone."""
    config = example("deepseek-v4-flash")
    assert len(config["compress_ratios"]) == 44
    assert read(config).num_layers == len(read(config).layers) == 43
    with_draft = read(config, draft_layers=True)
    assert (with_draft.num_layers, len(with_draft.layers)) == (43, 44)
    assert tags(with_draft)[43] == "window"
    assert with_draft.layers[43].draft


def test_step_pads_its_layer_types_for_the_draft() -> None:
    step = {
        **LLAMA,
        "model_type": "step3p5",
        "num_attention_groups": 4,
        "num_key_value_heads": None,
        "sliding_window": 512,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 3],
        "num_nextn_predict_layers": 3,
    }  # fmt: skip
    assert tags(read(step)) == ["full", "window", "window", "full"]
    assert tags(read(step, draft_layers=True))[4:] == ["window"] * 3
    assert shapes(read(step), "full")["key"] == (4, 128)


def test_draft_layers_without_an_entry_are_as_the_last_layer_with_rows() -> None:
    assert tags(read(example("deepseek-v3"), draft_layers=True))[-2:] == ["latent", "latent"]
    assert (
        tags(read({**example("qwen3-next-80b"), "num_nextn_predict_layers": 2}, draft_layers=True))[-3:] == ["full"] * 3
    )
    nemotron = read({**example("nemotron-nano-9b-v2"), "num_nextn_predict_layers": 1}, draft_layers=True)
    assert tags(nemotron)[-2:] == ["", "full"]


def test_a_draft_layer_beyond_the_list_of_indexers_has_its_own() -> None:
    config = {**MLA, "model_type": "glm_moe_dsa", "index_head_dim": 128, "num_nextn_predict_layers": 1}
    config |= {"indexer_types": ["full", "shared"] * 2}
    assert tags(read(config, draft_layers=True))[4] == "latent+indexer"


def test_kimi_counts_its_layers_from_one() -> None:
    spec = read(example("kimi-linear-48b"))
    full = example("kimi-linear-48b")["linear_attn_config"]["full_attn_layers"]
    assert [index + 1 for index in spec.groups()["latent"][1]] == full
    assert spec.groups()["latent"][1][0] == 3


def test_qwen4_counts_its_per_layer_embeddings_from_one() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen4_exp_text",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "indexer_head_dim": 64,
        "ple_layer_ids": [1, 4],
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "hc_count": 2,
    }
    spec = read(config)
    assert spec.groups()["ple_state"][1] == (0, 3)
    assert shapes(spec, "ple_state") == {"ngram_state": (2,), "ple_conv_state": (2 * 4096, 2 * 3)}
    assert kept(spec, "ple_state").role("ngram_state").dtype is DType.INT64


def test_num_hidden_layers_is_ignored_where_a_pattern_is_the_model() -> None:
    nemotron = {**example("nemotron-nano-9b-v2"), "num_hidden_layers": 3}
    assert read(nemotron).num_layers == len(nemotron["hybrid_override_pattern"]) == 56


def test_longcat_has_two_caches_a_layer_and_says_num_layers() -> None:
    spec = read(example("longcat-flash"))
    assert (spec.model_type, spec.num_layers) == ("longcat_flash", 28)
    assert spec.bytes_per_token() == 56 * 576 * 2


def test_a_config_without_a_model_type_is_told_by_its_architecture() -> None:
    assert "model_type" not in example("longcat-flash")
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert read({**config, "architectures": ["LlamaForCausalLM"]}).notes == ()


@pytest.mark.parametrize("key", ["2", "02", "0002"])
def test_per_layer_config_may_have_zero_padded_keys(key: str) -> None:
    spec = read({**LLAMA, "per_layer_config": {key: {"num_key_value_heads": 2, "head_dim": 64}}})
    assert tags(spec) == ["full", "full", "full.2", "full"]
    assert shapes(spec, "full.2")["key"] == (2, 64)


def test_per_layer_config_may_give_one_layer_a_window_and_take_anothers_away() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
    spec = read({**mistral, "per_layer_config": {"1": {"sliding_window": None}, "2": {"sliding_window": 9}}})
    assert [layer.caches[0].reach for layer in spec.layers] == [Window(64), Full(), Window(9), Window(64)]
    spec = read({**LLAMA, "per_layer_config": {"3": {"attention_chunk_size": 32}}})
    assert [layer.caches[0].reach for layer in spec.layers] == [Full(), Full(), Full(), Chunk(32)]


def test_a_layer_that_skips_attention_keeps_no_rows() -> None:
    """transformers names the parts that a pruned layer lacks "attention" and "mlp"."""
    skips = {"1": {"skip": ["attention"]}, "2": {"skip": ["mlp"]}}
    assert tags(read({**LLAMA, "per_layer_config": skips})) == ["full", "", "full", "full"]
    falcon = read({**example("falcon-h1-34b"), "per_layer_config": {"0": {"skip": ["attention", "mlp"]}}})
    assert tags(falcon)[:2] == ["state", "full+state"]


def test_fields_may_be_lists_by_layer() -> None:
    spec = read({**LLAMA, "num_key_value_heads": [8, 4, 4, 8], "head_dim": 128})
    assert [layer.caches[0].role("key").shape[0] for layer in spec.layers] == [8, 4, 4, 8]
    with pytest.raises(ConfigError, match="num_key_value_heads has 2 entries, none for layer 2"):
        read({**LLAMA, "num_key_value_heads": [8, 4]})


def test_layers_found_by_search_have_their_own_heads_or_none() -> None:
    blocks = [{"attention": {"n_heads_in_group": 4}}, {"attention": {"n_heads_in_group": None, "no_op": True}}]
    config = {**LLAMA, "model_type": "nemotron-nas", "block_configs": blocks * 2}
    assert tags(read(config)) == ["full", "", "full", ""]
    assert shapes(read(config), "full")["key"] == (8, 128)


# ---- traps: W, W + 1, W / 2


def test_mimo_counts_the_window_without_the_query() -> None:
    assert kept(read(example("mimo-v2-flash")), "window").reach == Window(129)


def test_kolibri_counts_the_query_in_its_window() -> None:
    kolibri = {**LLAMA, "model_type": "kolibri1", "num_hidden_layers": 10, "sliding_window": 513}
    assert pattern(kolibri) == "wwwwfwwwwf"
    assert kept(read(kolibri), "window").reach == Window(513)


def test_modernbert_looks_half_its_local_attention_back() -> None:
    modernbert = {**LLAMA, "model_type": "modernbert-decoder", "local_attention": 128}
    assert kept(read(modernbert), "window").reach == Window(64)


def test_modernbert_has_keys_for_every_head_whatever_a_config_says() -> None:
    modernbert = {**LLAMA, "model_type": "modernbert-decoder", "local_attention": 128}
    stray = read({**modernbert, "num_key_value_heads": 2})
    plain = read({name: value for name, value in modernbert.items() if name != "num_key_value_heads"})
    assert shapes(stray, "window") == shapes(plain, "window")
    assert shapes(stray, "full") == shapes(plain, "full")


@pytest.mark.parametrize(("both_ways", "rows"), [(True, 513), (False, 1024)])
def test_attention_both_ways_halves_the_window(both_ways: bool, rows: int) -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024, "head_dim": 256}
    spec = read({**gemma, "use_bidirectional_attention": both_ways})
    assert kept(spec, "window").reach == Window(rows)


# ---- traps: unknown models and missing fields


def test_an_unknown_model_type_whose_fields_suffice_is_planned_and_says_so() -> None:
    spec = read({**LLAMA, "model_type": "llama9"})
    assert spec.layers == read(LLAMA).layers
    assert "model_type 'llama9' is not known here: planned by the general rule" in spec.notes


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, {"num_hidden_layers", "num_attention_heads", "hidden_size"}),
        ({"num_hidden_layers": 4}, {"num_attention_heads", "hidden_size"}),
        ({"num_hidden_layers": 4, "hidden_size": 64}, {"num_attention_heads"}),
        ({"head_dim": 64}, {"num_hidden_layers", "num_attention_heads"}),
        ({"head_dim": 64, "num_key_value_heads": 2}, {"num_hidden_layers"}),
        ({"num_key_value_heads": 2, "num_hidden_layers": 4}, {"num_attention_heads", "hidden_size"}),
        ({"kv_lora_rank": 512}, {"num_hidden_layers", "qk_rope_head_dim"}),
        ({"layer_types": ["full_attention"]}, {"num_attention_heads", "hidden_size"}),
        ({"layer_types": ["mamba"]}, {"mamba_d_state", "linear_num_value_heads", "linear_conv_kernel_dim"}),
    ],
)
def test_an_unknown_model_type_with_missing_fields_names_them_all(given: dict[str, Any], missing: set[str]) -> None:
    with pytest.raises(ConfigError, match="model_type 'nobody_knows'") as error:
        read({"model_type": "nobody_knows", **given})
    named = {word.strip(",;:") for word in str(error.value).partition(" (or ")[0].split()} | {
        part.split()[0].strip(",;") for part in str(error.value).split("; ") if " is missing" in part
    }
    assert missing <= named
    others = {"num_hidden_layers", "num_attention_heads", "hidden_size", "qk_rope_head_dim"} - missing
    assert not any(f"{name} is missing" in str(error.value) for name in others)


def test_fields_that_suffice_without_query_heads_suffice() -> None:
    config = {"model_type": "nobody_knows", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    assert shapes(read(config), "full")["key"] == (4, 64)


def test_an_unknown_recurrent_model_needs_no_heads() -> None:
    config = {"model_type": "nobody_knows", "layer_types": ["mamba"] * 2, "hidden_size": 64, "expand": 2}
    spec = read({**config, "state_size": 16, "conv_kernel": 4})
    assert tags(spec) == ["state", "state"]


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm", "reformer", "xlnet"])
def test_a_family_that_keeps_something_else_is_refused_rather_than_mispriced(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"layers of model_type '{model_type}' keep .* not known here"):
        read(CONFIG_MAPPING[model_type]().to_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": -4}, ("num_hidden_layers", "at least 0", "-4")),
        ({"num_hidden_layers": "four"}, ("num_hidden_layers", "whole number", "'four'")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "whole number", "True")),
        ({"num_key_value_heads": 2.5}, ("num_key_value_heads", "whole number", "2.5")),
        ({"num_key_value_heads": 0}, ("cache 'full'", "0 bytes", "key (0, 128)")),
        ({"num_hidden_layers": 0}, ("no layers",)),
        ({"layer_types": "full"}, ("layer_types must be a list", "'full'")),
        ({"num_attention_heads": 0}, ("num_attention_heads", "at least 1", "got 0")),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises((ConfigError, SpecError)) as error:
        read({**LLAMA, **change})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "whisper", "encoder_layers": 2, "decoder_layers": 2}, "whisper is an encoder-decoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder: .*cross-attention"),
        ({"model_type": "bert"}, "bert is an encoder: .* no KV cache to plan"),
        ({"model_type": "xlm-roberta", "is_decoder": False}, "is_decoder: true"),
    ],
)
def test_a_model_with_an_encoder_is_refused_with_what_a_plan_would_leave_out(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read({**LLAMA, **config})


def test_a_decoder_of_an_encoder_family_is_read() -> None:
    assert tags(read({**LLAMA, "model_type": "bert", "is_decoder": True})) == ["full"] * 4
    assert tags(read({**LLAMA, "model_type": "bart", "is_encoder_decoder": False, "encoder_layers": 2})) == ["full"] * 4


def broken(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config with each of its fields, nested ones too, missing or nonsense in turn."""
    result = []
    for key, value in config.items():
        result += [{k: v for k, v in config.items() if k != key}]
        result += [{**config, key: nonsense} for nonsense in (None, 0, "x", [1])]
        if isinstance(value, dict):
            result += [{**config, key: inner} for inner in broken(value)]
    return result


BREAKABLE = (
    "bamba-9b", "deepseek-v4-flash", "gemma-3n-e4b", "glm-5.2", "jamba-1.5-mini", "kimi-k3", "lfm2-1.2b",
    "llama-4-scout", "longcat-flash", "mimo-v2-flash", "minimax-text-01", "nemotron-nano-9b-v2",
    "qwen3-next-80b", "zaya1",
)  # fmt: skip


@pytest.mark.parametrize("name", BREAKABLE)
def test_a_broken_config_is_read_or_refused_but_never_crashes(name: str) -> None:
    for config in broken(example(name)):
        with suppress(KVWeaveError):
            read(config, dtype="fp8", draft_layers=True)


def test_transformers_gives_mimo_windows_twice_the_heads_whatever_the_config_says() -> None:
    config = {**example("mimo-v2-flash"), "num_key_value_heads": 1, "swa_num_key_value_heads": 1}
    assert read(config).groups()["window"][0].role("key").shape[0] == 1
    assert read(config, store="transformers").groups()["window"][0].role("key").shape[0] == 2


# ---- where configs come from


def test_a_config_is_a_file_a_directory_a_dict_or_a_transformers_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16"
    )
    for source in (path, str(path), tmp_path, LLAMA, config):
        assert from_config(source).layers == read(LLAMA).layers


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", ("config.json is not valid JSON",)), ("[1]", ("holds a JSON list",)), ("\xff", ("is not valid JSON",))],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        from_config(path)
    for word in words:
        assert word in str(error.value)


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        from_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="expected a path, a dict or a transformers config, got int"):
        from_config(7)


# ---- hub spelling and transformers' spelling are one model

NOT_IN_TRANSFORMERS = {
    "hunyuan-large": "its model_type is not in transformers",
    "step-3": "its model_type is not in transformers",
    "ling-2.5": "transformers takes Ling 2.5 for Ling 3 and writes a convolution into it",
    "minimax-text-01": "transformers' class does not read the hub's attn_type_list",
}


def saved_by_transformers(hub: dict[str, Any]) -> dict[str, Any]:
    """What save_pretrained would write for a hub config, of the class that knows it, or knows its language model."""
    named = hub.get("model_type", "longcat_flash")
    if named not in CONFIG_MAPPING:
        hub, named = hub.get("text_config", hub), SAME_AS[named]
    saved: dict[str, Any] = CONFIG_MAPPING[named].from_dict({**hub, "model_type": named}).to_dict()
    return saved


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NOT_IN_TRANSFORMERS.keys()))
def test_a_config_saved_by_transformers_is_the_same_model(name: str) -> None:
    hub = example(name)
    saved = json.loads(json.dumps(saved_by_transformers(hub)))
    assert saved.keys() != hub.keys()
    for how in ({"draft_layers": True}, {"dtype": "fp8"}, {"store": "transformers"}):
        assert read(saved, **how).layers == read(hub, **how).layers


def test_what_transformers_cannot_save_is_still_so() -> None:
    for name in ("ling-2.5", "minimax-text-01"):
        assert read(saved_by_transformers(example(name))).layers != read(example(name)).layers
    for name in ("hunyuan-large", "step-3"):
        assert example(name)["model_type"] not in CONFIG_MAPPING


# ---- family rules, in the order of the table


def test_llama_keeps_keys_and_values_of_its_kv_heads() -> None:
    spec = read(LLAMA)
    assert pattern(LLAMA) == "ffff"
    assert shapes(spec, "full") == {"key": (8, 128), "value": (8, 128)}
    assert spec.bytes_per_token() == 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "starcoder2", "mixtral"])
def test_a_window_without_layer_types_is_for_all_layers(model_type: str) -> None:
    assert pattern({**LLAMA, "model_type": model_type, "sliding_window": 64}) == "wwww"
    assert pattern({**LLAMA, "model_type": model_type, "sliding_window": None}) == "ffff"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows_start_at_max_window_layers(model_type: str) -> None:
    qwen = {**LLAMA, "model_type": model_type, "sliding_window": 64, "use_sliding_window": True}
    assert pattern({**qwen, "max_window_layers": 3}) == "fffw"
    assert pattern({**qwen, "max_window_layers": 0}) == "wwww"


@pytest.mark.parametrize(
    ("config", "letters"),
    [
        ({"model_type": "gemma2"}, "wfwfwfwfwfwf"),
        ({"model_type": "gpt_oss"}, "wfwfwfwfwfwf"),
        ({"model_type": "gemma3_text"}, "wwwwwfwwwwwf"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, "wwfwwfwwfwwf"),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 4}, "wwwfwwwfwwwf"),
        ({"model_type": "cohere2"}, "wwwfwwwfwwwf"),
        ({"model_type": "cohere2", "sliding_window_pattern": 2}, "wfwfwfwfwfwf"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "wwwfwwwfwwwf"),
        ({"model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": 4}, "f" * 12),
        ({"model_type": "olmo3"}, "wwwfwwwfwwwf"),
        ({"model_type": "kolibri1", "num_hidden_layers": 10}, "wwwwfwwwwf"),
        ({"model_type": "muse_spark_text", "num_hidden_layers": 10}, "wfwwwfwwwf"),
        ({"model_type": "modernbert-decoder", "local_attention": 64}, "fwwfwwfwwfww"),
        ({"model_type": "afmoe"}, "wwwfwwwfwwwf"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "fffwfffwfffw"),
        ({"model_type": "cwm"}, "fwwwfwwwfwww"),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 6]], "window_size": 8}, "fwfwfwfwfwfw"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_window_patterns_repeat_as_each_family_has_it(config: dict[str, Any], letters: str) -> None:
    assert pattern({**LLAMA, "num_hidden_layers": 12, "sliding_window": 64, **config}) == letters


def test_layers_of_gemma_3n_that_share_read_the_last_of_their_kind() -> None:
    spec = read(example("gemma-3n-e4b"))
    assert set(tags(spec)[20:]) == {"<18", "<19"}
    assert [layer.reads[0].layer for layer in spec.layers[20:]] == [18, 18, 18, 18, 19] * 3
    assert spec.layers[24].reads == (Read(19, "full"),)
    assert spec.layers[20].reads == (Read(18, "window"),)


def test_gemma_4_full_layers_have_heads_and_widths_of_their_own() -> None:
    spec = read(example("gemma-4-31b"))
    assert shapes(spec, "window") == {"key": (16, 256), "value": (16, 256)}
    assert shapes(spec, "full") == {"key": (4, 512), "value": (4, 512)}
    assert all(role.alias_of is None for role in kept(spec, "full").roles)


def test_gemma_4_uses_global_heads_only_where_keys_are_values() -> None:
    gemma = {**LLAMA, "model_type": "gemma4_text", "num_global_key_value_heads": 2, "global_head_dim": 64}
    gemma |= {"sliding_window": 8, "head_dim": 32, "num_hidden_layers": 6}
    assert shapes(read({**gemma, "attention_k_eq_v": True}), "full")["key"] == (2, 64)
    assert shapes(read({**gemma, "attention_k_eq_v": False}), "full")["key"] == (8, 64)


def test_the_last_layer_of_gemma_4_is_full() -> None:
    gemma = {**LLAMA, "model_type": "gemma4_text", "sliding_window": 8, "num_hidden_layers": 8}
    assert pattern(gemma) == "wwwwwfwf"


def test_llama_4_is_chunks_but_for_every_fourth_layer() -> None:
    llama4 = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192, "num_hidden_layers": 8}
    assert pattern({**llama4, "no_rope_layers": []}) == "cccfcccf"
    assert pattern({**llama4, "no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0]}) == "cfcccccf"
    assert pattern({**llama4, "no_rope_layer_interval": 2}) == "cfcfcfcf"
    cache = kept(read(llama4), "chunk")
    assert cache.reach == Chunk(8192)
    assert [cache.bytes_at(n) // 4096 for n in (8191, 8192, 8200)] == [8191, 0, 8]


def test_step_3_has_one_wide_head() -> None:
    assert shapes(read(example("step-3")), "full") == {"key": (1, 256), "value": (1, 256)}


def test_mimo_windows_have_heads_and_widths_of_their_own() -> None:
    spec = read(example("mimo-v2-flash"))
    assert shapes(spec, "full") == {"key": (4, 192), "value": (4, 128)}
    assert shapes(spec, "window") == {"key": (8, 192), "value": (8, 128)}
    assert tags(spec)[:7] == ["full", "window", "window", "window", "window", "full", "window"]


def test_mimo_saved_by_transformers_has_twice_the_heads_in_windows() -> None:
    saved = {**LLAMA, "model_type": "mimo_v2_flash", "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
    saved |= {"sliding_window": 129, "layer_types": ["full_attention", "sliding_attention"] * 2}
    assert shapes(read(saved), "window") == {"key": (8, 192), "value": (8, 128)}
    assert kept(read(saved), "window").reach == Window(129)


def test_every_second_layer_of_hunyuan_large_reads_the_one_before() -> None:
    spec = read(example("hunyuan-large"))
    assert tags(spec)[:4] == ["full", "<0", "full", "<2"]
    assert spec.bytes_per_token() == 32 * 2 * 8 * 80 * 2


def test_a_share_factor_without_use_cla_shares_nothing() -> None:
    assert tags(read({**LLAMA, "model_type": "hunyuan_v1_dense", "cla_share_factor": 2})) == ["full"] * 4


@pytest.mark.parametrize(
    "model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "mistral4"]
)
def test_latent_models_keep_one_row_for_all_heads(model_type: str) -> None:
    spec = read({**MLA, "model_type": model_type})
    assert pattern({**MLA, "model_type": model_type}) == "llll"
    assert shapes(spec, "latent") == {"latent": (576,)}
    assert kept(spec, "latent").roles[0].shard(8).shape == (576,)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "axk2"])
def test_sparse_latent_models_have_an_indexer_on_every_layer(model_type: str) -> None:
    spec = read({**MLA, "model_type": model_type, "index_head_dim": 128})
    assert tags(spec) == ["latent+indexer"] * 4
    assert shapes(spec, "indexer") == {"indexer": (128,)}


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"indexer_types": ["full", "shared"] * 4}, [0, 2, 4, 6]),
        ({"index_topk_pattern": "FFSSFSSS"}, [0, 1, 4]),
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [0, 3, 6]),
    ],
)
def test_glm_layers_own_an_indexer_or_share_an_earlier_ones(fields: dict[str, Any], owners: list[int]) -> None:
    spec = read({**MLA, **fields, "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "index_head_dim": 128})
    assert list(spec.groups()["indexer"][1]) == owners
    assert len(spec.groups()["latent"][1]) == 8


def test_hy_v4_owns_indexers_at_the_first_layer_and_every_fourth_after_it() -> None:
    hy = {**MLA, "model_type": "hy_v4", "num_hidden_layers": 10, "index_head_dim": 128}
    assert read(hy).groups()["indexer"][1] == (0, 1, 5, 9)
    assert read({**hy, "indexer_types": ["full"] * 3 + ["shared"] * 7}).groups()["indexer"][1] == (0, 1, 2)


def test_mistral_large_4_drops_rope_columns_and_shares_latents_but_not_indexers() -> None:
    config = {**MLA, "model_type": "mistral_large4_text", "index_head_dim": 128, "no_rope_layers": [1, 1, 1, 0]}
    spec = read({**config, "kv_source_layers": [0, 0, 2, 3]})
    assert tags(spec) == ["latent+indexer", "indexer<0", "latent+indexer", "latent.2+indexer"]
    assert (shapes(spec, "latent"), shapes(spec, "latent.2")) == ({"latent": (576,)}, {"latent": (512,)})


def test_mistral_large_4_keeps_no_latent_where_it_shares_one_of_another_width() -> None:
    config = {**MLA, "model_type": "mistral_large4_text", "index_head_dim": 128, "no_rope_layers": [1, 1, 1, 0]}
    spec = read({**config, "kv_source_layers": [0, 1, 2, 2]})
    assert tags(spec) == ["latent+indexer"] * 3 + ["indexer<2"]


def test_deepseek_v4_compresses_by_ratio() -> None:
    spec = read({**example("deepseek-v4-flash"), "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]})
    csa = "window+csa+indexer+csa_state+indexer_state"
    assert tags(spec) == ["window", csa, "window+hca+hca_state", csa]
    assert kept(spec, "csa").role("compressed").tokens_per_row == 4
    assert kept(spec, "hca").role("compressed").tokens_per_row == 128
    assert kept(spec, "indexer").role("indexer").tokens_per_row == 4
    assert kept(spec, "window").role("value").alias_of == "key"
    assert kept(spec, "window").fixed_bytes() == 128 * 512 * 2


def test_deepseek_v4_saved_by_transformers_names_its_rates() -> None:
    config = {key: value for key, value in example("deepseek-v4-flash").items() if key != "compress_ratios"}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    spec = read({**config, "num_hidden_layers": 3, "layer_types": kinds, "compress_rates": rates})
    assert kept(spec, "csa").role("compressed").tokens_per_row == 8
    assert kept(spec, "hca").role("compressed").tokens_per_row == 64


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="deepseek_v4"):
        read({**example("deepseek-v4-flash"), "compress_ratios": [7] * 44})


def test_kimi_linear_keeps_three_convolutions_and_a_state() -> None:
    spec = read(example("kimi-linear-48b"))
    assert shapes(spec, "state") == {"conv_state": (3 * 32 * 128, 3), "ssm_state": (32, 128, 128)}
    assert shapes(spec, "latent") == {"latent": (576,)}
    assert kept(spec, "state").role("ssm_state").dtype is DType.FLOAT32


def test_kimi_linear_without_a_list_has_transformers_default() -> None:
    config = {**MLA, "model_type": "kimi_linear", "num_hidden_layers": 9, "linear_num_heads": 2, "linear_head_dim": 8}
    assert pattern({**config, "linear_conv_kernel_dim": 4}) == "sssslsssl"


def test_ling_2_and_ling_3_share_a_model_type_and_differ_by_their_convolution() -> None:
    two, three = read(example("ling-2.5")), read(example("ling-3.0-flash"))
    assert two.model_type == three.model_type == "bailing_hybrid"
    assert shapes(two, "state") == {"ssm_state": (64, 128, 128)}
    assert shapes(three, "state") == {"conv_state": (3 * 32 * 128, 3), "ssm_state": (32, 128, 128)}
    size = example("ling-3.0-flash")["layer_group_size"]
    assert [index for index, tag in enumerate(tags(three)) if tag == "latent"] == list(range(size - 1, 42, size))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_gated_delta_nets_keep_a_convolution_over_queries_keys_and_values(model_type: str) -> None:
    config = {**example("qwen3-next-80b"), "model_type": model_type}
    spec = read(config)
    assert tags(spec)[:4] == ["state", "state", "state", "full"]
    assert shapes(spec, "state") == {"conv_state": (2 * 16 * 128 + 32 * 128, 3), "ssm_state": (32, 128, 128)}
    assert shapes(spec, "full")["key"] == (2, 256)
    half = read({**config, "mamba_ssm_dtype": "bfloat16"})
    assert kept(half, "state").role("ssm_state").dtype is DType.BFLOAT16
    assert tags(read({**config, "full_attention_interval": 2}))[:2] == ["state", "full"]


def test_heads_of_a_delta_net_are_divided_and_so_is_its_convolution() -> None:
    conv, ssm = (role.shard(8) for role in kept(read(example("qwen3-next-80b")), "state").roles)
    assert conv.shape == (2 * 2 * 128 + 4 * 128, 3)
    assert ssm.shape == (4, 128, 128)


def test_olmo_hybrid_derives_its_widths() -> None:
    config = {**LLAMA, "model_type": "olmo_hybrid", "linear_conv_kernel_dim": 4, "linear_key_head_dim": None}
    config |= {"linear_num_key_heads": 32, "linear_num_value_heads": 32, "linear_value_head_dim": None}
    assert shapes(read(config), "state")["ssm_state"] == (32, 96, 192)


def test_qwen4_has_an_indexer_beside_its_full_layers() -> None:
    config = {**example("qwen3-next-80b"), "model_type": "qwen4_exp_text", "indexer_head_dim": 64}
    assert tags(read(config))[3] == "full+indexer"


def test_glm5_next_pools_its_index_keys() -> None:
    config = {**MLA, "model_type": "glm5_next_text", "qk_rope_head_dim": 0, "index_head_dim": 128, "index_kpool": 16}
    config |= {"linear_num_heads": 4, "linear_head_dim": 32, "linear_conv_kernel_dim": 4}
    spec = read(config)
    assert tags(spec) == ["state", "state", "state", "latent+indexer+indexer_state"]
    assert shapes(spec, "latent") == {"latent": (512,)}
    assert kept(spec, "indexer").bytes_per_token() == Fraction(256, 16)
    assert kept(spec, "indexer_state").reach == Chunk(16)


def test_minimax_says_one_for_softmax() -> None:
    config = {**LLAMA, "model_type": "minimax", "head_dim": 64}
    assert pattern({**config, "attn_type_list": [0, 0, 0, 1]}) == "sssf"
    assert pattern(config) == "fsfs"
    assert shapes(read(config), "state") == {"ssm_state": (32, 64, 64)}
    assert kept(read(config), "state").roles[0].dtype is DType.FLOAT32
    assert kept(read(config, store="transformers"), "state").roles[0].dtype is DType.BFLOAT16


def test_minimax_m3_has_index_keys_on_sparse_layers() -> None:
    spec = read(example("minimax-m3"))
    assert tags(spec)[2:4] == ["full", "full+indexer"]
    assert shapes(spec, "indexer") == {"indexer": (1, 128)}


def test_jamba_attends_once_a_period() -> None:
    jamba = {**LLAMA, "model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_expand": 2}
    spec = read({**jamba, "mamba_d_state": 16, "mamba_d_conv": 4, "num_hidden_layers": 8})
    assert tags(spec) == ["state", "full", "state", "state"] * 2
    assert shapes(spec, "state") == {"conv_state": (8192, 3), "ssm_state": (8192, 16)}


def test_the_inner_width_of_falcon_mamba_is_its_intermediate_size() -> None:
    mamba = {"num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4, "expand": 2}
    for model_type in ("mamba", "falcon_mamba"):
        spec = read({**mamba, "model_type": model_type, "intermediate_size": 96})
        assert shapes(spec, "state") == {"conv_state": (96, 3), "ssm_state": (96, 16)}
        assert shapes(read({**mamba, "model_type": model_type}), "state")["ssm_state"] == (128, 16)


def test_mamba_2_has_heads_and_groups() -> None:
    spec = read(example("mamba2-2.7b"))
    assert shapes(spec, "state") == {"conv_state": (5120 + 2 * 128, 3), "ssm_state": (80, 64, 128)}


@pytest.mark.parametrize(("given", "dim"), [("auto", 64), (None, 64), (80, 80)])
def test_mamba_d_head_may_be_auto(given: Any, dim: int) -> None:
    spec = read({**example("bamba-9b"), "mamba_d_head": given})
    assert shapes(spec, "state")["ssm_state"] == (128, dim, 128)


def test_bamba_names_its_attention_layers() -> None:
    assert read(example("bamba-9b")).groups()["full"][1] == (9, 18, 27)


def test_granite_names_its_layers_mamba_and_attention() -> None:
    spec = read(example("granite-4.0-h-small"))
    assert {"mamba", "attention"} == set(example("granite-4.0-h-small")["layer_types"])
    assert (len(spec.groups()["state"][1]), len(spec.groups()["full"][1])) == (36, 4)


def test_nemotron_h_layers_are_letters_and_mlps_keep_nothing() -> None:
    config = {**example("nemotron-nano-9b-v2"), "hybrid_override_pattern": "M-*E"}
    assert tags(read(config)) == ["state", "", "full", ""]
    assert shapes(read(config), "state")["ssm_state"] == (128, 80, 128)
    half = read({**config, "mamba_ssm_cache_dtype": "bfloat16"})
    assert kept(half, "state").role("ssm_state").dtype is DType.BFLOAT16
    with pytest.raises(ConfigError, match="'Q'"):
        read({**config, "hybrid_override_pattern": "M-Q"})


def test_the_pattern_of_nemotron_h_says_how_many_layers_there_are() -> None:
    config = example("nemotron-nano-9b-v2")
    assert read({name: value for name, value in config.items() if name != "num_hidden_layers"}) == read(config)


def test_falcon_h1_has_both_in_every_layer_and_its_own_inner_width() -> None:
    spec = read(example("falcon-h1-34b"))
    assert set(tags(spec)) == {"full+state"}
    config = {**example("falcon-h1-34b"), "mamba_d_head": "auto", "mamba_d_ssm": 2048}
    assert shapes(read(config), "state")["ssm_state"] == (32, 64, 256)


def test_zamba_2_attention_is_twice_as_wide_and_caches_are_not_shared() -> None:
    spec = read(example("zamba2-7b"))
    assert shapes(spec, "full")["key"] == (32, 224)
    assert len(spec.groups()["full"][1]) == 13
    assert not any(layer.reads for layer in spec.layers)
    config = {k: v for k, v in example("zamba2-7b").items() if k != "layers_block_type"}
    with pytest.raises(ConfigError, match=r"layers_block_type is missing \(or hybrid_layer_ids\)"):
        read(config)


def test_zaya_delays_half_a_value_by_a_token() -> None:
    spec = read(example("zaya1"))
    assert shapes(spec, "state") == {"conv_state": ((8 + 2) * 128, 2), "delayed_value_state": (128,)}


def test_lfm2_keeps_short_convolutions_and_no_state() -> None:
    spec = read(example("lfm2-1.2b"))
    assert shapes(spec, "state") == {"conv_state": (2048, 2)}
    lfm2 = {k: v for k, v in example("lfm2-1.2b").items() if k != "layer_types"}
    assert read({**lfm2, "full_attn_idxs": [2, 5]}).groups()["full"][1] == (2, 5)


def test_recurrent_gemma_repeats_its_block_types() -> None:
    config = {**LLAMA, "model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"]}
    config |= {"num_hidden_layers": 7, "attention_window_size": 64, "lru_width": 96, "conv1d_width": 4}
    spec = read(config)
    assert tags(spec) == ["state", "state", "window", "state", "state", "window", "state"]
    assert shapes(spec, "state") == {"conv_state": (96, 3), "ssm_state": (96,)}
    assert kept(spec, "state").role("ssm_state").dtype is DType.FLOAT32


def test_inkling_has_four_convolutions_a_layer() -> None:
    spec = read(example("inkling"))
    assert shapes(spec, "window")["key"] == (16, 128)
    assert shapes(spec, "full")["key"] == (8, 128)
    assert len(kept(spec, "window_state").roles) == 4
    assert {role.dtype for role in kept(spec, "full_state").roles} == {DType.FLOAT32}


# ---- conventions


def test_engines_keep_one_column_less_of_a_convolution_than_transformers() -> None:
    config = example("bamba-9b")
    assert kept(read(config), "state").role("conv_state").shape[1] == 3
    assert kept(read(config, store="transformers"), "state").role("conv_state").shape[1] == 4


def test_transformers_keeps_a_latent_and_its_rope_apart_and_a_chunk_as_a_window() -> None:
    spec = read(MLA, store="transformers")
    assert shapes(spec, "latent") == {"latent": (1, 512), "rope": (1, 64)}
    llama4 = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 64}
    assert read(llama4, store="transformers").layers[0].caches[0].reach == Window(64)


# ---- quantised rows


def test_fp8_latents_are_rows_of_656_bytes() -> None:
    role = kept(read(MLA, dtype="fp8"), "latent").roles[0]
    assert role.row_bytes == 656
    assert role.parts == (
        Part("nope", (512,), DType.FLOAT8_E4M3),
        Part("scale", (4,), DType.FLOAT32),
        Part("rope", (64,), DType.BFLOAT16),
    )
    assert not role.planar


def test_fp8_indexers_are_planar_rows_of_132_bytes_and_pages_of_64() -> None:
    cache = kept(read(example("deepseek-v3.2"), dtype="fp8"), "indexer")
    assert cache.roles[0].row_bytes == 132
    assert cache.roles[0].planar
    assert cache.kernel_tokens == 64


def test_fp8_rows_of_v4_are_584_bytes_and_pages_end_on_576() -> None:
    spec = read(example("deepseek-v4-flash"), dtype="fp8")
    for tag, name in (("window", "key"), ("csa", "compressed"), ("hca", "compressed")):
        role = kept(spec, tag).role(name)
        assert (role.row_bytes, role.align, role.planar) == (584, 576, True)
    assert kept(spec, "window").role("value").alias_of == "key"
    assert kept(spec, "indexer").role("indexer").row_bytes == 132
    kernels = {"window": 64, "csa": 256, "hca": 256, "indexer": 256}
    assert {tag: kept(spec, tag).kernel_tokens for tag in kernels} == kernels


def test_plain_fp8_keys_and_values_are_one_byte_an_element() -> None:
    assert read(LLAMA, dtype="fp8").bytes_per_token() * 2 == read(LLAMA).bytes_per_token()
    assert kept(read(LLAMA, dtype="fp8"), "full").roles[0].dtype is DType.FLOAT8_E4M3


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [
        ("fp8_token_head", 4 * 2 * 8 * (128 + 4)),
        ("int8", 4 * 2 * 8 * (128 + 4)),
        ("int4", 4 * 2 * 8 * (64 + 4)),
        ("fp8_block", 4 * 2 * 8 * (128 + 4)),
        ("fp8_e5m2", 4 * 2 * 8 * 128),
        ("float32", 4 * 2 * 8 * 128 * 4),
        ("fp16", 4 * 2 * 8 * 128 * 2),
    ],
)
def test_scales_lie_beside_quantised_keys_and_values(dtype: str, bytes_per_token: int) -> None:
    spec = read(LLAMA, dtype=dtype)
    assert spec.bytes_per_token() == bytes_per_token
    for role in kept(spec, "full").roles:
        assert role.shard(4).shape[0] == 2


def test_block_wise_scales_are_one_for_each_128_values() -> None:
    wide = read({**LLAMA, "head_dim": 192}, dtype="fp8_block")
    assert shapes(wide, "full")["key_scale"] == (8, 2)


@pytest.mark.parametrize(("name", "what"), [("deepseek-v3", "MLA latents"), ("deepseek-v4-pro", "DeepSeek V4 rows")])
def test_a_layout_that_nobody_has_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} have no int8 layout; take fp8"):
        read(example(name), dtype="int8")


def test_states_stay_as_they_are_whatever_rows_are_quantised_to() -> None:
    plain, fp8 = (read(example("qwen3-next-80b"), dtype=dtype) for dtype in ("auto", "fp8"))
    assert kept(plain, "state") == kept(fp8, "state")
    assert kept(fp8, "state").reach == State()
