"""The connector's recordings: `kvweave simulate` reads them; the scheduler waits for no disk, and no disk stops it."""

from __future__ import annotations

import logging
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.integrations.vllm import trace_recorder
from kvweave.integrations.vllm.trace_recorder import RecordedRequest, TraceRecorder
from kvweave.prefix import Span
from kvweave.sim import read_trace
from kvweave.sim.foresight import Foresight
from kvweave.trace_writer import TraceWriter


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Files of this process may not grow beyond so many bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def record(path: Path, *requests: RecordedRequest) -> None:
    recorder = TraceRecorder(path)
    for number, request in enumerate(requests):
        recorder.begin(f"{number}", request)
        recorder.scheduled(f"{number}", 16)
        recorder.scheduled(f"{number}", 999)  # it was preempted, and found itself
        recorder.end(f"{number}")
        recorder.end(f"{number}")
    recorder.close()


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.jsonl"
    record(path, RecordedRequest([*range(48), 7, 8], 48, "n"), RecordedRequest([*range(40), 9], 40, "n"))
    trace = read_trace(path)
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.requests] == [(48, 2), (40, 1)]
    assert trace.recorded_hits == 32
    assert [placed.overlap for placed in Foresight(trace, 16).requests] == [0, 2]


def test_requests_with_other_pictures_or_namespaces_share_only_what_lies_before_them(tmp_path: Path) -> None:
    path, tokens = tmp_path / "trace.jsonl", [*range(64)]
    pictures = [[Span(20, b"cat")], [Span(20, b"dog")], [Span(20, b"cat")]]
    shown = [RecordedRequest(tokens, 64, "n", spans) for spans in pictures]
    record(path, *shown, RecordedRequest(tokens, 64, "other"))
    assert [placed.overlap for placed in Foresight(read_trace(path), 16).requests] == [0, 1, 3, 0]


def test_a_disk_that_hangs_holds_nobody_up_and_takes_no_memory_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    real = TraceWriter._line

    def slow(self: TraceWriter, row: dict[str, object]) -> None:
        goes_on.wait(10)
        real(self, row)

    monkeypatch.setattr(TraceWriter, "_line", slow)
    monkeypatch.setattr(trace_recorder, "QUEUED_TOKENS", 10 * 32)
    recorder, began = TraceRecorder(tmp_path / "trace.jsonl"), time.monotonic()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            recorder.begin(f"{number}", RecordedRequest([*range(32)], 32, ""))
            recorder.end(f"{number}")
    assert time.monotonic() - began < 1
    assert recorder.dropped == 90
    assert sum("too slow" in message for message in caplog.messages) == 1
    goes_on.set()
    recorder.close()
    assert len(read_trace(tmp_path / "trace.jsonl").requests) == 10


def test_a_disk_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "file" / "trace.jsonl", *[RecordedRequest([*range(32)], 32, "")] * 3)
    assert "no longer recorded" in caplog.text


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder, path = TraceRecorder(tmp_path / "trace.jsonl"), tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            recorder.begin(f"{number}", RecordedRequest([*range(32)], 32, ""))
            recorder.end(f"{number}")
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            time.sleep(0.001)
        with files_end_at(path.stat().st_size + 20):
            recorder.begin("last", RecordedRequest([*range(32)], 32, ""))
            recorder.end("last")
            recorder.close()
    assert "no longer recorded" in caplog.text
    assert recorder.is_over
    assert len(read_trace(path).requests) == 3
