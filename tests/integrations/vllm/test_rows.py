"""The rows that vLLM stored are those that transformers computes: the same tensors, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.spec import DType, Role
from kvweave.store.keys import Bytes
from kvweave.store.shards import Shard
from tests.integrations.vllm.engines import engine, tokens
from tests.integrations.vllm.models import CONFIGS

pytestmark = pytest.mark.slow
CHUNK = 64
Rows = dict[tuple[int, str], torch.Tensor]
"""By layer and role, whole over all parts: `[tokens, heads, dim]`, or a state."""


class Piece(NamedTuple):
    """A role of a layer, in one chunk of one shard."""

    chunk: int
    shard: Shard
    role: Role
    rows: torch.Tensor


def stored_rows(store: Any, prompt: Any) -> tuple[Rows, int]:
    """What a hit at the end of the prompt consists of, and its position."""
    hit = store.lookup(prompt)
    pieces: dict[tuple[int, str], dict[int, list[Piece]]] = {}

    def sink(shard: Shard, chunk: int, payload: Bytes) -> None:
        assert not shard.first_token
        for layer, role, where in shard.fields():
            dtype = torch.bfloat16 if role.dtype is DType.BFLOAT16 else torch.float32
            rows = torch.frombuffer(bytearray(payload[where].tobytes()), dtype=dtype).float()
            shaped = rows.reshape(shard.num_rows(role), *role.shard(shard.parts).shape)
            of_role = pieces.setdefault((layer, role.name), {})
            of_role.setdefault(shard.part, []).append(Piece(chunk, shard, role, shaped))

    assert store.load(hit, sink) == hit.position
    return {name: whole([*parts.values()]) for name, parts in pieces.items()}, hit.position


def whole(parts: list[list[Piece]]) -> torch.Tensor:
    """All heads of all tokens."""
    joined = [torch.cat([piece.rows for piece in sorted(part, key=lambda piece: piece.chunk)]) for part in parts]
    rows = torch.zeros(len(joined[0]), *parts[0][0].role.shape)
    for (first, *_), mine in zip(parts, joined, strict=True):
        for axis in first.shard.axis_slices(first.role):
            rows[:, axis.start : axis.stop] = mine[:, axis.at : axis.at + axis.stop - axis.start]
    return rows


def computed_rows(path: Path, class_name: str, prompt: list[int]) -> Rows:
    """The cache of transformers after the same tokens."""
    model = getattr(transformers, class_name).from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    rows: Rows = {}
    names = {"keys": "key", "values": "value", "conv_states": "conv_state", "recurrent_states": "ssm_state"}
    for number, layer in enumerate(cache.layers):
        for theirs, ours in names.items():
            held = getattr(layer, theirs, None)
            held = next(iter(held.values()), None) if isinstance(held, dict) else held
            if held is not None:
                rows[number, ours] = held[0].transpose(0, 1) if theirs in ("keys", "values") else held
    return rows


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "granite_hybrid", "qwen3_next"])
def test_rows_in_the_store_are_those_of_transformers(name: str, model: Callable[..., Path], tmp_path: Path) -> None:
    prompt = tokens(700)
    with engine(model(name), {"store": f"{tmp_path}:100MiB", "chunk_tokens": CHUNK}) as writer:
        writer.one(prompt)
        writer.settle()
        connector = writer.scheduler.connector
        hashed = connector._store.prompt(prompt, connector._namespaces._model)
        stored, position = stored_rows(connector._store, hashed)
    assert position >= 384
    computed = computed_rows(model(name), CONFIGS[name][0], prompt[:position])
    assert {role for _, role in stored} <= {role for _, role in computed}
    errors = {name: error(rows, computed[name], name[1]) for name, rows in stored.items()}
    print(name, {role: max(errors[each] for each in errors if each[1] == role) for _, role in errors})
    assert max(errors.values()) < (0.3 if name == "qwen3_next" else 1e-4)  # of bfloat16, or of float32


def error(ours: torch.Tensor, theirs: torch.Tensor, role: str) -> float:
    """The largest difference, in parts of the largest number."""
    if role in ("key", "value"):  # a window's first chunk begins before the window does
        count = min(len(ours), len(theirs))
        ours, theirs = ours[-count:], theirs[-count:]
    if role == "conv_state":  # transformers keeps a column more
        theirs = theirs[..., -ours.shape[-1] :]
    return float((ours - theirs.float().reshape(ours.shape)).abs().max() / theirs.abs().max())
