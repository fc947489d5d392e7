"""Chats as text: ShareGPT (`conversations` of `from` and `value`) and OpenAI's (`messages` of `role` and `content`, as
they are, or as the `body` of a batch request, with `response` or `choices` where the answer was logged)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvweave.errors import TraceError
from kvweave.sim.trace import Trace, checked_time
from kvweave.sim.traces.reading import Reading, TextRequest
from kvweave.sim.traces.trace_files import Head, records

APART, TURN = 1.0, 60.0
"""Seconds between the starts of chats, and between their turns, where a file says no times."""
ASSISTANT = ("assistant", "gpt", "chatgpt", "bing", "bard")
Message = tuple[str, str]

NAME = "chat"


def matches(head: Head) -> bool:
    keys = head.record.keys()
    if keys & {"messages", "conversations"} or "messages" in (_dict(head.record.get("body"))):
        return True
    return head.text.lstrip()[:1] == "[" and any(f'"{key}"' in head.text for key in ("conversations", "messages"))


def read(path: Path, reading: Reading) -> Trace:
    requests: list[TextRequest] = []
    timed = True
    for number, (_, where, row) in enumerate(records(path)):
        body = _dict(row.get("body")) or row
        messages = _messages(where, body)
        time = next((row[key] for key in ("timestamp", "created", "time") if _is_number(row.get(key))), None)
        timed = timed and time is not None
        start = number * APART if time is None else checked_time(where, "its time", time)
        session = str(_session(row, number))
        for turn, (prompt, answer) in enumerate(_turns(messages, _answer(row))):
            requests.append((start + TURN * turn, prompt, answer, session))
    times = f"no times: a chat starts every {APART:g} s, and its turns are {TURN:g} s apart"
    invented = ['messages are joined as "role: text" lines: no chat template is applied']
    return reading.text_trace(path.name, NAME, requests, invented if timed else [*invented, times])


def _turns(messages: list[Message], answer: str) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each request: one that was logged with its history is one request; a finished conversation
    is a request for every answer in it."""
    if answer or not messages or messages[-1][0] not in ASSISTANT:
        yield _written(messages), answer
        return
    for at, (role, text) in enumerate(messages):
        if role in ASSISTANT and at:
            yield _written(messages[:at]), f"{role}: {text}\n"


def _written(messages: list[Message]) -> str:
    return "".join(f"{role}: {text}\n" for role, text in messages)


def _messages(where: str, row: dict[str, Any]) -> list[Message]:
    found = row.get("messages", row.get("conversations"))
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise TraceError(f"{where} has no list of messages, nor of conversations")
    return [
        (str(message.get("role", message.get("from", ""))), _text(message.get("content", message.get("value"))))
        for message in found
    ]


def _text(content: object) -> str:
    """The text of a message; of one in parts, those that are text."""
    if isinstance(content, list):
        return "".join(_text(_dict(part).get("text")) for part in content)
    return content if isinstance(content, str) else ""


def _answer(row: dict[str, Any]) -> str:
    """The answer that was logged beside the request."""
    response = row.get("response", row)
    if isinstance(response, str):
        return response
    body = _dict(_dict(response).get("body")) or _dict(response)
    choices = body.get("choices")
    return (
        _text(_dict(_dict(choices[0]).get("message")).get("content")) if isinstance(choices, list) and choices else ""
    )


def _session(row: dict[str, Any], number: int) -> object:
    return next((row[key] for key in ("session_id", "conversation_id", "id") if row.get(key)), number)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
