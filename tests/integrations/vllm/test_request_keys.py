"""Who may share: the names of weights, adapters and positions."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvweave.errors import BadOption, UnknownName
from kvweave.integrations.vllm.connector_settings import ConnectorSettings, RequestSettings
from kvweave.integrations.vllm.request_keys import (
    AdapterFile,
    AdapterRevisions,
    NamespaceMaker,
    spans_of,
)
from kvweave.store import Namespace
from kvweave.store.keys import prompt
from tests.store.test_weights import checkpoint

PLAIN = RequestSettings()


def test_every_field_of_a_request_is_a_namespace_of_its_own(tmp_path: Path) -> None:
    maker = NamespaceMaker(Namespace("m"))
    first, second = AdapterFile("tuned", str(tmp_path / "a")), AdapterFile("tuned", str(tmp_path / "b"))
    made = [
        maker.of(PLAIN, None, None),
        maker.of(PLAIN, "salt", None),
        maker.of(RequestSettings(tenant="salt"), None, None),
        maker.of(PLAIN, None, first),
        maker.of(PLAIN, None, second),
        maker.of(PLAIN, None, AdapterFile("other", first.path)),
    ]
    assert len({each.fingerprint for each in made}) == len(made)


def test_weights_that_were_replaced_share_nothing_with_what_was() -> None:
    maker = NamespaceMaker(Namespace("m", weights="given w"))
    before = maker.of(PLAIN, None, None)
    maker.forget()
    after = maker.of(PLAIN, None, None)
    maker.forget()
    assert len({each.fingerprint for each in (before, after, maker.of(PLAIN, None, None))}) == 3


def test_an_adapter_whose_file_was_replaced_is_another(tmp_path: Path) -> None:
    revisions, adapter = AdapterRevisions(), AdapterFile("tuned", str(tmp_path))
    checkpoint(tmp_path / "model.safetensors")
    before = revisions.of(adapter)
    assert revisions.of(adapter) == before
    checkpoint(tmp_path / "model.safetensors", seed=1)
    for file in tmp_path.glob("*.safetensors"):
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    assert revisions.of(adapter) != before


def test_a_video_and_its_sound_that_begin_at_one_token_are_one_span() -> None:
    def features(*names: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(mm_position=SimpleNamespace(offset=7), identifier=name) for name in names]

    namespace, tokens = Namespace("m"), range(300)
    given = [("cat", "purr"), ("cat", "bark"), ("catpurr",), ("cat",), ("ca", "tpurr")]
    prompts = [prompt(tokens, namespace, 64, spans_of(features(*names))) for names in given]
    assert len({each.prefixes[0].tobytes() for each in prompts}) == len(given)
    assert spans_of(features("cat", "purr")) == spans_of(features("purr", "cat"))


def test_any_text_of_a_request_is_a_salt_and_a_name() -> None:
    maker, half = NamespaceMaker(Namespace("m")), chr(0xD800)
    assert maker.of(PLAIN, half, None).fingerprint != maker.of(PLAIN, "?", None).fingerprint
    feature = SimpleNamespace(mm_position=SimpleNamespace(offset=7), identifier=half)
    assert spans_of([feature])[0].content not in (b"", b"?")


def test_pictures_are_spans_with_what_they_show() -> None:
    feature = SimpleNamespace(mm_position=SimpleNamespace(offset=7, length=100), identifier="cat")
    assert spans_of([feature]) == [(7, b"cat")]


def test_settings_that_are_unknown_or_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="chunk_tokens"):
        ConnectorSettings.of({"store": "x", "chunk_token": 1})
    with pytest.raises(BadOption, match="parts must be of type int"):
        ConnectorSettings.of({"store": "x", "parts": "8"})
    with pytest.raises(BadOption, match="one of"):
        ConnectorSettings.of({"store": "x", "socket": "y"})
    with pytest.raises(BadOption, match="one of"):
        ConnectorSettings.of({})


def test_a_request_whose_parameters_are_not_understood_is_served_without_them() -> None:
    given = {"kvweave.tenant": "a", "kvweave.skip_save": True, "kvweave.skip_load": "yes", "kvweave.x": 1, "remote": 2}
    settings, wrong = RequestSettings.of(given, "usual")
    assert settings == RequestSettings("a", skip_save=True)
    assert [words.partition("=")[0] for words in wrong] == ["kvweave.skip_load", "kvweave.x"]
    assert RequestSettings.of(None, "usual") == (RequestSettings("usual"), [])
