"""The cache against a simulated engine and a brute-force model, through random lives of sequences on random plans."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvweave.cache import Cache, Sequence
from kvweave.errors import CannotTruncate, NeverFits, OutOfPages, PlanError
from kvweave.plan import Plan, plan
from kvweave.pool import NULL
from kvweave.prefix import POLICIES, Event, Node, Replica, Retention
from kvweave.spec import Chunk, DType, Full, Layer, LayerCache, ModelSpec, Reach, Role, SinkWindow, State, Window
from kvweave.table import GroupTable
from tests.cache.engine import Engine, check_books, signatures

reaches: st.SearchStrategy[Reach] = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 30)),
    st.builds(Chunk, st.sampled_from((4, 6, 8))),
    st.builds(SinkWindow, st.integers(1, 9), st.integers(1, 16)),
    st.just(State()),
)
retentions = st.sampled_from(
    (
        Retention(),
        Retention(every=8),
        Retention(every=1, decode_every=1),
        Retention(False, False, 0),
        Retention(every=0),
    )
)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to five groups of any kinds, block sizes and pools, large enough for a few sequences."""
    kinds = draw(st.lists(reaches, min_size=1, max_size=5))
    widths = [draw(st.integers(1, 4)) * 4 for _ in kinds]
    caches = [
        LayerCache(f"g{i}", k, (Role("key", (w,), DType.FLOAT32),))
        for i, (k, w) in enumerate(zip(kinds, widths, strict=True))
    ]
    blocks = {cache.tag: draw(st.sampled_from((1, 2, 4, 8))) for cache in caches}
    kernels = {tag: draw(st.sampled_from((1, size))) for tag, size in blocks.items()}
    pools = draw(st.sampled_from(("auto", "independent")))
    spec = ModelSpec("random", tuple(Layer((cache,)) for cache in caches))
    memory = draw(st.sampled_from((20_000, 60_000, 200_000)))
    try:
        made = plan(spec, memory, block_tokens=blocks, kernel_tokens=kernels, pools=pools)
    except PlanError:
        made = plan(spec, 2_000_000, block_tokens=blocks, kernel_tokens=kernels, pools=pools)
    return made if all(pool.num_supers > 3 for pool in made.pools) else plan(spec, 2_000_000, block_tokens=blocks)


