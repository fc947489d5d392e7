"""Small traces of every format, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 700, "output_length": 600, "hash_ids": [0, 3]},
    {"timestamp": 2000, "input_length": 1700, "output_length": 5, "hash_ids": [0, 1, 4, 5]},
]
"""The third goes on from the first: two whole blocks of it, and more than its 1,120 tokens."""

BAILIAN = [
    {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 1.0,
        "input_length": 40,
        "output_length": 8,
        "hash_ids": [5, 6, 9],
    },
    {
        "chat_id": 8,
        "parent_chat_id": 7,
        "timestamp": 9.0,
        "input_length": 64,
        "output_length": 4,
        "hash_ids": [5, 6, 1, 2],
    },
]

CODING = {
    "id": "fix the parser",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 128, "out": 10, "hash_ids": [1, 2]},
        {"t": 3.0, "type": "subagent", "requests": [{"t": 3.5, "type": "n", "in": 64, "out": 3, "hash_ids": [1]}]},
        {"t": 9.0, "type": "s", "in": 200, "out": 4, "hash_ids": [1, 2, 3, 4]},
    ],
}

AGENT = [
    {"timestamp": 1_000_000, "input": "user: sort these numbers", "output": "which?", "session_id": "a"},
    {
        "timestamp": 3_000_000,
        "input": "user: sort these numbers\nuser: 3 1 2",
        "output": "1 2 3",
        "session_id": "a",
    },
]

SHAREGPT = [
    {
        "id": "c1",
        "conversations": [
            {"from": "human", "value": "What is a cache, in one sentence?"},
            {"from": "gpt", "value": "A place for what will be asked for again."},
            {"from": "human", "value": "And a page?"},
            {"from": "gpt", "value": "The memory of one block."},
        ],
    },
    {
        "id": "c2",
        "conversations": [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Hello yourself"}],
    },
]

OPENAI = [
    {
        "custom_id": "r1",
        "body": {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a prime."}]
        },
        "response": {"body": {"choices": [{"message": {"role": "assistant", "content": "Seven"}}]}},
    },
    {
        "custom_id": "r2",
        "body": {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Why?"}]}]
        },
    },
]

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)

VLLM = """\
INFO 07-04 12:00:01 [logger.py:43] Received request cmpl-1: prompt: 'a b', params: SamplingParams(n=1), \
prompt_token_ids: [11, 12, 13, 14], lora_request: None.
DEBUG 07-04 12:00:05 [request_logger.py:60] Request cmpl-2 details: prompt: 'a b c', \
prompt_token_ids: [11, 12, 13, 15, 16], \
prompt_embeds shape: None.
INFO 07-04 12:00:06 [request_logger.py:90] Generated response cmpl-2: output: 'd', output_token_ids: [17, 18], \
finish_reason: stop
"""
LMCACHE = (
    "[2025-07-04 12:00:01] LMCache INFO: Reqid: cmpl-1, Total tokens 261, LMCache hit tokens: 256, need to load: 4\n"
)


def lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
