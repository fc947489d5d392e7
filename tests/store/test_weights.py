"""A checkpoint's digest: another one for every checkpoint that could be meant, without reading it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.store import weights, weights_digest

SHAPES = {"a.weight": 3000, "b.weight": 100, "c.empty": 0}


def checkpoint(path: Path, seed: int = 0, change: str = "", shapes: dict[str, int] | None = None) -> Path:
    """A safetensors file; one tensor may be of other numbers."""
    header, payload = {"__metadata__": {"format": "pt"}}, b""
    for name, size in (shapes or SHAPES).items():
        data = np.random.default_rng([seed, name == change]).integers(0, 256, size, np.uint8).tobytes()
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [len(payload), len(payload) + size]}  # type: ignore[dict-item]
        payload += data
    head = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(head).to_bytes(8, "little") + head + payload)
    return path


def test_a_copy_of_a_checkpoint_has_its_digest(tmp_path: Path) -> None:
    one, two = (checkpoint(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    assert weights_digest(one) == weights_digest(one.parent) == weights_digest(str(two.parent))


def test_a_fine_tune_of_the_same_shapes_has_another_digest_whichever_tensor_differs(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base" / "model.safetensors")
    tuned = [checkpoint(tmp_path / name / "model.safetensors", change=name) for name in ("a.weight", "b.weight")]
    assert {path.stat().st_size for path in tuned} == {base.stat().st_size}
    assert len({weights_digest(path) for path in (base, *tuned)}) == 3


def test_other_files_other_digest(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one" / "model-1.safetensors").parent
    before = weights_digest(one)
    checkpoint(one / "model-2.safetensors")
    assert weights_digest(one) != before
    renamed = checkpoint(tmp_path / "two" / "model.safetensors", shapes={**SHAPES, "d": 1})
    assert weights_digest(renamed) != weights_digest(checkpoint(tmp_path / "three" / "model.safetensors"))


def test_of_many_tensors_some_are_looked_into_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, start: int) -> bytes:
        reads.append(size)
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", counted)
    weights_digest(checkpoint(tmp_path / "model.safetensors", shapes={f"t{i}": 300 for i in range(5000)}))
    assert reads == [weights.SAMPLE_BYTES] * weights.SAMPLES


@pytest.mark.parametrize(
    "data", [b"", b"short", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
             (7).to_bytes(8, "little") + b'{"a":1}', (4).to_bytes(8, "little") + b"\xff\xfe{}"],
)  # fmt: skip
def test_what_is_no_checkpoint_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(StoreError, match="model.safetensors"):
        weights_digest(tmp_path)


def test_a_directory_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="by a revision"):
        weights_digest(tmp_path)
