"""CONFIG: paths, directories and the names of examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.cli.read_config import example_names, model_dtype, read_config
from kvweave.errors import ConfigError


def test_a_bundled_example_answers_to_its_short_and_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("qwen3-32b", "qwen3-32b.json", "examples/qwen3-32b", "examples/qwen3-32b.json")
    assert [read_config(name)["num_hidden_layers"] for name in names] == [64] * 4


def test_a_file_on_disk_comes_before_an_example_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3-32b").mkdir()
    (tmp_path / "qwen3-32b" / "config.json").write_text('{"mine": true}')
    monkeypatch.chdir(tmp_path)
    assert read_config("qwen3-32b") == {"mine": True}
    assert read_config("qwen3-32b/config.json") == {"mine": True}


def test_a_directory_without_a_config_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        read_config(str(tmp_path))


def test_examples_are_all_there_and_all_readable() -> None:
    expected = json.loads((Path(__file__).parent.parent / "data" / "examples_expected.json").read_text())
    assert set(example_names()) == set(expected)
    assert all("num_hidden_layers" in json.dumps(read_config(name)) for name in ("gemma-3-27b", "llama-4-scout"))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "float32"),
        ({"dtype": "float16", "text_config": {"hidden_size": 8}}, "float16"),
        ({}, "bfloat16"),
    ],
)
def test_the_dtype_is_the_language_models(config: dict[str, object], dtype: str) -> None:
    assert model_dtype(config) == dtype
