"""Keys: equal where everything that matters is equal, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvweave import LayerCache
from kvweave.errors import BadTokens, StoreError
from kvweave.prefix import Span
from kvweave.spec import DType, Full
from kvweave.store import Namespace, Schema, model_digest
from kvweave.store.keys import KEY_BYTES, HashedPrompt, prompt
from tests.store.models import KINDS, hybrid, kv, model

HERE = Namespace("m", "w", "r", "a", "t", b"s")


def prefixes(tokens: object, namespace: Namespace = HERE, size: int = 4, spans: tuple[Span, ...] = ()) -> list[bytes]:
    return [digest.tobytes() for digest in prompt(tokens, namespace, size, spans).prefixes]


def test_prompts_share_the_digests_of_their_common_chunks_and_no_other() -> None:
    one, two = prefixes([*range(20)]), prefixes([*range(12), 99, *range(13, 20)])
    assert len(one) == 5
    assert one[:3] == two[:3]
    assert not {*one[3:]} & {*two[3:]}


def test_a_chunk_behind_another_prefix_is_another_chunk() -> None:
    assert prefixes([1, 2, 3, 4, 5, 6, 7, 8])[1] != prefixes([0, 2, 3, 4, 5, 6, 7, 8])[1]


def test_tokens_may_be_lists_or_arrays_of_any_whole_type() -> None:
    shards = [1, 2, 3, 4, 70_000]
    made = [prefixes(kind(shards)) for kind in (list, tuple, np.array, lambda r: np.array(r, np.int32))]
    assert all(digests == made[0] for digests in made)


@pytest.mark.parametrize("field", ["model", "weights", "rotary", "adapter", "tenant", "salt"])
def test_namespaces_that_differ_anywhere_never_meet(field: str) -> None:
    other = replace(HERE, **{field: b"x" if field == "salt" else "x"})  # type: ignore[arg-type]
    assert not {*prefixes([*range(8)])} & {*prefixes([*range(8)], other)}


def test_fields_cannot_be_shifted_into_one_another() -> None:
    names = [Namespace("ab", "c"), Namespace("a", "bc"), Namespace("abc"), Namespace("", "abc")]
    assert len({name.fingerprint for name in names}) == 4


def test_another_grid_is_another_key() -> None:
    assert prefixes([*range(8)], size=8) != prefixes([*range(8)], size=4)[1:]


def test_pictures_part_prompts_where_they_start() -> None:
    tokens = [*range(20)]
    cat, dog = (prefixes(tokens, spans=(Span(9, content),)) for content in (b"cat", b"dog"))
    assert cat[:2] == dog[:2] == prefixes(tokens)[:2]
    assert not {*cat[2:]} & {*dog[2:], *prefixes(tokens)[2:]}
    assert prefixes(tokens, spans=(Span(9, b"cat"), Span(2, b"dog"))) == prefixes(
        tokens, spans=(Span(2, b"dog"), Span(9, b"cat"))
    )
    assert prefixes(tokens, spans=(Span(9, b"cat"), Span(10, b"dog")))[4] != cat[4]


@pytest.mark.parametrize("spans", [(Span(20, b""),), (Span(-1, b""),), (Span(3, b"a"), Span(3, b"b"))])
def test_spans_outside_the_prompt_or_on_one_another_are_errors(spans: tuple[Span, ...]) -> None:
    with pytest.raises(BadTokens, match="spans start"):
        prefixes([*range(20)], spans=spans)


def test_the_keys_of_a_prompt_are_chunk_by_chunk_and_row_by_row() -> None:
    schema = Schema.of(hybrid(), chunk_tokens=4)
    made = prompt([*range(13)], HERE, 4)
    keys = made.keys(schema.ids)
    assert len(keys) == 3 * len(schema.shards)
    assert all(len(key) == KEY_BYTES for key in keys)
    number = iter(keys)
    for digest in made.prefixes:
        for shard in schema.shards:
            assert next(number) == HERE.tenant_id + digest.tobytes() + shard.id


def test_rows_of_all_kinds_and_parts_have_ids_of_their_own() -> None:
    shards = [shard for kind in KINDS.values() for shard in Schema.of(kind).shards]
    by_meta = {shard.meta: shard.id for shard in shards}
    assert len({*by_meta.values()}) == len(by_meta)


def test_another_dtype_shape_layer_or_chunk_is_another_row() -> None:
    def ids(chunk_tokens: int = 256, layers: int = 2, **facts: object) -> set[bytes]:
        cache = LayerCache("full", Full(), kv(2, **facts))  # type: ignore[arg-type]
        return {shard.id for shard in Schema.of(model(cache, layers=layers), chunk_tokens=chunk_tokens).shards}

    variants = [ids(), ids(512), ids(layers=3), ids(dim=8), ids(dtype=DType.FLOAT16)]
    assert len(set().union(*variants)) == sum(map(len, variants))


def test_the_order_of_bytes_in_a_page_changes_neither_rows_nor_model() -> None:
    specs = [
        model(LayerCache("full", Full(), kv(8, axis=axis), kernel_tokens=kernel)) for axis, kernel in ((0, 1), (1, 16))
    ]
    assert Schema.of(specs[0]).ids.tolist() == Schema.of(specs[1]).ids.tolist()
    assert model_digest(specs[0]) == model_digest(specs[1])
    assert specs[0].digest() != specs[1].digest()


def test_chunks_that_split_rows_are_an_error() -> None:
    with pytest.raises(StoreError, match="split its rows of 4"):
        Schema.of(KINDS["compressed"], chunk_tokens=6)


def test_an_empty_prompt_has_no_keys() -> None:
    empty = prompt([], HERE, 4)
    assert isinstance(empty, HashedPrompt)
    assert empty.keys(Schema.of(hybrid()).ids) == []


def test_random_prompts_collide_where_they_are_equal() -> None:
    chance, seen = random.Random(3), dict[bytes, tuple[int, ...]]()
    for _ in range(2000):
        tokens = tuple(chance.randrange(3) for _ in range(8))
        for chunk, digest in enumerate(prefixes(tokens)):
            assert seen.setdefault(digest, tokens[: 4 * chunk + 4]) == tokens[: 4 * chunk + 4]
