"""A scheduler with continuous batching on the core, in numpy: admit, prefill in chunks, decode together, preempt.

The model is a toy: a layer of full attention and one with a window of 32 tokens. Both keep the token ids, and the next
token is a sum over what they read *through the block tables*: a wrong page would give a wrong token.

Run: python examples/tiny_scheduler.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import kvweave as kw
from kvweave.spec import DType

WINDOW, VOCABULARY, CHUNK = 32, 997, 64


def layer(tag: str, reach: kw.Full | kw.Window) -> kw.Layer:
    return kw.Layer((kw.LayerCache(tag, reach, (kw.Role("kv", (1,), DType.INT32),)),))


@dataclass
class Request:
    """A prompt, and what was generated after it."""

    tokens: list[int]
    new_tokens: int
    answer: list[int] = field(default_factory=list)
    reused: int = 0


class Running(NamedTuple):
    request: Request
    sequence: kw.Sequence


class Engine:
    """Pages in numpy, one row of ids a page and group, and the loop over requests."""

    def __init__(self, memory: str, block_tokens: int = 16) -> None:
        spec = kw.ModelSpec("toy", (layer("full", kw.Full()), layer("window", kw.Window(WINDOW))))
        self.plan = kw.make_plan(spec, memory, block_tokens=block_tokens)
        self.cache = kw.Cache(self.plan, rows=64, max_tokens=4096)
        self.pages = {
            g.tag: np.zeros((self.plan.num_pages(g.tag) + 1) * block_tokens, np.int64) for g in self.plan.groups
        }
        self.block_tokens, self.preemptions, self.most_together = block_tokens, 0, 0

    def run(self, requests: list[Request]) -> None:
        """All requests to their end, first come first served."""
        for request in requests:  # what could not even run alone is refused here, by name
            self.cache.check_fits(len(request.tokens) + request.new_tokens, CHUNK)
        waiting, running = list(requests), list[Running]()
        while waiting or running:
            while waiting and (sequence := self.prefill(waiting[0])):
                running.append(Running(waiting.pop(0), sequence))
            self.most_together = max(self.most_together, len(running))
            waiting[:0] = self.decode(running)
            for done in [each for each in running if len(each.request.answer) == each.request.new_tokens]:
                self.cache.close(done.sequence)
                running.remove(done)

    def prefill(self, request: Request) -> kw.Sequence | None:
        """The whole prompt, a chunk a step, from the longest prefix that is cached; None if it must wait."""
        tokens = request.tokens + request.answer
        sequence = self.cache.open(tokens)
        try:
            for start in range(sequence.length, len(tokens), CHUNK):
                self.cache.extend(sequence, min(CHUNK, len(tokens) - start))
                self.write([sequence], tokens[start : sequence.length])
                self.cache.commit(sequence)
        except kw.OutOfPages:
            self.cache.close(sequence)
            return None
        request.reused = request.reused if request.answer else sequence.num_cached
        return sequence

    def decode(self, running: list[Running]) -> list[Request]:
        """One token more of each; the youngest are preempted if there is no room, and keep what they computed."""
        preempted: list[Request] = []
        while running:
            batch = kw.Batch(each.sequence for each in running)
            tokens = [self.next_token(sequence) for sequence in batch.sequences]
            try:
                self.cache.extend(batch, 1, tokens=tokens)
            except kw.OutOfPages:
                youngest = running.pop()
                self.cache.close(youngest.sequence)
                self.preemptions += 1
                preempted.insert(0, youngest.request)
                continue
            self.write(batch.sequences, tokens)
            self.cache.commit(batch)
            for each, token in zip(running, tokens, strict=True):
                each.request.answer.append(token)
            break
        return preempted

    def write(self, sequences: list[kw.Sequence], ids: list[int]) -> None:
        """What a kernel does: the rows of the step's tokens go where the slot mapping says."""
        for tag, slots in self.cache.slot_mapping(sequences).items():
            self.pages[tag][slots] = ids

    def next_token(self, sequence: kw.Sequence) -> int:
        """What attention does: gather the history through the block table, and sum it up."""
        total = 0
        for tag, first in (("full", 0), ("window", max(0, sequence.length - WINDOW + 1))):
            positions = np.arange(first, sequence.length)
            table = self.cache.table(tag)[sequence.row]
            slots = table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
            total += int((self.pages[tag][slots] * (positions + 1)).sum())
        return total % VOCABULARY


def main() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, 200).tolist()
    requests = [Request(system + rng.integers(0, VOCABULARY, 40).tolist(), new_tokens=50) for _ in range(12)]
    engine = Engine("6KiB")
    engine.run(requests)
    prompt = sum(len(request.tokens) for request in requests)
    print(f"{len(requests)} requests, {engine.most_together} at once at most, {engine.preemptions} preempted")
    print(f"{sum(request.reused for request in requests)} of {prompt} prompt tokens were found, not computed")
    for group in engine.cache.stats().groups:
        print(f"{group.tag}: {group.held} pages held, {group.cached} cached for the next request")


if __name__ == "__main__":
    main()
