"""What must have been said before: a schema on every new connection, and the digests of a prompt, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from kvweave.errors import ServerGone
from kvweave.server import protocol
from kvweave.server.client import Client
from kvweave.server.registered_model import registration
from kvweave.store import HashedPrompt, Schema, Shard
from kvweave.store.keys import Bytes
from kvweave.store.tier_stack import UNLIMITED, Budget

ANSWER_S = 0.02
"""How much earlier than its client a daemon gives up, so that what it knows by then still comes in time."""
GRACE_S = 0.02
"""What an answer may take beyond the budget of its question."""


class PromptSession:
    """Questions about prompts. A connection that was lost is made anew, and everything is said again.

    What was said is written down only by functions that the client calls while it holds the connection, so that it is
    always what this connection was told.
    """

    def __init__(self, client: Client, schema: Schema, model: str, arena_of: Client | None = None) -> None:
        self.client, self.model = client, model
        self._arena_of = arena_of or client
        self._schema = client.number()
        self._register = registration(self._schema, model, schema)
        self._generation = 0
        self._sequences: OrderedDict[bytes, int] = OrderedDict()
        self._leases: dict[int, int] = {}
        self._keys: dict[int, int] = {}

    def arena(self, generation: int) -> Bytes:
        """The memory in which places lie that came over the connection of this generation. Raises `ServerGone`."""
        asked, mapped = self.client.mapped, self._arena_of.mapped
        if mapped.welcome.boot != asked.welcome.boot:  # the daemon is another one by now, and so is its arena
            self._arena_of.ask(protocol.Ping(), protocol.Done)
            mapped = self._arena_of.mapped
        if asked.generation != generation or mapped.welcome.boot != asked.welcome.boot:
            raise ServerGone("the connection was lost, and what was held with it")
        return mapped.arena

    def ask(
        self,
        prompt: HashedPrompt,
        make: Callable[[int], protocol.Message],
        budget: Budget = UNLIMITED,
        generation: int | None = None,
    ) -> tuple[protocol.Answer, int]:
        """The answer to what `make` makes for the prompt's number, and the generation of the connection it is of.

        A question about what a certain connection holds names its `generation`: over another one it is not asked.
        """
        (answer,), asked = self._ask([prompt], lambda _, sequence: [make(sequence)], budget, generation)
        return answer, asked

    def lease(
        self, prompts: Sequence[HashedPrompt], make: Callable[[int, int], protocol.Message], budget: Budget
    ) -> tuple[list[protocol.Answer], int, list[int]]:
        """As `ask`, for prompts in one round trip, and questions that take a lease, each prompt's only one: the last
        one it had is given back."""
        leases = [self.client.number() for _ in prompts]

        def questions(number: int, sequence: int) -> list[protocol.Message]:
            before = self._leases.get(sequence)
            self._leases[sequence] = leases[number]
            return [make(sequence, leases[number]), *([protocol.Release([before])] if before else [])]

        return *self._ask(prompts, questions, budget), leases

    def ask_all(
        self, prompts: Sequence[HashedPrompt], make: Callable[[int], protocol.Message], budget: Budget
    ) -> tuple[list[protocol.Answer], int]:
        """As `ask`, for prompts in one round trip."""
        return self._ask(prompts, lambda _, sequence: [make(sequence)], budget)

    def _ask(
        self,
        prompts: Sequence[HashedPrompt],
        make: Callable[[int, int], list[protocol.Message]],
        budget: Budget,
        generation: int | None = None,
    ) -> tuple[list[protocol.Answer], int]:
        introductions: list[tuple[int, int, protocol.Message]] = []
        places: list[int] = []

        def questions() -> list[protocol.Message]:
            said: list[protocol.Message] = []
            introductions.clear()
            places.clear()
            if generation not in (None, self.client.generation):
                return said
            for number, prompt in enumerate(prompts):
                before = self._introduce(prompt)
                introductions.extend((len(said) + i, number, message) for i, message in enumerate(before))
                said += before
                places.append(len(said))
                said += make(number, self._sequences[_name(prompt)])
            return said

        answers, asked = self.client.exchange(questions, reply_timeout(budget))
        if not answers:
            raise ServerGone("the connection was lost, and what was held with it")
        told = [answers[place] for place in places]
        for place, number, question in introductions:
            if isinstance(answers[place], protocol.Failed):
                told[number] = answers[place]
                self._not_said(prompts[number], question)
        return told, asked

    def _not_said(self, prompt: HashedPrompt, question: protocol.Message) -> None:
        """What the daemon did not take is said again by the next question."""
        self._keys.pop(self._sequences.pop(_name(prompt), 0), None)
        if question is self._register:
            self._generation = 0

    def forget(self) -> None:
        """Close all sequences: what is asked next is introduced anew."""
        self.client.exchange(lambda: self._closing(0))

    def _introduce(self, prompt: HashedPrompt) -> list[protocol.Message]:
        first: list[protocol.Message] = []
        if self._generation != self.client.generation:
            self._sequences.clear()
            self._leases.clear()
            self._keys.clear()
            self._generation = self.client.generation
            first.append(self._register)
        name = _name(prompt)
        if name in self._sequences:
            self._sequences.move_to_end(name)
            return first
        first += self._closing(self._room(prompt))
        number = self._sequences[name] = self.client.number()
        self._keys[number] = prompt.num_chunks * len(self._register.shards)
        tenant, prefixes = prompt.tenant_id, prompt.prefixes.tobytes()
        return [*first, protocol.Open(number, self._schema, tenant, prompt.num_tokens, prefixes)]

    def _room(self, prompt: HashedPrompt) -> int:
        """How many sequences may stay open beside a new one. Half of the limits: a client may serve two stores."""
        welcome, keys = self.client.welcome, prompt.num_chunks * len(self._register.shards)
        recent = reversed(self._sequences.values())
        sums = accumulate((self._keys[number] for number in recent), initial=keys)
        fitting = sum(1 for each in islice(sums, 1, None) if each <= welcome.max_keys // 2)
        return min(fitting, welcome.max_sequences // 2 - 1)

    def _closing(self, most: int) -> list[protocol.Message]:
        """Close the sequences that were used least recently, so that at most so many are left."""
        closed = [self._sequences.popitem(last=False)[1] for _ in range(len(self._sequences) - most)]
        leases = [lease for number in closed if (lease := self._leases.pop(number, 0))]
        for number in closed:
            del self._keys[number]
        return [protocol.Close(closed), protocol.Release(leases)] if closed else []


def reply_timeout(budget: Budget) -> float | None:
    """How long to wait for an answer; None: as long as the client does."""
    return None if budget.left_s is None else max(0.0, budget.left_s) + GRACE_S


def daemon_budget(budget: Budget) -> float | None:
    """What the daemon is told that it may take."""
    return None if budget.left_s is None else max(0.0, budget.left_s - ANSWER_S)


def _name(prompt: HashedPrompt) -> bytes:
    """What makes two prompts the same to the daemon."""
    last = prompt.prefixes[-1].tobytes() if prompt.num_chunks else b""
    return prompt.tenant_id + prompt.num_tokens.to_bytes(8, "little") + last


def key_of(prompt: HashedPrompt, shard: Shard, chunk: int) -> bytes:
    key: bytes = prompt.tenant_id + prompt.prefixes[chunk].tobytes() + shard.id
    return key
