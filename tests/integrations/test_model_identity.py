"""Names of config and weights that engines have in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig

from kvweave.errors import StoreError
from kvweave.integrations.model_identity import config_digest, depends_on_length, weights_name
from kvweave.store import weights_digest


def test_fields_that_change_results_change_the_name_of_a_config() -> None:
    name = config_digest(LlamaConfig())
    assert config_digest(LlamaConfig(dtype="bfloat16", use_cache=False)) == name
    assert config_digest(LlamaConfig(rms_norm_eps=1e-3)) != name
    assert config_digest(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e6})) != name


def test_frequencies_that_depend_on_the_longest_sequence_are_known() -> None:
    growing = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert depends_on_length(growing)
    assert not depends_on_length(LlamaConfig())


def test_weights_are_named_by_what_was_given_a_commit_or_their_bytes(tmp_path: Path) -> None:
    assert weights_name("x", "abc", "mine") == "given mine"
    assert weights_name("x", "abc", "") == "given abc"
    with pytest.raises(StoreError):
        weights_name(str(tmp_path), None, "")
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    assert weights_name(str(tmp_path), None, "") == f"given {weights_digest(tmp_path)}"
