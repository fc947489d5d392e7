"""Draft models join the target's groups by tag; "default" stands for the one equal; the rest are named errors."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given

from kvweave import from_config, make_plan, merge_draft
from kvweave.errors import AmbiguousDraft, DraftMismatch, PlanError
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Read, Role, State, Window
from tests import strategies

KEY = Role("key", (8, 128), DType.BFLOAT16)
FULL = LayerCache("full", Full(), (KEY,))
OTHER = LayerCache("other", Full(), (Role("key", (2, 64), DType.BFLOAT16),))
WINDOW = LayerCache("window", Window(64), (KEY,))
STATE = LayerCache("state", State(), (Role("ssm_state", (64,), DType.FLOAT32),))
TARGET = ModelSpec("target", (Layer((STATE,)), Layer((FULL,)), Layer((WINDOW,)), Layer((OTHER,))), notes=("a",))


def draft(*caches: LayerCache, layers: int = 1) -> ModelSpec:
    return ModelSpec("draft", tuple(Layer(caches) for _ in range(layers)), notes=("b",))


def example(name: str) -> ModelSpec:
    return from_config(str(files("kvweave") / "examples" / f"{name}.json"))


# ---- what joins


def test_a_draft_joins_the_group_of_its_tag() -> None:
    merged = merge_draft(TARGET, draft(FULL, layers=2))
    assert merged.groups()["full"] == (FULL, (1, 4, 5))
    assert [layer.draft for layer in merged.layers] == [False] * 4 + [True] * 2
    assert (merged.num_layers, merged.model_type) == (4, "target")
    assert merged.notes == ("a", "draft: b")


def test_a_draft_with_several_tags_joins_them_all() -> None:
    merged = merge_draft(TARGET, draft(FULL, STATE))
    assert merged.groups()["full"][1] == (1, 4)
    assert merged.groups()["state"][1] == (0, 4)


def test_the_sole_group_default_stands_for_its_one_equal() -> None:
    merged = merge_draft(TARGET, draft(replace(FULL, tag="default")))
    assert merged.groups()["full"][1] == (1, 4)
    assert "default" not in merged.groups()


def test_an_exact_default_is_not_looked_for_elsewhere() -> None:
    target = ModelSpec("target", (Layer((replace(FULL, tag="default"),)), Layer((FULL,))))
    merged = merge_draft(target, draft(replace(FULL, tag="default")))
    assert merged.groups()["default"][1] == (0, 2)


def test_modules_merge_one_after_the_other() -> None:
    """RTP-LLM: main layers 2, module layers 3: module 0 has layers 2, 3, 4, module 1 has 5, 6, 7."""
    target = ModelSpec("target", (Layer((FULL,)),) * 2)
    module = draft(replace(FULL, tag="default"), layers=3)
    merged = merge_draft(merge_draft(target, module), module)
    assert [index for index, layer in enumerate(merged.layers) if layer.draft] == [2, 3, 4, 5, 6, 7]
    assert merged.groups()["full"][1] == tuple(range(8))
    assert merged.num_layers == 2


def test_a_draft_sees_its_layers_in_the_targets_groups_and_empty_ones_beside() -> None:
    """So that the numbers of groups, and the block tables, are valid for both."""
    merged = merge_draft(TARGET, draft(FULL))
    mine = merged.restrict({4})
    made = make_plan(mine, "1MB")
    assert {group.tag: group.layers for group in made.groups} == {"full": (4,), "state": (), "window": (), "other": ()}
    assert made.draft_layers == (4,)


def test_reads_of_a_draft_are_moved_with_it() -> None:
    reader = ModelSpec("draft", (Layer((FULL,)), Layer(reads=(Read(0, "full"),))))
    merged = merge_draft(TARGET, reader)
    assert merged.layers[5].reads == (Read(4, "full"),)
    aliased = merge_draft(TARGET, reader.retag({"full": "default"}))
    assert aliased.layers[5].reads == (Read(4, "full"),)


def test_groups_of_its_own_are_for_a_draft_that_differs() -> None:
    merged = merge_draft(TARGET, draft(replace(FULL, reach=Window(9))), own_groups=True)
    assert merged.groups()["draft.full"][1] == (4,)
    assert merged.groups()["full"][1] == (1,)
    assert make_plan(merged, "1MB").group("draft.full").layers == (4,)


def test_the_eagle_head_of_llama_joins_it() -> None:
    """Its config says float16 and the target's bfloat16: as written they differ, in one dtype they are equal."""
    target, head = example("llama-3.1-8b"), example("eagle3-llama-3.1-8b")
    with pytest.raises(DraftMismatch, match=r"group 'full'.*dtype \(bfloat16 and float16\)"):
        merge_draft(target, head)
    equal = from_config(str(files("kvweave") / "examples" / "eagle3-llama-3.1-8b.json"), dtype="bfloat16")
    assert merge_draft(target, equal).bytes_per_token() == 33 * 4096


