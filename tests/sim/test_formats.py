"""Formats: each is known by its start, and says what it had to make up."""

from __future__ import annotations

import gzip
import json
import tarfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import LengthsOnly, TraceError, UnknownName
from kvweave.sim import FORMATS, Foresight, Reading, Trace, load_of, read_trace
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


def copied(name: str) -> Any:
    """The rows of a sample of block ids, to be changed."""
    return deepcopy({"mooncake": samples.MOONCAKE, "bailian": samples.BAILIAN, "coding": [samples.CODING]}[name])


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
    with pytest.raises(TraceError, match="line 1 has no field 'timestamp'"):
        read_trace(path, format="mooncake")


@pytest.mark.parametrize("value", ["many", -1, 10**12, None, True])
def test_lengths_that_make_no_sense_are_refused(tmp_path: Path, value: object) -> None:
    row = samples.MOONCAKE[0] | {"input_length": value}
    with pytest.raises(TraceError, match="input_length must be a number of 0 to"):
        read_trace(written(tmp_path, "x.jsonl", lines([row])))


@pytest.mark.parametrize("name", ["mooncake", "bailian", "coding", "openai", "azure"])
def test_an_empty_prompt_is_left_out_with_a_note(tmp_path: Path, name: str) -> None:
    if name == "azure":
        text = samples.AZURE + "2023-11-16 18:15:52,0,0\n"
    elif name == "openai":
        text = lines([*samples.OPENAI, {"messages": []}])
    else:
        rows = copied(name)
        requests = rows[0]["requests"] if name == "coding" else rows
        requests.append(requests[0] | {"input_length": 0, "in": 0, "hash_ids": [1], "chat_id": 99})
        text = lines(rows)
    whole, with_empty = read_trace(sample(tmp_path, name)), read_trace(written(tmp_path, "x.jsonl", text))
    assert lengths(with_empty) == lengths(whole)
    assert with_empty.invented[-1] == "1 requests whose prompt has not one token are left out"


# ---- block ids


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, 10**400, "soon", None, [1]])
@pytest.mark.parametrize("name", ["MOONCAKE", "BAILIAN", "AGENT"])
def test_times_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: object) -> None:
    rows = [dict(row) for row in getattr(samples, name)]
    rows[1]["timestamp"] = value
    with pytest.raises(TraceError, match=r"x\.jsonl, line 2: timestamp must be a finite number"):
        read_trace(written(tmp_path, "x.jsonl", lines(rows)))


@pytest.mark.parametrize("name", ["mooncake", "bailian", "coding"])
def test_a_prompt_with_fewer_ids_than_whole_blocks_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    broken = copied(name)
    request = broken[0]["requests"][2] if name == "coding" else broken[1]
    request.update({"hash_ids": [1], "input_length": 1100})
    line = "line 1, session fix the parser, request 3" if name == "coding" else "line 2"
    with pytest.raises(TraceError, match=rf"x\.jsonl, {line}: a prompt of .* whole blocks of .* names 1: write an id"):
        read_trace(written(tmp_path, "x.jsonl", lines(broken)))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("bailian", "chat_id", []), ("bailian", "hash_ids", 7), ("mooncake", "hash_ids", [[1]]), ("coding", "t", "late")],
)
def test_fields_of_the_wrong_kind_are_refused(tmp_path: Path, name: str, field: str, value: object) -> None:
    rows = copied(name)
    (rows[0]["requests"][0] if name == "coding" else rows[0])[field] = value
    with pytest.raises(TraceError, match=r"x\.jsonl, line 1"):
        read_trace(written(tmp_path, "x.jsonl", lines(rows)))


def test_a_block_size_beyond_reason_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    session = samples.CODING | {"block_size": 10**13}
    with pytest.raises(TraceError, match="block_size must be a number of 1 to 16,777,216"):
        read_trace(written(tmp_path, "x.jsonl", lines([session])))


def test_a_token_id_beyond_int32_is_refused_with_its_request(tmp_path: Path) -> None:
    log = "Received request cmpl-1: prompt: 'x', prompt_token_ids: [1, 99999999999]\n"
    with pytest.raises(TraceError, match="request cmpl-1 has token ids that are none"):
        read_trace(written(tmp_path, "x.log", log))


def test_a_tail_and_an_output_are_those_of_the_request_that_goes_on_from_it(tmp_path: Path) -> None:
    trace = read_trace(sample(tmp_path, "mooncake"))
    first, second, third = (trace.tokens(request) for request in trace.requests)
    assert lengths(trace) == [(1100, 20), (700, 600), (1700, 5)]
    assert (first == third[: len(first)]).all()
    assert len(first) == 1119  # the last generated token is never computed
    assert (second[:512] == first[:512]).all()
    assert not set(second[512:]) & {*first, *third}
    assert any("are known for 1 requests that a later one continues" in note for note in trace.invented)


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
    assert any("are known for 1 requests" in note for note in trace.invented)


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


