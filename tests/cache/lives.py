"""Random lives: sequences of all kinds of plans are opened, computed in batches with steps in flight, forked, cut,
pinned and closed under shortage, against the oracles of `engine`. One seed is one life; `scripts/lives.py` runs
many."""

from __future__ import annotations

import random
from typing import Any

from kvweave.cache import Batch, Cache, Pin, Sequence
from kvweave.errors import CacheError, CannotTruncate, NeverFits, NotSettled, OutOfPages, PlanError
from kvweave.plan import Plan, make_plan
from kvweave.policy import POLICIES, Policy
from kvweave.prefix import Event, Point, Replica, Retention
from kvweave.spec import Chunk, DType, Full, Layer, LayerCache, ModelSpec, Reach, Role, SinkWindow, State, Window
from tests.cache.engine import Engine, Step, check_books, could_have, longest_hit

RETENTIONS = (
    Retention(),
    Retention(every=8),
    Retention(every=1, decode_every=1),
    Retention(False, False, 0),
    Retention(every=0, decode_every=4),
)


def random_plan(rng: random.Random) -> Plan:
    """One to five groups of any kinds, block sizes and pools, large enough for a few sequences."""
    caches = []
    for i in range(rng.randint(1, 5)):
        width = rng.randint(1, 4) * 4
        kind: Reach = rng.choice(
            (
                Full(),
                Full(),
                Window(rng.randint(1, 30)),
                Chunk(rng.choice((4, 6, 8))),
                SinkWindow(rng.randint(1, 9), rng.randint(1, 16)),
                State(),
            )
        )
        caches.append(LayerCache(f"g{i}", kind, (Role("key", (width,), DType.FLOAT32),)))
    blocks = {cache.tag: rng.choice((1, 2, 4, 4, 4, 8)) for cache in caches}
    kernels = {tag: rng.choice((1, size)) for tag, size in blocks.items()}
    pools = rng.choice(("auto", "independent"))
    spec = ModelSpec("random", tuple(Layer((cache,)) for cache in caches))
    memory = rng.choice((4_000, 8_000, 20_000))
    while True:
        try:
            made = make_plan(spec, memory, block_tokens=blocks, kernel_tokens=kernels, pools=pools)
            if all(pool.num_superpages > 3 for pool in made.pools):
                return made
        except PlanError:
            pass
        memory *= 2


class Running:
    """A sequence, the tokens it truly has, and its steps that are not committed yet."""

    def __init__(self, sequence: Sequence, tokens: list[int]) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.steps: list[Step] = []
        self.drafts = 0


