"""Chats as text: ShareGPT (`conversations` of `from` and `value`) and OpenAI's (`messages` of `role` and `content`, as
they are, or as the `body` of a batch request, with `response` or `choices` where the answer was logged). Tools, calls
of them, and parts of messages that are no text (images, sounds) count as their JSON, where that is long as a digest of
it: what differs in them is not the same prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvweave.errors import TraceError
from kvweave.sim.trace import Trace, checked_time
from kvweave.sim.traces.reading import Reading, TextRequest
from kvweave.sim.traces.trace_files import Head, records

APART, TURN = 1.0, 60.0
"""Seconds between the starts of chats, and between their turns, where a file says no times."""
MOST_PART = 1024
"""Characters of a part that is no text; of a longer one, an image in base64, stands a digest."""
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
        known = {**_response(row), **row}
        time = next((known[key] for key in ("timestamp", "created", "time") if _is_number(known.get(key))), None)
        timed = timed and time is not None
        start = number * APART if time is None else checked_time(where, "its time", time)
        session = str(_session(row, number))
        for turn, (prompt, answer) in enumerate(_turns(messages, _answer(row))):
            requests.append((start + TURN * turn, prompt, answer, session))
    times = f"no times: a chat starts every {APART:g} s, and its turns are {TURN:g} s apart"
    invented = [
        'messages are joined as "role: text" lines: no chat template is applied; tools and calls are JSON, an image is'
        " a digest of 64 characters"
    ]
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
    tools = [("tools", json.dumps(row["tools"]))] if row.get("tools") else []
    return tools + [(str(message.get("role", message.get("from", ""))), _said(message)) for message in found]


def _said(message: dict[str, Any]) -> str:
    """The text of a message, and the calls of tools in it."""
    calls = message.get("tool_calls")
    return _text(message.get("content", message.get("value"))) + (json.dumps(calls) if calls else "")


def _text(content: object) -> str:
    """The text of a content or of a part of it; what is no text is named by its JSON, or a digest of that."""
    if isinstance(content, list):
        return "".join(_text(part) for part in content)
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(text := _dict(content).get("text"), str):
        return text
    part = json.dumps(content)
    return part if len(part) <= MOST_PART else hashlib.sha256(part.encode()).hexdigest()


def _answer(row: dict[str, Any]) -> str:
    """The answer that was logged beside the request."""
    if isinstance(response := row.get("response"), str):
        return response
    choices = _response(row).get("choices")
    return _said(_dict(_dict(choices[0]).get("message"))) if isinstance(choices, list) and choices else ""


def _response(row: dict[str, Any]) -> dict[str, Any]:
    """The response that was logged beside the request; without one the row itself may have its fields."""
    response = _dict(row.get("response", row))
    return _dict(response.get("body")) or response


def _session(row: dict[str, Any], number: int) -> object:
    return next((row[key] for key in ("session_id", "conversation_id", "id") if row.get(key)), number)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
