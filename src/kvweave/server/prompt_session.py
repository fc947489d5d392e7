"""The state that a daemon needs before a request about a prompt: the schema, once a connection, and the prompt's
digests, once."""

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

REPLY_MARGIN_S = 0.02
"""Seconds by which the daemon gives up earlier than its client, so that a partial result still arrives in time."""
GRACE_S = 0.02
"""Seconds that a reply may take beyond the budget of its request."""


class PromptSession:
    """Requests about prompts. After a reconnect, schema and prompts are sent again.

    What was sent is recorded only by functions that the client calls while it holds the connection, so that the record
    is always that of the current connection.
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

    def arena(self, generation: int, budget: Budget) -> Bytes:
        """The memory in which places lie that came over the connection of this generation. Raises `ServerError`."""
        asked, mapped = self.client.mapped, self._arena_of.mapped
        if mapped.welcome.boot != asked.welcome.boot:  # the daemon is another one by now, and so is its arena
            self._arena_of.ask(protocol.Ping(), protocol.Done, reply_timeout(budget))
            mapped = self._arena_of.mapped
        if asked.generation != generation or mapped.welcome.boot != asked.welcome.boot:
            raise ServerGone("the connection was lost, and what was held with it")
        return mapped.arena

    def inbox(self, generation: int) -> Bytes:
        """The inbox of the connection of this generation. Raises `ServerGone`."""
        mapped = self.client.mapped
        if mapped.generation != generation:
            raise ServerGone("the connection was lost, and what was reserved with it")
        return mapped.inbox

    def ask(
        self,
        prompt: HashedPrompt,
        make: Callable[[int], protocol.Message],
        budget: Budget = UNLIMITED,
        generation: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[protocol.Reply, int]:
        """The reply to the request that `make` builds for the prompt's number, and the generation of its connection.

        A request about something held by a certain connection gives its `generation`; if that connection is lost, it is
        not sent.
        """
        (reply,), asked = self._ask([prompt], lambda _, sequence: [make(sequence)], budget, generation, meanwhile)
        return reply, asked

    def lease(
        self, prompts: Sequence[HashedPrompt], make: Callable[[int, int], protocol.Message], budget: Budget
    ) -> tuple[list[protocol.Reply], int, list[int]]:
        """As `ask`, for prompts in one round trip and requests that take a lease. A prompt has one lease at a time: its
        previous one is released."""
        leases = [self.client.number() for _ in prompts]

        def requests(number: int, sequence: int) -> list[protocol.Message]:
            before = self._leases.get(sequence)
            self._leases[sequence] = leases[number]
            return [make(sequence, leases[number]), *([protocol.Release([before])] if before else [])]

        return *self._ask(prompts, requests, budget), leases

    def ask_all(
        self, prompts: Sequence[HashedPrompt], make: Callable[[int], protocol.Message], budget: Budget
    ) -> tuple[list[protocol.Reply], int]:
        """As `ask`, for prompts in one round trip."""
        return self._ask(prompts, lambda _, sequence: [make(sequence)], budget)

    def _ask(
        self,
        prompts: Sequence[HashedPrompt],
        make: Callable[[int, int], list[protocol.Message]],
        budget: Budget,
        generation: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[list[protocol.Reply], int]:
        setups: list[tuple[int, int, protocol.Message]] = []
        places: list[int] = []

        # Called when the connection is known: a new one has neither the schema nor the prompts, so both are sent again.
        def requests() -> list[protocol.Message]:
            messages: list[protocol.Message] = []
            setups.clear()
            places.clear()
            if generation not in (None, self.client.generation):
                return messages
            for number, prompt in enumerate(prompts):
                before = self._setup_messages(prompt)
                setups.extend((len(messages) + i, number, message) for i, message in enumerate(before))
                messages += before
                places.append(len(messages))
                messages += make(number, self._sequences[_name(prompt)])
            return messages

        replies, asked = self.client.exchange(requests, reply_timeout(budget), meanwhile)
        if not replies:
            raise ServerGone("the connection was lost, and what was held with it")
        found = [replies[place] for place in places]
        for place, number, request in setups:
            if isinstance(replies[place], protocol.Failed):
                found[number] = replies[place]
                self._forget_rejected(prompts[number], request)
        return found, asked

    def _forget_rejected(self, prompt: HashedPrompt, request: protocol.Message) -> None:
        """Forget what the daemon did not accept, so that the next request sends it again."""
        self._keys.pop(self._sequences.pop(_name(prompt), 0), None)
        if request is self._register:
            self._generation = 0

    def _setup_messages(self, prompt: HashedPrompt) -> list[protocol.Message]:
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
        first += self._close_messages(self._max_open_beside(prompt))
        number = self._sequences[name] = self.client.number()
        self._keys[number] = prompt.num_chunks * len(self._register.shards)
        tenant, prefixes = prompt.tenant_id, prompt.prefixes.tobytes()
        return [*first, protocol.Open(number, self._schema, tenant, prompt.num_tokens, prefixes)]

    def _max_open_beside(self, prompt: HashedPrompt) -> int:
        """How many sequences may stay open beside a new one: half of the limits, since two stores may share a
        client."""
        welcome, keys = self.client.welcome, prompt.num_chunks * len(self._register.shards)
        recent = reversed(self._sequences.values())
        sums = accumulate((self._keys[number] for number in recent), initial=keys)
        fitting = sum(1 for each in islice(sums, 1, None) if each <= welcome.max_keys // 2)
        return min(fitting, welcome.max_sequences // 2 - 1)

    def _close_messages(self, most: int) -> list[protocol.Message]:
        """Close the least recently used sequences, so that at most `most` stay open."""
        closed = [self._sequences.popitem(last=False)[1] for _ in range(len(self._sequences) - most)]
        leases = [lease for number in closed if (lease := self._leases.pop(number, 0))]
        for number in closed:
            del self._keys[number]
        return [protocol.Close(closed), protocol.Release(leases)] if closed else []


def reply_timeout(budget: Budget) -> float | None:
    """Seconds to wait for a reply; None: the client's default."""
    return None if budget.left_s is None else max(0.0, budget.left_s) + GRACE_S


def daemon_budget(budget: Budget) -> float | None:
    """The budget that is sent to the daemon."""
    return None if budget.left_s is None else max(0.0, budget.left_s - REPLY_MARGIN_S)


def _name(prompt: HashedPrompt) -> bytes:
    """What identifies a prompt to the daemon."""
    last = prompt.prefixes[-1].tobytes() if prompt.num_chunks else b""
    return prompt.tenant_id + prompt.num_tokens.to_bytes(8, "little") + last


def key_of(prompt: HashedPrompt, shard: Shard, chunk: int) -> bytes:
    key: bytes = prompt.tenant_id + prompt.prefixes[chunk].tobytes() + shard.id
    return key