def chat_overlaps(tmp_path: Path, *rows: dict[str, Any]) -> list[int]:
    """Characters that each request shares with all before it."""
    letters = Reading(tokenize=lambda text: np.array([*map(ord, text)], np.int32))
    trace = read_trace(written(tmp_path, "x.jsonl", lines(rows)), reading=letters)
    return [placed.overlap for placed in Foresight(trace, 1).requests]


@pytest.mark.parametrize("size", [4, 4000])
def test_prompts_with_different_images_share_what_is_before_them(tmp_path: Path, size: int) -> None:
    def asked(image: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + image * size}}
        return {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Look: "}, part, {"text": "What?"}]}]
        }

    start = len("user: Look: ")
    first, other, again = chat_overlaps(tmp_path, asked("A"), asked("B"), asked("A"))
    assert first == 0
    assert start <= other < start + 90
    assert again > other + 6


def test_tools_and_their_calls_are_part_of_prompts_and_answers(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]}
    tools, ask = [{"function": {"name": "read"}}], {"role": "user", "content": "Go."}
    first = {"messages": [ask], "tools": tools, "response": {"choices": [{"message": call}]}}
    second = {"messages": [ask, call, {"role": "tool", "content": "done"}], "tools": tools}
    without = {"messages": [ask]}
    said = len(f"tools: {json.dumps(tools)}\nuser: Go.\n")
    assert chat_overlaps(tmp_path, first, second, without)[1] >= said
    one, two, three = read_trace(tmp_path / "x.jsonl").requests
    assert one.output_tokens > 10
    assert two.prompt_tokens > one.prompt_tokens > three.prompt_tokens
    assert chat_overlaps(tmp_path, first, without)[1] == 0


def test_a_tokenizer_of_ones_own_is_asked(tmp_path: Path) -> None:
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


def test_load_figures_of_requests_a_million_years_apart_take_no_memory_for_the_time_between(tmp_path: Path) -> None:
    header = samples.BURSTGPT.splitlines()[0]
    cells = {"Timestamp": "0", "Request tokens": "5", "Response tokens": "1"}
    names = header.split(",")
    rows = [",".join((cells | {"Timestamp": time}).get(name.strip(), "0") for name in names) for time in ("0", "3e13")]
    assert load_of(read_trace(written(tmp_path, "x.csv", "\n".join([header, *rows])))).busiest_minute_tokens == 5


def test_load_figures_are_those_of_the_lengths(tmp_path: Path) -> None:
    load = load_of(read_trace(sample(tmp_path, "azure")))
    assert load.prompt == pytest.approx((385, 385, 394.9, 396))
    assert load.seconds == pytest.approx(4.314579)
    assert load.busiest_minute_tokens == 770


def test_times_of_lengths_have_the_zone_that_they_say_whatever_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's table of 2024 writes some times without a fraction; in New York 2 in the night came twice that day."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    rows = [f"{moment},10,1" for moment in ("2024-11-03 00:59:59.5+00:00", "2024-11-03 01:00:00+00:00")]
    naive = [f"{moment},10,1" for moment in ("2024-11-03 00:59:59.5900000", "2024-11-03 02:00:00")]
    try:
        for one, apart in ((rows, 0.5), (naive, 3600.41)):
            path = written(tmp_path, "x.csv", "\n".join([samples.AZURE.splitlines()[0], *one]))
            assert read_trace(path).seconds == pytest.approx(apart)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_log_goes_on_over_new_year(tmp_path: Path) -> None:
    line = (
        "INFO {} [logger.py:43] Received request cmpl-{}: prompt: 'a', prompt_token_ids: [1, 2], lora_request: None.\n"
    )
    log = line.format("12-31 23:59:59", 1) + line.format("01-01 00:00:01", 2)
    trace = read_trace(written(tmp_path, "x.log", log))
    assert [(request.session, request.arrival) for request in trace.requests] == [("cmpl-1", 0.0), ("cmpl-2", 2.0)]


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


def test_a_compressed_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path: Path) -> None:
    data = lines(samples.MOONCAKE).encode()
    (tmp_path / "compressed.jsonl").write_bytes(gzip.compress(data))
    (tmp_path / "plain.jsonl.gz").write_bytes(data)
    assert lengths(read_trace(tmp_path / "compressed.jsonl")) == lengths(read_trace(tmp_path / "plain.jsonl.gz"))