class Life:
    """`steps` random operations on one cache; `counts` says how often each kind happened."""

    def __init__(self, seed: int, policy: str | Policy = "", plan: Plan | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = plan or random_plan(self.rng)
        self.events: list[Event] = []
        self.cache = Cache(
            self.plan,
            retention=self.rng.choice(RETENTIONS),
            policy=policy or self.rng.choice(sorted(POLICIES)),
            rows=self.rng.choice((2, 16)),
            max_tokens=200,
            on_event=self.events.append,
        )
        self.engine = Engine(self.cache)
        self.replica = Replica(self.plan)
        self.running: list[Running] = []
        self.pins: list[Pin] = []
        self.texts: list[list[int]] = [[]]
        self.counts: dict[str, int] = {}

    def run(self, steps: int) -> None:
        kinds = {
            self.open: 5, self.step: 12, self.commit: 8, self.accept: 2, self.fork: 2, self.reorder: 1,
            self.truncate: 2, self.close: 3, self.load: 1, self.rematch: 1, self.pin: 1, self.unpin: 1,
            self.publish: 1, self.shrink: 1, self.branch: 2, self.alone: 1,
        }  # fmt: skip
        for _ in range(steps):
            kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
            kind()
            self.count(kind.__name__)
            check_books(self.cache, self.pins)
        self.end()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def pick(self) -> Running | None:
        return self.rng.choice(self.running) if self.running else None

    def prompt(self) -> list[int]:
        """The start of something that was there before, and a few tokens of its own."""
        old = self.rng.choice(self.texts)
        text = old[: self.rng.randint(0, min(120, len(old)))] + [
            self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 24))
        ]
        self.texts = [*self.texts[-20:], text]
        return text

    # ---- opening

    def open(self) -> None:
        if len(self.running) > 8:
            return self.close()
        prompt, namespace, back = self.prompt(), self.rng.choice("aab"), self.rng.choice((0, 0, 0, 1))
        found = self.cache.lookup(prompt, namespace=namespace, drop_last_blocks=back)
        expected = longest_hit(self.cache, namespace, prompt, back)
        self.replica.apply(self.events)
        self.events.clear()
        if not back:
            assert self.replica.hit(prompt, namespace) == expected, "the replica would have hit something else"
        sequence = self.cache.open(prompt, namespace=namespace, priority=self.rng.randint(0, 2), drop_last_blocks=back)
        assert sequence.num_cached == found == expected, (
            f"{sequence.num_cached} cached, {found} found, {expected} there"
        )
        self.running.append(Running(sequence, prompt))
        return None

    def rematch(self) -> None:
        one = self.pick()
        if one is None or one.sequence.length != one.sequence.num_cached or one.steps:
            return
        before = one.sequence.num_cached
        assert self.cache.rematch(one.sequence) >= before

    def branch(self) -> None:
        """Another prompt is known to come."""
        if one := self.pick():
            self.cache.add_branch(one.sequence, self.rng.randint(0, len(one.tokens)))

    def load(self) -> None:
        """What a store has is loaded, or could not be had after all."""
        sequence = self.cache.open(self.prompt(), namespace="a")
        one = Running(sequence, sequence.tokens.tolist())
        self.running.append(one)
        position = sequence.num_cached + self.rng.randint(1, 12) * self.cache.grid
        if position >= sequence.num_prompt:
            return
        before = self.everything()
        try:
            self.cache.load_to(sequence, position)
        except (OutOfPages, NeverFits):
            assert self.everything() == before, "a refused load changed something"
            return
        if self.rng.random() < 0.2:
            self.running.remove(one)
            self.cache.close(sequence, keep=False)
            return
        self.engine.load(sequence)
        self.engine.carry_out(self.cache.commit(sequence))

    # ---- steps

    def step(self) -> None:
        """One step of some sequences: chunks of prompts and generated tokens, drafts perhaps."""
        chosen = self.rng.sample(self.running, self.rng.randint(0, len(self.running)))
        chosen = [one for one in chosen if not (one.drafts and self.cache.state.states) and len(one.steps) < 3]
        if not chosen:
            return
        left = [one.sequence.num_prompt - one.sequence.length for one in chosen]
        counts, drafts = [self.rng.randint(1, min(n, 20)) if n > 0 else 1 for n in left], 0
        checkpoints, lookahead = self.rng.random() < 0.5, self.rng.choice((0, 0, 3))
        if not checkpoints and self.rng.random() < 0.7:
            stops = [(one.sequence.stop or 1 << 30) - one.sequence.length for one in chosen]
            counts = [min(n, stop) for n, stop in zip(counts, stops, strict=True)]
        if max(left) <= 0 and self.rng.random() < 0.3:
            drafts = self.rng.randint(1, 4)
            counts = [1 + drafts] * len(chosen)
        self._extend(chosen, counts, drafts, lookahead, checkpoints)

    def _extend(self, chosen: list[Running], counts: list[int], drafts: int, lookahead: int, checkpoints: bool) -> None:
        starts = [one.sequence.length for one in chosen]
        for one, start, n in zip(chosen, starts, counts, strict=True):
            one.tokens += [self.rng.randint(0, 2) for _ in range(start + n - len(one.tokens))]
        tells = drafts > 0 or self.rng.random() < 0.5
        known = self.cache.state.counters.known
        tells = tells and all(known[one.sequence.row] >= s for one, s in zip(chosen, starts, strict=True))
        ids = [t for one, s, n in zip(chosen, starts, counts, strict=True) for t in one.tokens[s : s + n]]
        before, sequences = self.everything(), [one.sequence for one in chosen]
        single = len(sequences) == 1 and self.rng.random() < 0.5
        try:
            copies = self.cache.extend(
                sequences[0] if single else Batch(sequences),
                counts[0] if single else counts,
                tokens=ids if tells else None,
                lookahead=lookahead,
                drafts=drafts,
                checkpoints=checkpoints,
            )
        except (OutOfPages, NeverFits) as error:
            assert self.everything() == before, "a refused extend changed something"
            self.check_refusal(error, chosen, counts, lookahead, drafts)
            for one, start in zip(chosen, starts, strict=True):
                one.tokens = one.tokens[: max(start, one.sequence.num_prompt)]
            self.count("refused")
            return
        self.engine.carry_out(copies)
        for one, start in zip(chosen, starts, strict=True):
            one.drafts = drafts
            one.steps.append(self.engine.launch(one.sequence, start, one.tokens))

    def check_refusal(
        self, error: CacheError, chosen: list[Running], counts: list[int], lookahead: int, drafts: int
    ) -> None:
        wanted: dict[str, int] = {}
        state = self.cache.state
        for one, n in zip(chosen, counts, strict=True):
            for group in state.groups:
                have = int(state.tables[group.number].blocks[one.sequence.row])
                need = -(-(one.sequence.length + n + lookahead) // group.slot_tokens)
                if group.is_state:  # those of a hit that nobody else needs are there to be taken
                    need = 1 + drafts - int(self.is_the_only_one_at(one.sequence.restore))
                wanted[group.tag] = wanted.get(group.tag, 0) + max(0, need - have)
        assert not could_have(self.cache, wanted, self.pins), f"refused though {wanted} could be had: {error}"
        if isinstance(error, OutOfPages):
            assert error.sequences
            assert set(map(id, error.sequences)) <= {id(one.sequence) for one in chosen}
            assert not set(map(id, error.preemptible)) & {id(one.sequence) for one in chosen}

    def is_the_only_one_at(self, point: Point | None) -> bool:
        others = [one.sequence.restore for one in self.running] + [pin.point for pin in self.pins]
        return point is not None and sum(other is point for other in others) == 1

    def commit(self) -> None:
        """The device has run up to some step; what it wrote is committed, for one sequence or several."""
        chosen = [one for one in self.running if one.steps]
        chosen = self.rng.sample(chosen, self.rng.randint(0, len(chosen)))
        if not chosen:
            return
        lengths = []
        for one in chosen:
            done = self.rng.randint(1, len(one.steps))
            last = one.steps[done - 1]
            if last in self.engine.queue:
                self.engine.run(last)
            lengths.append(
                last.end if not one.drafts else self.rng.randint(max(last.start + 1, one.sequence.committed), last.end)
            )
            one.steps = one.steps[done:]
            known = int(self.cache.state.counters.known[one.sequence.row])
            if known < lengths[-1] and self.rng.random() < 0.9:
                ids, committed = one.tokens[known : lengths[-1]], one.sequence.committed
                self.engine.carry_out(self.cache.commit(one.sequence, committed, tokens=ids))
        whole = all(n == one.sequence.length for n, one in zip(lengths, chosen, strict=True))
        self.engine.carry_out(self.cache.commit(Batch([one.sequence for one in chosen]), None if whole else lengths))
        for one, length in zip(chosen, lengths, strict=True):
            if length == one.sequence.length:
                one.drafts = 0
        if not self.engine.queue:
            for one in chosen:
                self.engine.check_committed(one.sequence, one.tokens)

    def accept(self) -> None:
        """Drafts, or whatever is not committed, are rejected; steps in flight beyond are void."""
        chosen = [one for one in self.running if one.drafts or (one.steps and not self.cache.state.states)]
        chosen = self.rng.sample(chosen, self.rng.randint(0, len(chosen)))
        if not chosen:
            return
        lengths = []
        for one in chosen:
            low = one.sequence.committed
            if self.cache.state.states:
                low = max(low, one.sequence.length - one.drafts)
            lengths.append(self.rng.randint(low, one.sequence.length))
        self.cache.accept([one.sequence for one in chosen], lengths)
        for one, length in zip(chosen, lengths, strict=True):
            self._cut(one, length, max(length, one.sequence.num_prompt))

    def _cut(self, one: Running, length: int, known: int) -> None:
        kept = []
        for step in one.steps:
            if step.end <= length:
                kept.append(step)
            elif step.start < length and step in self.engine.queue:
                self.engine.run(step)  # a step with drafts has run when they are rejected
                step.end = length
                kept.append(step)
            elif step.start < length:
                step.end = length
                kept.append(step)
            else:
                self._void(step)
        one.steps, one.drafts = kept, 0
        one.tokens = one.tokens[:known]

    def _void(self, step: Step) -> None:
        step.is_void = True
        step.tokens = []

    # ---- forks, cuts, ends

    def fork(self) -> None:
        one = self.pick()
        if one is None or len(self.running) > 8:
            return
        before = self.everything()
        try:
            made, copies = self.cache.fork(one.sequence, self.rng.randint(1, 2))
        except NotSettled:
            known, committed = int(self.cache.state.counters.known[one.sequence.row]), one.sequence.committed
            assert committed < one.sequence.length or one.drafts or known < committed, "a fork was refused without need"
            assert self.everything() == before
            return
        except OutOfPages:
            assert self.everything() == before, "a refused fork changed something"
            return
        self.engine.carry_out(copies)
        self.running += [Running(child, list(one.tokens)) for child in made]

    def reorder(self) -> None:
        chosen = [one for one in self.running if not one.steps and not one.drafts][:4]
        if len(chosen) < 2:
            return
        parents = [self.rng.randrange(len(chosen)) for _ in chosen]
        before = self.everything()
        try:
            self.engine.carry_out(self.cache.reorder([one.sequence for one in chosen], parents))
        except (OutOfPages, NotSettled):
            assert self.everything() == before, "a refused reorder changed something"
            return
        tokens = [list(chosen[parent].tokens) for parent in parents]
        for one, own in zip(chosen, tokens, strict=True):
            one.tokens = own

    def truncate(self) -> None:
        one = self.pick()
        if one is None:
            return
        length, before = max(1, one.sequence.length - self.rng.randint(0, 12)), self.everything()
        try:
            copies = self.cache.truncate(one.sequence, length)
        except (CannotTruncate, OutOfPages):
            assert self.everything() == before, "a refused truncation changed something"
            return
        self._cut(one, length, length)
        self.engine.carry_out(copies)

    def close(self) -> None:
        one = self.pick()
        if one is not None:
            self.running.remove(one)
            for step in one.steps:
                if step in self.engine.queue:
                    self._void(step)
            self.texts.append(one.tokens)
            self.cache.close(one.sequence, keep=self.rng.random() < 0.8)

    def shrink(self) -> None:
        """Close most of them, so that lives do not only run in shortage."""
        while len(self.running) > 2:
            self.close()

    def alone(self) -> None:
        """When all others are closed, a prompt that was promised is computed to its end, or a refusal was necessary."""
        self._close_all()
        self.open()
        one, step_tokens = self.running[0], self.rng.choice((1, 4, 20))
        try:
            self.cache.check_fits(one.sequence.num_prompt, step_tokens)
        except NeverFits:
            return None
        end, checkpoints = one.sequence.num_prompt, self.rng.random() < 0.5
        while (start := one.sequence.length) < end:
            self._extend([one], [min(step_tokens, end - start)], 0, 0, checkpoints)
            if one.sequence.length == start:
                return self.count("refused alone")
            while one.steps:
                self.commit()
        return self.count("computed alone")

    def _close_all(self) -> None:
        while self.running:
            self.close()
        while self.pins:
            self.unpin()

    def pin(self) -> None:
        if len(self.pins) < 2 and (pin := self.cache.pin(self.prompt(), namespace="a")) is not None:
            self.pins.append(pin)

    def unpin(self) -> None:
        if self.pins:
            self.cache.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def publish(self) -> None:
        self.cache.publish()

    def end(self) -> None:
        self.engine.run()
        self._close_all()
        check_books(self.cache)
        self.cache.reset()
        stats = self.cache.stats()
        assert all(group.held == group.cached == group.evictable == 0 for group in stats.groups), "pages are not back"
        assert not self.cache.state.prefix.tree.roots, "an empty namespace is still there"

    def everything(self) -> Any:
        """All that a refused call must leave as it was."""
        state = self.cache.state
        return (
            [table.pages.tobytes() for table in state.tables],
            self.cache.stats(),
            {row: (s.length, s.committed, s.num_tokens) for row, s in state.by_row.items()},
        )
