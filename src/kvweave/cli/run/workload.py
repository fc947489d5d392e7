"""Workloads: requests as agents, chats and questions over documents make them. Each depends on the answers before it.

agents   one system prompt with tools; agents in turn, each with a history of tool results and answers
chat     one system prompt; conversations in turn, each with a history of questions and answers
rag      one system prompt and a few documents; questions over them, each on its own
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from random import Random

from kvweave.cli.run import synthetic_text
from kvweave.cli.run.text import TextCodec
from kvweave.errors import ConfigError

MOST_REQUESTS, MOST_TOKENS = 10_000, 1 << 24
"""Larger workloads are a typing error, and would take all memory."""
Write = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: the name of its agent or document, and its whole prompt."""

    who: str
    prompt: list[int]


WorkloadRequests = Generator[WorkloadRequest, list[int], None]
"""Yields requests; is sent the answer to each."""


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """Agents, conversations or documents; turns of each; tokens that they share, or of each document; of each turn."""

    parties: int
    turns: int
    shared_tokens: int
    turn_tokens: int

    def __post_init__(self) -> None:
        if min(self.parties, self.turns, self.shared_tokens, self.turn_tokens) < 1:
            raise ConfigError("a workload needs at least 1 party, 1 turn, 1 shared token and 1 token a turn")
        if self.requests > MOST_REQUESTS or self.longest(0) > MOST_TOKENS:
            raise ConfigError(
                f"a workload of {self.requests:,} requests that grow to {self.longest(0):,} tokens: at most"
                f" {MOST_REQUESTS:,} requests and {MOST_TOKENS:,} tokens"
            )

    @property
    def requests(self) -> int:
        return self.parties * self.turns

    def longest(self, new_tokens: int) -> int:
        """Tokens of the longest prompt and its answer."""
        return self.shared_tokens * 2 + self.turns * (self.turn_tokens + new_tokens)


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes tokens, a seed decides which."""

    text: TextCodec
    random: Random

    def __call__(self, start: str, write: Write, num_tokens: int) -> list[int]:
        """`start`, then as much of what `write` writes as makes `num_tokens`."""
        tokens = self.text.encode(start)
        while len(tokens) < num_tokens:
            tokens += self.text.encode(write(self.random))
        return tokens[:num_tokens]


def agents(writer: PromptWriter, size: WorkloadSize) -> WorkloadRequests:
    system = writer("You are an agent. Use the tools below, one at a time.\n", synthetic_text.tool, size.shared_tokens)
    return _histories(writer, size, system, "agent", "\ntool result: ", synthetic_text.tool_result)


def chat(writer: PromptWriter, size: WorkloadSize) -> WorkloadRequests:
    system = writer("You answer questions, briefly and kindly.\n", synthetic_text.sentence, size.shared_tokens)
    return _histories(writer, size, system, "chat", "\nuser: ", synthetic_text.question)


def _histories(
    writer: PromptWriter, size: WorkloadSize, system: list[int], party: str, start: str, write: Write
) -> WorkloadRequests:
    """Each party in turn adds to its history, which begins with the system prompt that all share."""
    histories = [list(system) for _ in range(size.parties)]
    for turn in range(size.turns):
        for number, history in enumerate(histories):
            history.extend(writer(start, write, size.turn_tokens))
            answer = yield WorkloadRequest(f"{party} {number + 1}, turn {turn + 1}", list(history))
            history.extend(answer)


def rag(writer: PromptWriter, size: WorkloadSize) -> WorkloadRequests:
    system = writer("Answer from the document alone.\n", synthetic_text.sentence, max(1, size.shared_tokens // 8))
    documents = [
        system + writer(f"document {number + 1}: ", synthetic_text.sentence, size.shared_tokens)
        for number in range(size.parties)
    ]
    order = [(question, number) for question in range(size.turns) for number in range(size.parties)]
    for question, number in order:
        asked = writer("\nquestion: ", synthetic_text.question, size.turn_tokens)
        yield WorkloadRequest(f"document {number + 1}, question {question + 1}", documents[number] + asked)


WORKLOADS: dict[str, Callable[[PromptWriter, WorkloadSize], WorkloadRequests]] = {
    "agents": agents,
    "chat": chat,
    "rag": rag,
}


def play(asks: WorkloadRequests, answer: Callable[[WorkloadRequest], list[int]]) -> Iterator[WorkloadRequest]:
    """Put each request to `answer`, tell the workload, and yield the request when that is done."""
    try:
        ask = next(asks)
        while True:
            told = answer(ask)
            yield ask
            ask = asks.send(told)
    except StopIteration:
        return
