"""Keys: equal where everything that matters is equal, and nowhere else."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import LayerCache
from kvweave.errors import BadTokens, StoreError
from kvweave.prefix import Span, TokenIds
from kvweave.spec import DType, Full
from kvweave.store import Namespace, Schema, keys, model_digest
from kvweave.store.keys import KEY_BYTES, HashedPrompt, prompt
from tests.store.models import KINDS, hybrid, kv, model

HERE = Namespace("m", "w", "r", "a", "t", b"s")


def prefixes(tokens: TokenIds, namespace: Namespace = HERE, size: int = 4, spans: tuple[Span, ...] = ()) -> list[bytes]:
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


FIELDS = ["model", "weights", "rotary", "adapter", "tenant", "salt", "adapter_revision", "kv_dtype", "multimodal"]


@pytest.mark.parametrize("field", FIELDS)
def test_namespaces_that_differ_anywhere_never_meet(field: str) -> None:
    other = replace(HERE, **{field: b"x" if field == "salt" else "x"})  # type: ignore[arg-type]
    assert not {*prefixes([*range(8)])} & {*prefixes([*range(8)], other)}


def test_fields_cannot_be_shifted_into_one_another() -> None:
    names = [Namespace("ab", "c"), Namespace("a", "bc"), Namespace("abc"), Namespace("", "abc")]
    names += [Namespace("a", adapter_revision="b"), Namespace("a", kv_dtype="b"), Namespace("a", multimodal="b")]
    assert len({name.fingerprint for name in names}) == 7


def test_a_namespace_without_the_later_fields_has_the_fingerprint_that_was_stored_before() -> None:
    before = hashlib.sha256(b"kvweave namespace 1\0")
    for field in (b"m", b"w", b"r", b"a", b"t", b"s"):
        before.update(len(field).to_bytes(8, "little") + field)
    assert HERE.fingerprint == before.digest()


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
    listed = made.keys(schema.ids)
    assert len(listed) == 3 * len(schema.shards)
    assert all(len(key) == KEY_BYTES for key in listed)
    number = iter(listed)
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


# ---- growing


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.integers(0, 39), unique=True, max_size=4),
)
def test_a_prompt_that_grew_is_the_one_made_at_once(tokens: list[int], cuts: list[int], pictures: list[int]) -> None:
    spans = [Span(start, b"%d" % start) for start in pictures if start < len(tokens)]
    ends = [*sorted(cut for cut in cuts if cut <= len(tokens)), len(tokens)]
    grown, start = prompt([], HERE, 4), 0
    for end in ends:
        grown = grown.extend(tokens[start:end], [span for span in spans if start <= span.start < end])
        start = end
    whole = prompt(tokens, HERE, 4, spans)
    assert (grown.num_tokens, grown.prefixes.tolist()) == (whole.num_tokens, whole.prefixes.tolist())


def test_a_picture_in_a_chunk_that_is_not_whole_yet_parts_prompts_that_grow() -> None:
    begun = [prompt([*range(6)], HERE, 4, [Span(5, picture)]) for picture in (b"cat", b"dog")]
    cat, dog = (each.extend([6]).extend([7, 8]) for each in begun)
    assert cat.prefixes[0].tolist() == dog.prefixes[0].tolist()
    assert cat.prefixes[1].tolist() != dog.prefixes[1].tolist()
    assert cat.prefixes.tolist() == prompt([*range(9)], HERE, 4, [Span(5, b"cat")]).prefixes.tolist()


def test_growing_hashes_new_chunks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digests = keys._digests

    def counted(messages: keys.Bytes, size: int) -> bytes:
        hashed.append(len(messages))
        return digests(messages, size)

    monkeypatch.setattr(keys, "_digests", counted)
    grown = prompt([*range(10)], HERE, 4)
    for token in range(10, 17):
        grown = grown.extend([token])
    assert [size for size in hashed if size] == [2 * 16, 16, 16]
    assert grown.prefixes.tolist() == prompt([*range(17)], HERE, 4).prefixes.tolist()


def test_what_a_prompt_keeps_of_its_end_is_its_own() -> None:
    tokens = np.arange(6, dtype=np.int32)
    grown = prompt(tokens, HERE, 4)
    tokens[:] = 9
    assert grown.extend([6, 7]).prefixes.tolist() == prompt([*range(8)], HERE, 4).prefixes.tolist()


def test_spans_of_an_extension_start_in_it() -> None:
    with pytest.raises(BadTokens, match="among tokens 6 to 8"):
        prompt([*range(6)], HERE, 4).extend([6, 7], [Span(5, b"late")])


# ---- foreign digests


def block_digests(tokens: list[int], block: int = 2, size: int = 32) -> list[bytes]:
    """Chained, as engines do it."""
    made, before = [], b""
    for end in range(block, len(tokens) + 1, block):
        before = hashlib.sha256(before + repr(tokens[end - block : end]).encode()).digest()[:size]
        made.append(before)
    return made


def foreign(tokens: list[int], namespace: Namespace = HERE, scheme: str = "x", size: int = 32) -> list[bytes]:
    made = HashedPrompt.of_digests(
        block_digests(tokens, size=size), namespace, 4, block_tokens=2, scheme=scheme, num_tokens=len(tokens)
    )
    assert made.num_tokens == len(tokens)
    return [digest.tobytes() for digest in made.prefixes]


def test_foreign_digests_are_keys_where_they_are_equal_and_nowhere_else() -> None:
    one, two = foreign([*range(21)]), foreign([*range(12), 99, *range(13, 21)])
    assert len(one) == 5
    assert one[:3] == two[:3]
    assert not {*one[3:]} & {*two[3:]}


def test_digests_of_another_namespace_scheme_or_length_never_meet_nor_do_those_of_tokens() -> None:
    tokens = [*range(20)]
    made = [foreign(tokens), foreign(tokens, scheme="y"), foreign(tokens, size=16), prefixes(tokens)]
    made += [foreign(tokens, replace(HERE, tenant="u")), foreign(tokens, replace(HERE, adapter_revision="2"))]
    assert len({digest for each in made for digest in each}) == sum(map(len, made))


@pytest.mark.parametrize(
    ("digests", "block", "num_tokens", "words"),
    [
        ([bytes(8)], 2, None, "16 at least"),
        ([bytes(32), bytes(16)], 2, None, "one length"),
        ([bytes(32)], 3, None, "do not divide chunks of 4"),
        ([bytes(32)], 8, None, "do not divide chunks of 4"),
        ([bytes(32)] * 3, 2, 5, "in a prompt of 5"),
        (["digest of 32 characters of text."], 2, None, "must be bytes, got str"),
        (bytes(32), 2, None, "must be bytes, got int"),
    ],
)
def test_digests_that_cannot_be_keys_are_errors(
    digests: list[bytes], block: int, num_tokens: int | None, words: str
) -> None:
    with pytest.raises(BadTokens, match=words):
        HashedPrompt.of_digests(digests, HERE, 4, block_tokens=block, scheme="x", num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("salt", "text", "Namespace.salt is bytes, got str"),
        ("tenant", None, "Namespace.tenant is str, got NoneType"),
        ("kv_dtype", b"fp8", "Namespace.kv_dtype is str, got bytes"),
    ],
)
def test_a_namespace_of_other_types_is_an_error(field: str, value: Any, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        Namespace(**{"model": "m", field: value})


@pytest.mark.parametrize("chunk_tokens", [0, -4])
def test_chunks_without_tokens_are_an_error(chunk_tokens: int) -> None:
    with pytest.raises(StoreError, match=f"at least 1, got {chunk_tokens}"):
        prompt([1, 2, 3], HERE, chunk_tokens)
    with pytest.raises(BadTokens, match=f"do not divide chunks of {chunk_tokens}"):
        HashedPrompt.of_digests([bytes(32)], HERE, chunk_tokens, block_tokens=2, scheme="x")


def test_a_prompt_of_digests_does_not_grow_by_tokens() -> None:
    with pytest.raises(BadTokens, match="only digests are known"):
        HashedPrompt.of_digests([bytes(32)] * 2, HERE, 4, block_tokens=2, scheme="x").extend([1])


def test_names_that_are_no_utf_8_are_names_of_their_own() -> None:
    halves = [Namespace("m", tenant=half, adapter=half, kv_dtype=half) for half in ("\ud800", "\ud801")]
    assert len({each.fingerprint for each in halves}) == len({each.tenant_id for each in halves}) == 2


def test_pictures_in_chunks_that_are_whole_do_not_mark_later_tokens() -> None:
    grown = prompt([*range(6)], HERE, 4, [Span(1, b"cat")]).extend([*range(6, 14)]).extend([*range(14, 22)])
    assert grown.unfinished is not None
    assert grown.unfinished.spans == ()
    assert grown.prefixes.tolist() == prompt([*range(22)], HERE, 4, [Span(1, b"cat")]).prefixes.tolist()