def test_the_mtp_layer_of_deepseek_v3_joins_it_either_way() -> None:
    merged = merge_draft(example("deepseek-v3"), example("deepseek-v3-nextn"))
    config = str(files("kvweave") / "examples" / "deepseek-v3.json")
    assert merged.layers == from_config(config, draft_layers=True).layers


@given(strategies.models())
def test_a_model_may_be_its_own_draft(spec: ModelSpec) -> None:
    merged = merge_draft(spec, spec)
    assert merged.bytes_per_token() == 2 * spec.bytes_per_token()
    assert len(merged.layers) == 2 * len(spec.layers)
    assert merged.groups().keys() == spec.groups().keys()
    assert ModelSpec.from_dict(merged.to_dict()) == merged


@given(strategies.models(), strategies.models())
def test_groups_of_its_own_always_merge(target: ModelSpec, other: ModelSpec) -> None:
    merged = merge_draft(target, other, own_groups=True)
    assert merged.bytes_per_token() == target.bytes_per_token() + other.bytes_per_token()
    assert merged.state_bytes() == target.state_bytes() + other.state_bytes()


# ---- what does not


def test_a_draft_that_differs_names_the_tag_and_the_field() -> None:
    other = replace(FULL, roles=(Role("key", (4, 128), DType.BFLOAT16),))
    with pytest.raises(DraftMismatch, match=r"'full'.*role 'key' shape \(\(8, 128\) and \(4, 128\)\)"):
        merge_draft(TARGET, draft(other))


def test_a_tag_that_the_target_lacks_is_an_error_that_lists_its_tags() -> None:
    with pytest.raises(
        DraftMismatch,
        match=r"'mine' is not among the target's \(state, full, window, other\); give the draft its own groups",
    ):
        merge_draft(TARGET, draft(replace(FULL, tag="mine")))


def test_a_default_with_two_equals_is_ambiguous() -> None:
    target = ModelSpec("target", (Layer((FULL,)), Layer((replace(FULL, tag="again"),))))
    with pytest.raises(AmbiguousDraft, match="several of the target's: full, again; name one"):
        merge_draft(target, draft(replace(FULL, tag="default")))


def test_a_default_without_an_equal_is_a_mismatch() -> None:
    wide = replace(FULL, tag="default", roles=(Role("key", (9, 128), DType.BFLOAT16),))
    with pytest.raises(DraftMismatch, match="equals none of the target's"):
        merge_draft(TARGET, draft(wide))


def test_only_a_sole_full_attention_group_may_be_called_default() -> None:
    with pytest.raises(DraftMismatch, match="'default' is not among"):
        merge_draft(TARGET, draft(replace(FULL, tag="default"), STATE))
    with pytest.raises(DraftMismatch, match="'default' is not among"):
        merge_draft(TARGET, draft(replace(STATE, tag="default")))
    with pytest.raises(DraftMismatch, match="'default' is not among"):
        merge_draft(TARGET, draft(replace(WINDOW, tag="default")))


def test_the_errors_of_drafts_are_a_family() -> None:
    assert issubclass(AmbiguousDraft, DraftMismatch)
    assert issubclass(DraftMismatch, PlanError)


def test_an_error_leaves_both_as_they_were() -> None:
    target, before = TARGET, TARGET.to_dict()
    with pytest.raises(DraftMismatch):
        merge_draft(target, draft(replace(FULL, tag="mine")))
    assert target.to_dict() == before
