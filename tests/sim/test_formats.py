"""Formats: each is known by its start, and says what it had to make up."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from kvweave.errors import LengthsOnly, TraceError, UnknownName
from kvweave.sim import FORMATS, Reading, Trace, load_of, read_trace
from tests.sim import samples
from tests.sim.samples import lines, written

BLOCKS = Reading(way="blocks")


def sample(folder: Path, name: str) -> Path:
    texts = {
        "mooncake": lines(samples.MOONCAKE),
        "bailian": lines(samples.BAILIAN),
        "coding": json.dumps(samples.CODING, indent=1),
        "agent": lines(samples.AGENT),
        "chat": json.dumps(samples.SHAREGPT),
        "openai": lines(samples.OPENAI),
        "azure": samples.AZURE,
        "burstgpt": samples.BURSTGPT,
        "vllm-log": samples.VLLM,
        "lmcache-log": samples.LMCACHE,
    }
    return written(folder, f"{name}.jsonl", texts[name])


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in trace.requests]


@pytest.mark.parametrize(
    ("name", "format", "requests"),
    [
        ("mooncake", "mooncake", 3),
        ("bailian", "bailian", 2),
        ("coding", "coding", 3),
        ("agent", "agent", 2),
        ("chat", "chat", 3),
        ("openai", "chat", 2),
        ("azure", "azure", 2),
        ("burstgpt", "burstgpt", 1),
        ("vllm-log", "vllm-log", 2),
        ("lmcache-log", "lmcache-log", 1),
    ],
)
def test_a_format_is_known_by_its_start(tmp_path: Path, name: str, format: str, requests: int) -> None:
    trace = read_trace(sample(tmp_path, name))
    assert (trace.format, len(trace.requests)) == (format, requests)
    assert trace.requests[0].arrival == 0
    assert [request.arrival for request in trace.requests] == sorted(request.arrival for request in trace.requests)


def test_what_nobody_knows_is_refused_with_the_formats_there_are(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", '{"hello": 1}\n')
    with pytest.raises(TraceError, match="not known from its first line.*mooncake.*--format"):
        read_trace(path)
    with pytest.raises(UnknownName, match="did you mean 'mooncake'"):
        read_trace(path, format="moncake")
    with pytest.raises(TraceError, match="no trace is at"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="request 0 has no usable field"):
        read_trace(path, format="mooncake")


@pytest.mark.parametrize("value", ["many", -1, 10**12, None, True])
def test_lengths_that_make_no_sense_are_refused(tmp_path: Path, value: object) -> None:
    row = samples.MOONCAKE[0] | {"input_length": value}
    with pytest.raises(TraceError, match="input_length must be a number of 1 to"):
        read_trace(written(tmp_path, "x.jsonl", lines([row])))


# ---- block ids


def test_a_tail_and_an_output_are_those_of_the_request_that_goes_on_from_it(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "mooncake"))
    first, second, third = (trace.tokens(request) for request in trace.requests)
    assert lengths(trace) == [(1100, 20), (700, 600), (1700, 5)]
    assert (first == third[: len(first)]).all()
    assert len(first) == 1119  # the last generated token is never computed
    assert (second[:512] == first[:512]).all()
    assert not set(second[512:]) & {*first, *third}
    assert any("1 requests are taken from the request that goes on" in note for note in trace.invented)


def test_blocks_leaves_out_tails_and_outputs_but_for_a_token_to_compute(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "mooncake"), reading=BLOCKS)
    assert lengths(trace) == [(1025, 0), (513, 0), (1537, 0)]
    first, _, third = (trace.tokens(request) for request in trace.requests)
    assert (first[:1024] == third[:1024]).all()
    assert first[1024] != third[1024]
    with pytest.raises(UnknownName, match="way to read"):
        read_trace(sample(tmp_path, "mooncake"), reading=Reading(way="tails"))


def test_a_block_that_was_there_before_is_a_document_not_a_conversation(tmp_path: Path) -> None:
    """Both have the document 0 1, which neither goes on from."""
    rows = [
        {"timestamp": at, "input_length": 1030 + 600 * at, "output_length": 3, "hash_ids": ids}
        for at, ids in enumerate([[0, 1, 2], [0, 1, 3, 4], [0, 1, 5, 6, 7]])
    ]
    rows[0]["hash_ids"], rows[0]["input_length"] = [0, 1], 1024
    trace = read_trace(written(tmp_path, "x.jsonl", lines([rows[0], *rows])))
    assert any("1 requests are taken" in note for note in trace.invented)


def test_parents_make_sessions_and_outputs(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "bailian"))
    first, second = (trace.tokens(request) for request in trace.requests)
    assert {request.session for request in trace.requests} == {"7"}
    assert (first == second[: len(first)]).all()


def test_local_ids_of_two_sessions_are_not_the_same_tokens(tmp_path: Path) -> None:
    other = samples.CODING | {"id": "another"}
    trace = read_trace(written(tmp_path, "x.jsonl", lines([samples.CODING, other])))
    ids = {
        name: {id for r in trace.requests if r.session == name for id in r.blocks.tolist()}
        for name in ("fix the parser", "another")
    }
    assert len(trace.requests) == 6
    assert not ids["fix the parser"] & ids["another"]
    shared = read_trace(
        written(tmp_path, "y.jsonl", lines([s | {"hash_id_scope": "global"} for s in (samples.CODING, other)]))
    )
    assert len({id for r in shared.requests for id in r.blocks.tolist()}) < len(ids["another"]) * 2


# ---- text


def test_without_a_tokenizer_equal_starts_of_text_are_equal_tokens(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "agent"))
    first, second = (trace.tokens(request) for request in trace.requests)
    same = len("user: sort these numbers") // 4
    assert (first[:same] == second[:same]).all()
    assert any("4 bytes" in note for note in trace.invented)


def test_a_conversation_is_a_request_for_every_answer(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "chat"))
    turns = [request for request in trace.requests if request.session == "c1"]
    one, two = (trace.tokens(request) for request in turns)
    assert turns[1].arrival - turns[0].arrival == 60
    assert (two[: len(one)] == one).all()


def test_a_logged_request_is_one_request_with_the_answer_beside_it(tmp_path: Path) -> None:
    first, second = read_trace(sample(tmp_path, "openai")).requests
    assert first.output_tokens == 1
    assert second.output_tokens == 0
    assert (first.blocks[:4] == second.blocks[:4]).all()


def test_a_tokenizer_of_ones_own_is_asked(tmp_path: Path) -> None:
    import numpy as np

    letters = Reading(tokenize=lambda text: np.array([*map(ord, text)], np.int32))
    trace = read_trace(sample(tmp_path, "agent"), reading=letters)
    assert trace.requests[0].prompt_tokens == len("user: sort these numbers")
    assert not trace.invented


# ---- logs and lengths


def test_vllm_logs_are_read_as_tokens_with_their_outputs(tmp_path: Path) -> None:
    first, second = read_trace(sample(tmp_path, "vllm-log")).requests
    assert first.blocks.tolist() == [11, 12, 13, 14]
    assert second.blocks.tolist() == [11, 12, 13, 15, 16, 17, 18]
    assert (second.arrival, second.output_tokens) == (4.0, 2)


def test_a_log_without_token_ids_says_how_to_get_them(tmp_path: Path) -> None:
    path = written(tmp_path, "x.log", "INFO 07-04 12:00:01 Received request cmpl-1: params: SamplingParams(n=1).\n")
    with pytest.raises(TraceError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read_trace(path)


@pytest.mark.parametrize("name", ["azure", "burstgpt", "lmcache-log"])
def test_lengths_alone_give_load_figures_and_no_claim_of_reuse(tmp_path: Path, name: str) -> None:
    trace = read_trace(sample(tmp_path, name))
    assert load_of(trace).requests == len(trace.requests)
    with pytest.raises(LengthsOnly, match="nothing of their tokens.*--load"):
        trace.check_content()


def test_load_figures_are_those_of_the_lengths(tmp_path: Path) -> None:
    load = load_of(read_trace(sample(tmp_path, "azure")))
    assert load.prompt == pytest.approx((385, 385, 394.9, 396))
    assert load.seconds == pytest.approx(4.314579)
    assert load.busiest_minute_tokens == 770


# ---- files


def test_a_compressed_file_an_archive_and_a_folder_are_the_same_trace(tmp_path: Path) -> None:
    plain = sample(tmp_path, "agent")
    packed = tmp_path / "agent.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    archive = tmp_path / "agents.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(plain, "one/a.jsonl")
        tar.add(written(tmp_path, "LICENSE", "free"), "LICENSE")
    folder = tmp_path / "folder"
    folder.mkdir()
    plain.rename(folder / "a.jsonl")
    for path in (packed, archive, folder):
        assert lengths(read_trace(path)) == [(6, 1), (9, 1)], path


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "picture.png", "")
    with pytest.raises(TraceError, match="no file in it could be a trace"):
        read_trace(tmp_path)


def test_every_format_has_a_name_of_its_own() -> None:
    assert len(FORMATS) == 8


# ---- samples


def test_a_sample_takes_whole_sessions_and_the_same_ones_each_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": 520, "output_length": 0, "hash_ids": [at % 40, 1000 + at]}
        for at in range(200)
    ]
    trace = read_trace(written(tmp_path, "x.jsonl", lines(rows)))
    half = trace.sample(0.5)
    kept = {request.session for request in half.requests}
    assert 10 < len(kept) < 30
    assert len(half.requests) == 5 * len(kept)
    assert kept == {request.session for request in trace.sample(0.5).requests}
    assert kept != {request.session for request in trace.sample(0.5, seed=1).requests}
    assert "a sample" in half.invented[-1]
    assert trace.sample(1.0) is trace