@pytest.mark.parametrize("name", ["mooncake", "chat", "azure", "vllm-log"])
def test_a_byte_order_mark_and_lines_that_end_as_on_windows_change_nothing(tmp_path: Path, name: str) -> None:
    plain = sample(tmp_path, name)
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
    assert lengths(read_trace(windows)) == lengths(read_trace(plain))


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("[]".encode("utf-16"), "is UTF-16 text: convert it to UTF-8"),
        (b"PAR1\x15\x04", "is a Parquet file: write it as JSON lines"),
        (b"PK\x03\x04\x14", "is a zip archive: unpack it"),
        (b"\x28\xb5\x2f\xfd\x04", "is compressed with zstd: decompress it"),
        (b"\xfd7zXZ\x00", "is compressed with xz: decompress it"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_cure(tmp_path: Path, start: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(start)
    for format in ("auto", "mooncake", "log"):
        with pytest.raises(TraceError, match=says):
            read_trace(path, format=format)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_as_its_objects_line_by_line_are(tmp_path: Path, indent: int | None) -> None:
    array = written(tmp_path, "array.json", json.dumps(samples.MOONCAKE, indent=indent))
    assert lengths(read_trace(array)) == lengths(read_trace(sample(tmp_path, "mooncake")))


def test_a_format_is_known_by_a_first_line_of_megabytes(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 400_000}]}
    assert read_trace(written(tmp_path, "x.jsonl", lines([long, *samples.OPENAI]))).format == "chat"


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_trace_is_called_empty(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "x.jsonl", text)
    with pytest.raises(TraceError, match="x.jsonl: it is empty"):
        read_trace(path)
    with pytest.raises(TraceError, match="all files in it are empty"):
        read_trace(written(tmp_path, "y.jsonl", text).parent)


def test_an_empty_file_before_others_in_a_folder_does_not_hide_their_format(tmp_path: Path) -> None:
    sample(tmp_path, "mooncake")
    written(tmp_path, "a.jsonl", "")
    assert read_trace(tmp_path).format == "mooncake"


def test_a_field_that_cannot_be_read_is_told_with_its_value(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", samples.AZURE + "2023-11-16 18:15:50.99,many,109\n")
    with pytest.raises(TraceError, match="request 2 has a field that cannot be read: .*'many'$"):
        read_trace(path)


def test_half_a_surrogate_pair_in_a_text_is_a_character_like_others(tmp_path: Path) -> None:
    half = {"messages": [{"role": "user", "content": "abcd \ud800 efgh"}]}
    [request] = read_trace(written(tmp_path, "x.jsonl", lines([half]))).requests
    assert request.prompt_tokens == len("user: abcd ? efgh\n") // 4


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in ("x.jsonl.gz", "x.csv.gz", "x.tar.gz") for damage in ("cut", "flipped")]
    + [("x.tar.gz", "plain")],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    data = (samples.AZURE if "csv" in name else lines(samples.AGENT)).encode() * 400
    path = tmp_path / name
    if name == "x.tar.gz":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(written(tmp_path, "a.jsonl", data.decode()), "a.jsonl")
    else:
        path.write_bytes(gzip.compress(data))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 9]) + whole[middle + 9 :]
    path.write_bytes({"cut": whole[:middle], "plain": data, "flipped": flipped}[damage])
    says = "" if damage == "flipped" else ".* is cut short, damaged"  # flipped bytes may unpack, into other text
    with pytest.raises(TraceError, match=name + says):
        read_trace(path)


@pytest.mark.parametrize("indent", [None, 1])
def test_broken_json_is_named_with_its_line(tmp_path: Path, indent: int | None) -> None:
    text = lines(samples.MOONCAKE) if indent is None else json.dumps(samples.SHAREGPT, indent=indent)
    rows = text.splitlines()
    rows[2] = rows[2][:-1] + "]"
    with pytest.raises(TraceError, match="line 3"):
        read_trace(written(tmp_path, "x.jsonl", "\n".join(rows)), format="mooncake" if indent is None else "chat")


def test_json_nested_beyond_what_can_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is no JSON"):
        read_trace(written(tmp_path, "x.jsonl", "[" * 10**6), format="chat")


def test_text_in_another_encoding_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes('{"messages": [{"role": "user", "content": "é"}]}\n'.encode("latin-1"))
    with pytest.raises(TraceError, match="line 1 is no UTF-8 text, invalid continuation byte 0xe9: convert it"):
        read_trace(tmp_path / "x.jsonl")


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
