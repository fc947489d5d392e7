"""What must have been said before: a schema on every new connection, and the digests of a prompt, once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate, islice

from kvweave.server import protocol as say
from kvweave.server.client import Client
from kvweave.server.registered import registration
from kvweave.store import Prompt, Row, Schema

SLACK_S = 0.25
"""What a daemon may take beyond the budget of a question until it counts as gone."""


class Dialogue:
    """Questions about prompts. A connection that was lost is made anew, and everything is said again."""

    def __init__(self, client: Client, schema: Schema, model: str) -> None:
        self.client, self.model = client, model
        self._schema = client.number()
        self._register = registration(self._schema, model, schema)
        self._generation = 0
        self._sequences: OrderedDict[bytes, int] = OrderedDict()
        self._leases: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._lock = threading.RLock()

    def ask(
        self, prompt: Prompt, make: Callable[[int], say.Message], budget_s: float | None = None
    ) -> tuple[say.Answer, int]:
        """The answer to what `make` makes for the prompt's number, and the generation of the connection it is of."""
        return self._ask(prompt, lambda sequence: [make(sequence)], budget_s)

    def lease(
        self, prompt: Prompt, make: Callable[[int, int], say.Message], budget_s: float | None
    ) -> tuple[say.Answer, int, int]:
        """As `ask`, for a question that takes a lease, the prompt's only one: the last one it had is given back."""
        lease = self.client.number()

        def questions(sequence: int) -> list[say.Message]:
            before = self._leases.get(sequence)
            self._leases[sequence] = lease
            return [make(sequence, lease), *([say.Release([before])] if before else [])]

        return *self._ask(prompt, questions, budget_s), lease

    def _ask(
        self, prompt: Prompt, make: Callable[[int], list[say.Message]], budget_s: float | None
    ) -> tuple[say.Answer, int]:
        wait_s = None if budget_s is None else max(0.0, budget_s) + SLACK_S
        with self._lock:
            before = self._introduce(prompt)
            questions = make(self._sequences[_name(prompt)])
            answers = self.client.exchange([*before, *questions], wait_s)
            if self.client.generation != self._generation:  # it was lost, and made anew on the way
                return self._ask(prompt, make, budget_s)
            for answer in answers[: len(before)]:
                self.client.check(answer, say.Done)
            return answers[len(before)], self._generation

    def forget(self) -> None:
        """Close all sequences: what is asked next is introduced anew."""
        with self._lock:
            self.client.exchange(self._closing(0))

    def _introduce(self, prompt: Prompt) -> list[say.Message]:
        first: list[say.Message] = []
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
        self._keys[number] = prompt.num_chunks * len(self._register.rows)
        tenant, prefixes = prompt.namespace.tenant_id, prompt.prefixes.tobytes()
        return [*first, say.Open(number, self._schema, tenant, prompt.num_tokens, prefixes)]

    def _room(self, prompt: Prompt) -> int:
        """How many sequences may stay open beside a new one. Half of the limits: a client may serve two stores."""
        welcome, keys = self.client.welcome, prompt.num_chunks * len(self._register.rows)
        recent = reversed(self._sequences.values())
        sums = accumulate((self._keys[number] for number in recent), initial=keys)
        fitting = sum(1 for each in islice(sums, 1, None) if each <= welcome.max_keys // 2)
        return min(fitting, welcome.max_sequences // 2 - 1)

    def _closing(self, most: int) -> list[say.Message]:
        """Close the sequences that were used least recently, so that at most so many are left."""
        closed = [self._sequences.popitem(last=False)[1] for _ in range(len(self._sequences) - most)]
        leases = [lease for number in closed if (lease := self._leases.pop(number, 0))]
        for number in closed:
            del self._keys[number]
        return [say.Close(closed), say.Release(leases)] if closed else []


def _name(prompt: Prompt) -> bytes:
    """What makes two prompts the same to the daemon."""
    last = prompt.prefixes[-1].tobytes() if prompt.num_chunks else b""
    return prompt.namespace.tenant_id + prompt.num_tokens.to_bytes(8, "little") + last


def key_of(prompt: Prompt, row: Row, chunk: int) -> bytes:
    key: bytes = prompt.namespace.tenant_id + prompt.prefixes[chunk].tobytes() + row.id
    return key