class Lives(RuleBasedStateMachine):
    """Sequences open, compute, fork, step back and close; after every step the books balance and every row is right."""

    @initialize(made=plans(), retention=retentions, policy=st.sampled_from(sorted(POLICIES)))
    def start(self, made: Plan, retention: Retention, policy: str) -> None:
        self.events: list[Event] = []
        self.cache = Cache(made, retention=retention, policy=policy, rows=2, on_event=self.events.append)
        self.engine = Engine(self.cache)
        self.replica = Replica(made)
        self.open: list[Sequence] = []

    def pick(self, index: int) -> Sequence:
        return self.open[index % len(self.open)]

    @rule(prompt=tokens, namespace=st.sampled_from("ab"), priority=st.integers(0, 2))
    def open_one(self, prompt: list[int], namespace: str, priority: int) -> None:
        self.cache.publish()
        expected = longest_hit(self.cache, namespace, prompt)
        self.replica.apply(self.events)
        self.events.clear()
        assert self.replica.hit(prompt, namespace) == expected, "the replica would have hit something else"
        sequence = self.cache.open(prompt, namespace=namespace, priority=priority)
        self.open.append(sequence)
        assert sequence.num_cached == expected

    @rule(prompt=tokens, namespace=st.sampled_from("ab"), blocks=st.integers(1, 12), whole=st.booleans())
    def arrive(self, prompt: list[int], namespace: str, blocks: int, whole: bool) -> None:
        """What a store has is loaded, or was not to be had after all."""
        sequence = self.cache.open(prompt, namespace=namespace)
        self.open.append(sequence)
        position = sequence.num_cached + blocks * self.cache.grid
        if position >= len(prompt):
            return
        before = tables_of(self.cache)
        try:
            self.cache.arrive(sequence, position)
        except (OutOfPages, NeverFits):
            assert tables_of(self.cache) == before, "a refused arrival changed a table"
            assert sequence.length == sequence.num_cached
            return
        if not whole:
            self.cache.close(self.open.pop(), keep=False)
            return
        self.engine.load(sequence)
        self.engine.carry_out(self.cache.commit(sequence))
        again = self.cache.open(prompt, namespace=namespace)
        assert again.num_cached >= (position if not self.cache.books.states else 0)
        self.cache.close(again)

    @precondition(lambda self: self.open)
    @rule(
        index=st.integers(0, 9), n=st.integers(1, 16), ahead=st.integers(0, 3), stop=st.booleans(), on_way=st.booleans()
    )
    def compute(self, index: int, n: int, ahead: int, stop: bool, on_way: bool) -> None:
        sequence = self.pick(index)
        start = sequence.length
        left = sequence.num_prompt - start
        n = min(n, left) if left > 0 else n
        if stop and sequence.stop is not None:
            n = min(n, sequence.stop - start)
        ids = None if left > 0 else np.arange(n) % 3
        before = tables_of(self.cache)
        try:
            copies = self.cache.extend(sequence, n, tokens=ids, lookahead=ahead, checkpoints=on_way)
        except (OutOfPages, NeverFits):
            assert tables_of(self.cache) == before, "a refused extend changed a table"
            assert sequence.length == start
            self.cache.close(self.open.pop(index % len(self.open)))
            return
        self.engine.carry_out(copies)
        self.engine.step(sequence, start)
        self.engine.carry_out(self.cache.commit(sequence))

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), drafts=st.integers(1, 4), rejected=st.integers(0, 4))
    def speculate(self, index: int, drafts: int, rejected: int) -> None:
        sequence = self.pick(index)
        start = sequence.length
        if start < sequence.num_prompt:
            return
        try:
            copies = self.cache.extend(sequence, 1 + drafts, tokens=np.arange(1 + drafts) % 3, drafts=drafts)
        except (OutOfPages, NeverFits):
            return
        self.engine.carry_out(copies)
        self.engine.step(sequence, start)
        with contextlib.suppress(OutOfPages):
            self.engine.carry_out(self.cache.truncate(sequence, start + 1 + drafts - min(rejected, drafts)))
        self.engine.carry_out(self.cache.commit(sequence))

    @precondition(lambda self: self.open and len(self.open) < 8)
    @rule(index=st.integers(0, 9), n=st.integers(1, 2))
    def fork(self, index: int, n: int) -> None:
        try:
            made, copies = self.cache.fork(self.pick(index), n)
        except (OutOfPages, NeverFits):
            return
        self.engine.carry_out(copies)
        self.open += made

    @precondition(lambda self: len(self.open) > 1)
    @rule(parents=st.lists(st.integers(0, 3), min_size=2, max_size=4))
    def reorder(self, parents: list[int]) -> None:
        chosen = self.open[: len(parents)]
        try:
            copies = self.cache.reorder(chosen, [parent % len(chosen) for parent in parents[: len(chosen)]])
        except (OutOfPages, NeverFits):
            return
        self.engine.carry_out(copies)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), back=st.integers(1, 12))
    def truncate(self, index: int, back: int) -> None:
        sequence = self.pick(index)
        before = sequence.length
        try:
            copies = self.cache.truncate(sequence, max(1, before - back))
        except (CannotTruncate, OutOfPages):
            assert sequence.length == before
            return
        self.engine.carry_out(copies)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), keep=st.booleans())
    def close(self, index: int, keep: bool) -> None:
        self.cache.close(self.open.pop(index % len(self.open)), keep=keep)

    @rule(prompt=tokens, namespace=st.sampled_from("ab"))
    def pin_and_unpin(self, prompt: list[int], namespace: str) -> None:
        node = self.cache.pin(prompt, namespace=namespace)
        if node is not None:
            self.cache.unpin(node)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            check_books(self.cache)

    @invariant()
    def every_row_is_right(self) -> None:
        for sequence in getattr(self, "open", ()):
            signs = signatures(sequence.namespace, sequence.tokens[: sequence.length])
            for number, table in enumerate(self.cache.books.tables):
                if table.per_token:
                    self.engine.check_rows(sequence, number, int(self.cache.books.committed[sequence.row]), signs)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.open:
            self.cache.close(sequence)
        self.cache.reset()
        check_books(self.cache)
        stats = self.cache.stats()
        assert all(group.held == group.cached == 0 for group in stats.groups), "pages are not all back at the end"


def longest_hit(cache: Cache, namespace: Hashable, prompt: list[int]) -> int:
    """By brute force: walk the tokens one by one, note the blocks on the way, try every position from the end."""
    there: list[set[int]] = [set() for _ in cache.books.tables]
    root = cache.books.prefix.tree.roots.get(namespace)
    position = _walk(root, prompt, cache, there) if root is not None else 0
    for p in range(min(position, len(prompt) - 1), 0, -1):
        if p % cache.grid == 0 and all(can_go_on(t, there[n], p) for n, t in enumerate(cache.books.tables)):
            return p
    return 0


def _walk(node: Node, prompt: list[int], cache: Cache, there: list[set[int]]) -> int:
    """How far the prompt runs below `node`, by the child that shares most of it."""
    best = node.end
    for child in node.children.values():
        same = 0
        run = child.tokens.tolist()
        while same < len(run) and child.start + same < len(prompt) and run[same] == prompt[child.start + same]:
            same += 1
        if same < cache.grid:
            continue
        for number, table in enumerate(cache.books.tables):
            if table.per_token:
                pages = child.pages[number].tolist()
                there[number] |= {child.start // table.slot_tokens + i for i, page in enumerate(pages) if page != NULL}
            else:
                there[number] |= {at // table.slot_tokens - 1 for at in child.snapshots}
        best = _walk(child, prompt, cache, there) if same == len(run) else child.start + same
    return best


def can_go_on(table: GroupTable, there: set[int], position: int) -> bool:
    """Whether every token that the next one would read is in a block that is there."""
    reach, size = table.reach, table.slot_tokens
    if not reach.per_token:
        return position // size - 1 in there
    needed = [*range(min(reach.head, position)), *range(int(reach.tail(position)), position)]
    return all(token // size in there for token in needed)


def tables_of(cache: Cache) -> list[bytes]:
    return [table.pages.tobytes() for table in cache.books.tables]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
