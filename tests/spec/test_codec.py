"""JSON in and out: nothing is lost, and what is wrong is named with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from kvweave import from_config
from kvweave.errors import KVWeaveError, SpecError, UnknownName
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Part, Reach, Role, Segment, codec
from tests import strategies

SPEC = ModelSpec(
    "mine",
    (
        Layer((LayerCache("full", Full(), (Role("key", (8, 128), DType.BFLOAT16, split=(Segment(8),)),)),)),
        Layer(draft=True),
    ),
)


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    back: dict[str, Any] = json.loads(json.dumps(data))
    return back


@given(strategies.models())
def test_a_model_goes_to_json_and_back(spec: ModelSpec) -> None:
    back = ModelSpec.from_dict(through_json(spec.to_dict()))
    assert back == spec
    assert back.notes == spec.notes
    assert back.digest() == spec.digest()


@given(strategies.roles())
def test_a_role_goes_to_json_and_back(role: Role) -> None:
    assert codec.from_dict(Role, through_json(codec.to_dict(role)), "role") == role


@given(strategies.caches())
def test_a_cache_goes_to_json_and_back(cache: LayerCache) -> None:
    assert codec.from_dict(LayerCache, through_json(codec.to_dict(cache)), "cache") == cache


@given(strategies.models())
def test_a_digest_changes_with_anything_that_decides_bytes(spec: ModelSpec) -> None:
    tag, (cache, _) = next(iter(spec.groups().items()))
    changed = [
        spec.retag({tag: "another"}),
        spec.map_caches(lambda kept: replace(kept, context_split=not kept.context_split)),
        spec.map_caches(lambda kept: replace(kept, roles=(*kept.roles, Role("extra", (1,), DType.INT8)))),
        replace(spec, layers=(*spec.layers, Layer((cache,), draft=True))),
        replace(spec, model_type="another"),
    ]
    digests = [one.digest() for one in (spec, *changed)]
    assert len(set(digests)) == len(digests)


def test_notes_are_no_part_of_a_spec() -> None:
    noted = ModelSpec(SPEC.model_type, SPEC.layers, notes=("read on a Monday",))
    assert noted == SPEC
    assert noted.digest() == SPEC.digest()


def test_defaults_are_left_out_so_that_json_stays_readable() -> None:
    assert SPEC.to_dict() == {
        "model_type": "mine",
        "caches": [
            {
                "tag": "full",
                "reach": {"kind": "full"},
                "roles": [{"name": "key", "shape": [8, 128], "dtype": "bfloat16", "split": [{"units": 8}]}],
            }
        ],
        "layers": [{"tags": ["full"]}, {"draft": True}],
        "max_tokens": None,
        "notes": [],
    }


def test_each_cache_of_a_deep_model_is_written_once() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    assert len(from_config(config).to_dict()["caches"]) == 1


def edited(path: str, value: Any) -> dict[str, Any]:
    """SPEC as JSON with one entry changed; ... removes it."""
    data = through_json(SPEC.to_dict())
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inner: Any = data
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("layrs", [], ("model spec", "'layrs'", "did you mean 'layers'?")),
        ("caches.0.reech", {}, ("model spec.caches[0]", "'reech'", "did you mean 'reach'?")),
        ("caches.0.roles.0.shap", [1], ("model spec.caches[0].roles[0]", "'shap'", "did you mean 'shape'?")),
        ("model_type", ..., ("model spec", "missing model_type")),
        ("caches.0.roles.0.shape", ..., ("model spec.caches[0].roles[0]", "missing shape")),
        ("caches", {"a": 1}, ("model spec.caches", "expected a list", "dict")),
        ("caches.0", 7, ("model spec.caches[0]", "expected an object", "int")),
        ("caches.0.roles.0.shape.1", "wide", ("model spec.caches[0].roles[0].shape[1]", "expected int", "'wide'")),
        ("caches.0.roles.0.shape.1", True, ("model spec.caches[0].roles[0].shape[1]", "expected int", "True")),
        ("caches.0.roles.0.shape.0", -8, ("model spec.caches[0].roles[0]", "role 'key'", "-8")),
        (
            "caches.0.roles.0.dtype",
            "bfloat61",
            ("caches[0].roles[0].dtype", "'bfloat61'", "did you mean 'bfloat16'?"),
        ),
        ("caches.0.roles.0.dtype", 5, ("dtype", "5")),
        ("caches.0.roles.0.split.0.units", 4, ("model spec.caches[0].roles[0]", "4 x 1", "8")),
        (
            "caches.0.reach",
            {"kind": "windw"},
            ("caches[0].reach", "reach 'windw'", "did you mean 'window'?"),
        ),
        ("caches.0.reach", {"kind": ["window"]}, ("model spec.caches[0].reach", "['window']")),
        ("caches.0.reach", "full", ("model spec.caches[0].reach", "'kind'", "'full'")),
        ("caches.0.reach", {"kind": "window"}, ("model spec.caches[0].reach", "missing tokens")),
        ("caches.0.reach", {"kind": "window", "tokens": 0}, ("model spec.caches[0].reach", "at least 1", "0")),
        ("layers.0.tags.0", "ful", ("model spec.layers[0]", "'ful'", "did you mean 'full'?")),
        ("layers.1.reads", [{"layer": 0, "tag": "ful"}], ("layer 1 reads layer 0", "'ful'")),
        ("layers.1.draft", 1, ("model spec.layers[1].draft", "expected bool", "1")),
        ("layers", [], ("model 'mine' has no layers",)),
        ("max_tokens", 1.5, ("model spec.max_tokens", "expected int", "1.5")),
    ],
)
def test_what_is_wrong_in_json_is_named_with_its_place(path: str, value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        ModelSpec.from_dict(edited(path, value))
    for word in words:
        assert word in str(error.value)


def test_a_tag_declared_twice_is_an_error() -> None:
    data = SPEC.to_dict()
    with pytest.raises(SpecError, match=r"model spec\.caches: a tag is declared twice"):
        ModelSpec.from_dict({**data, "caches": data["caches"] * 2})


@pytest.mark.parametrize("data", [[], "spec", None, 7])
def test_what_is_no_object_is_an_error(data: Any) -> None:
    with pytest.raises(SpecError, match="model spec: expected an object"):
        ModelSpec.from_dict(data)


def test_an_error_names_its_place_once() -> None:
    with pytest.raises(SpecError) as error:
        ModelSpec.from_dict(edited("caches.0.roles.0.align", 0))
    assert str(error.value).count("model spec") == 1


def test_parts_and_reaches_build_what_they_were() -> None:
    role = Role.packed("indexer", [Part("values", (128,), DType.FLOAT8_E4M3), Part("scale", (1,), DType.FLOAT32)])
    back = codec.from_dict(Role, through_json(codec.to_dict(role)), "role")
    assert back.parts[1] == Part("scale", (1,), DType.FLOAT32)
    assert isinstance(Full(), Reach)
    assert issubclass(UnknownName, KVWeaveError)
