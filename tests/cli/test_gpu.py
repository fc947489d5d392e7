"""`kvweave plan --gpu`: weights, activations and a reserve are subtracted, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvweave.cli.read_config import read_config
from kvweave.spec.hf.parameters import count_parameters
from tests.cli.command import Kvweave

GIB = 1024**3
LLAMA = read_config("llama-3.1-8b")
PARAMETERS = count_parameters(LLAMA)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def budget(kvweave: Kvweave, source: object, *options: str) -> dict[str, Any]:
    report = kvweave("plan", str(source), "--gpu", "80GiB", "--json", *options).json()
    gpu: dict[str, Any] = report["gpu"]
    assert gpu["gpu"] - gpu["weights"] - gpu["activations"] - gpu["reserve"] == gpu["cache"] == report["memory"]
    assert report["pool"]["bytes"] <= gpu["cache"]
    return gpu


def test_weights_are_counted_from_the_config_in_its_dtype(kvweave: Kvweave) -> None:
    gpu = budget(kvweave, "llama-3.1-8b")
    assert gpu["weights"] == 2 * PARAMETERS
    assert gpu["weights_from"] == "about 8.03B parameters by the config, in bfloat16"
    assert gpu["reserve"] == 8 * GIB
    assert gpu["activations"] == 8192 * (4 * 4096 + 3 * 14336) * 2


@pytest.mark.parametrize(("said", "size"), [("fp8", PARAMETERS), ("int4", PARAMETERS // 2), ("10GiB", 10 * GIB)])
def test_weights_may_be_said_as_a_size_or_a_dtype(kvweave: Kvweave, said: str, size: int) -> None:
    assert budget(kvweave, "llama-3.1-8b", "--weights", said)["weights"] == size


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [({"quant_method": "fp8"}, 8), ({"quant_method": "gptq", "bits": 4}, 4), ({"quant_method": "mxfp4"}, 4.25)],
)
def test_quantised_weights_take_their_bits(
    kvweave: Kvweave, directory: Path, quantised: dict[str, Any], bits: float
) -> None:
    (directory / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantised}))
    assert budget(kvweave, directory)["weights"] == int(PARAMETERS * bits / 8)


def test_a_quantisation_that_says_no_bits_asks_for_them(kvweave: Kvweave, directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "new"}}))
    run = kvweave("plan", str(directory), "--gpu", "80GiB")
    assert (run.code, "give --weights" in run.err) == (2, True)


@pytest.mark.parametrize("source", ["", "config.json"])
def test_weights_on_disk_count_before_those_of_the_config(kvweave: Kvweave, directory: Path, source: str) -> None:
    (directory / "a.safetensors").write_bytes(b"x" * 1000)
    (directory / "b.safetensors").write_bytes(b"x" * 234)
    assert budget(kvweave, directory / source)["weights"] == 1234
    index = {"metadata": {"total_size": 5 * GIB}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert budget(kvweave, directory / source)["weights"] == 5 * GIB


def test_an_index_without_a_size_asks_for_it(kvweave: Kvweave, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")
    run = kvweave("plan", str(directory), "--gpu", "80GiB")
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert "give --weights" in run.err


def test_ranks_divide_the_weights(kvweave: Kvweave) -> None:
    gpu = budget(kvweave, "llama-3.1-8b", "--tp", "2", "--pp", "2")
    assert gpu["weights"] == -(-2 * PARAMETERS // 4)
    assert gpu["weights_from"].endswith("1/4 on this rank")


def test_the_rest_may_be_said_too(kvweave: Kvweave) -> None:
    gpu = budget(kvweave, "llama-3.1-8b", "--activations", "2GiB", "--reserve", "0")
    assert (gpu["activations"], gpu["reserve"]) == (2 * GIB, 0)


def test_the_table_says_what_was_subtracted(kvweave: Kvweave) -> None:
    out = kvweave("plan", "llama-3.1-8b", "--gpu", "80GiB").out
    for words in (
        "80 GiB",
        "- 14.96 GiB weights (about 8.03B parameters by the config, in bfloat16)",
        "- 928 MiB activations (estimated for a step of 8,192 tokens)",
        "- 8 GiB reserve (10%: driver, graphs, fragments)",
        "56.14 GiB left for the cache",
    ):
        assert words in out
    assert "80 GiB for the cache alone" in kvweave("plan", "llama-3.1-8b").out


def test_a_gpu_that_is_too_small_says_how_many_would_do(kvweave: Kvweave) -> None:
    run = kvweave("plan", "llama-3.1-70b", "--gpu", "80GiB")
    assert (run.code, "--tp 2 would do" in run.err) == (2, True)
    assert kvweave("plan", "llama-3.1-70b", "--gpu", "80GiB", "--tp", "2").code == 0
