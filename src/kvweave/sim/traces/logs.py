"""Logs of engines, as far as they say what was asked.

vLLM:     lines with `prompt_token_ids: [...]` ("Received request ..." of older versions, "Request ... details" of newer
          ones: `--enable-log-requests` with VLLM_LOGGING_LEVEL=DEBUG), and `output_token_ids: [...]` of "Generated
          response" lines (`--enable-log-outputs`, without streaming) where there are any. The token ids must not be
          cut by `--max-log-len`.
LMCache:  lines "Reqid: ..., Total tokens N, ... LMCache hit tokens: M": lengths, and what LMCache found. Its logs hold
          no tokens, so nothing can be replayed from them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvweave.errors import TraceError
from kvweave.sim.trace import Request, TokenIds, Trace, checked_tokens, make_trace
from kvweave.sim.traces.lengths import NO_BLOCKS
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, lines

NAME = "log"
ASKED = re.compile(r"Re(?:ceived re)?quest (\S+?):? .*prompt_token_ids: \[([\d, ]+)\]")
ANSWERED = re.compile(r"Generated response (\S+?):? .*output_token_ids: \[([\d, ]+)\]")
FOUND = re.compile(r"Reqid: (\S+), Total tokens (\d+).*?LMCache hit tokens: (\d+)")
CLOCK = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
"""Month, day and time, as vLLM's logs have them."""


def matches(head: Head) -> bool:
    return any(sign in head.text for sign in ("Received request ", "prompt_token_ids:", "LMCache hit tokens"))


def read(path: Path, reading: Reading) -> Trace:  # noqa: ARG001 - nothing in it can be read in two ways
    text = [line for _, line in lines(path)]
    asked = [(number, match) for number, line in enumerate(text) if (match := ASKED.search(line))]
    if asked:
        return _vllm(path, text, asked)
    found = [(number, match) for number, line in enumerate(text) if (match := FOUND.search(line))]
    if not found:
        raise TraceError(
            f"{path}: its requests come without token ids: run vLLM with --enable-log-requests and"
            " VLLM_LOGGING_LEVEL=DEBUG, without --max-log-len"
        )
    times = _times(text, [number for number, _ in found])
    requests = [
        Request(time, NO_BLOCKS, _tokens(path, match, 2), cached_tokens=_tokens(path, match, 3))
        for time, (_, match) in zip(times, found, strict=True)
    ]
    return make_trace(path.name, "lmcache-log", 0, requests)


def _vllm(path: Path, text: list[str], asked: list[tuple[int, re.Match[str]]]) -> Trace:
    answers = {match[1]: _ids(path, match) for line in text if (match := ANSWERED.search(line))}
    requests = []
    for time, (_, match) in zip(_times(text, [number for number, _ in asked]), asked, strict=True):
        prompt, output = _ids(path, match), answers.get(match[1], NO_BLOCKS)
        requests.append(Request(time, np.concatenate([prompt, output]), len(prompt), len(output), match[1]))
    known = sum(match[1] in answers for _, match in asked)
    invented = [
        "every request is a session of its own: the log names none",
        f"{len(asked) - known:,} requests have no output: the log has no output_token_ids of theirs",
    ]
    return make_trace(path.name, "vllm-log", 1, requests, invented)


def _ids(path: Path, match: re.Match[str]) -> TokenIds:
    try:
        return np.array([int(id) for id in match[2].split(",")], np.int32)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{path}: request {match[1]} has token ids that are none: {error}") from error


def _tokens(path: Path, match: re.Match[str], number: int) -> int:
    return checked_tokens(f"{path}, request {match[1]}", "a number of tokens", float(match[number]))


def _times(text: list[str], numbers: Iterable[int]) -> list[float]:
    """Seconds of each line by its own clock, or, without one, by its number. January after December is
    another year."""
    found, years, last = list[float](), 0, 0
    for number in numbers:
        match = CLOCK.search(text[number])
        month, day, hour, minute, second = map(int, match.groups()) if match else (0, 0, 0, 0, number)
        years, last = years + ((last, month) == (12, 1)), month
        found.append(((((years * 12 + month) * 31 + day) * 24 + hour) * 60 + minute) * 60.0 + second)
    return found
