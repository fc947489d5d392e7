"""A simulated device and the oracles of the core's tests.

The device carries out copies and steps in the order in which they were launched, which may be long after they were
prepared, with the tables as they were then. It writes a signature into every row it fills, and checks every row it may
read: the signature is the hash of the namespace and of all tokens up to the row's own, so a page that belongs to
another prompt, was never written, or was overwritten is caught the moment a sequence reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from kvweave.cache import Cache, Copy, Sequence
from kvweave.pool import NULL, GroupPages, PagedGroup, PagePool
from kvweave.pool.holders import TREE
from kvweave.prefix import Kind, Node, Point

GARBAGE = -1


class Step:
    """One sequence's part of a step, with its tables as they were when it was prepared."""

    def __init__(self, cache: Cache, sequence: Sequence, start: int, tokens: list[int]) -> None:
        self.namespace, self.start, self.end = sequence.namespace, start, sequence.length
        self.tokens = tokens
        """All tokens up to `end`; the list is the caller's, who may learn of the last ones later."""
        self.is_void = False
        """Closed or cut meanwhile: it writes garbage where it was to write, and reads nothing."""
        state = cache.state
        self.pages = [table.pages[sequence.row, : int(table.blocks[sequence.row])].copy() for table in state.tables]
        self.checkpoints = list(sequence.checkpoints)


class Engine:
    """Memory for every group of a cache's plan, one number a row, and a queue of work."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.groups = cache.state.groups
        self.memory: list[np.ndarray] = []
        for group, planned in zip(self.groups, cache.plan.groups, strict=True):
            pages = cache.plan.num_pages(group.tag) + planned.pages_per_superpage + 1
            self.memory.append(np.zeros((pages, 1 if group.is_state else group.slot_tokens), np.int64))
        self.by_tag = {group.tag: group for group in self.groups}
        self.queue: list[Step | Copy] = []

    # ---- launching

    def carry_out(self, copies: Iterable[Copy]) -> None:
        self.queue += copies

    def launch(self, sequence: Sequence, start: int, tokens: list[int]) -> Step:
        step = Step(self.cache, sequence, start, tokens)
        self.queue.append(step)
        return step

    def step(self, sequence: Sequence, start: int) -> None:
        """Launch and run the tokens [start, length) of a sequence that knows them all."""
        self.launch(sequence, start, sequence.tokens[: sequence.length].tolist())
        self.run()

    def run(self, until: Step | None = None) -> None:
        """Carry out what was launched, up to and including a step."""
        while self.queue:
            work = self.queue.pop(0)
            if isinstance(work, Step):
                self._compute(work)
            else:
                self._copy(work)
            if work is until:
                return

    def load(self, sequence: Sequence) -> None:
        """Fill the pages that the cache did not have, whole, as from a store."""
        self.run()
        length, state = sequence.length, self.cache.state
        signs = signatures(sequence.namespace, sequence.tokens[:length].tolist())
        for group in self.groups:
            pages = state.tables[group.number].pages[sequence.row]
            if group.is_state:
                self.memory[group.number][pages[0], 0] = signs[length - 1]
                continue
            for token in range(sequence.num_cached, length):
                page = int(pages[token // group.slot_tokens])
                if page != NULL:
                    self.memory[group.number][page, token % group.slot_tokens] = signs[token]

    # ---- carrying out

    def _copy(self, copy: Copy) -> None:
        tag, src, dst = copy
        memory = self.memory[self.by_tag[tag].number]
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            assert a != NULL, f"a copy out of the NULL page of {tag}"
            assert b != NULL, f"a copy into the NULL page of {tag}"
            memory[b] = memory[a]

    def _compute(self, step: Step) -> None:
        signs = [GARBAGE] * step.end if step.is_void else signatures(step.namespace, step.tokens[: step.end])
        assert len(signs) >= step.end, "a step is run before its tokens are known"
        for group in self.groups:
            if group.has_pages:
                (self._compute_state if group.is_state else self._compute_rows)(step, group, signs)

    def _compute_rows(self, step: Step, group: PagedGroup, signs: list[int]) -> None:
        memory, pages = self.memory[group.number], step.pages[group.number]
        if not step.is_void:
            for token in needed_tokens(group, step.start):
                page = int(pages[token // group.slot_tokens])
                assert page != NULL, f"token {token} of {group.tag} is needed at {step.start}, but gone"
                found = memory[page, token % group.slot_tokens]
                assert found == signs[token], f"token {token} of {group.tag}, page {page}, is somebody else's row"
        for token in range(step.start, step.end):
            page = int(pages[token // group.slot_tokens])
            assert page != NULL, f"no page for token {token} of {group.tag}"
            memory[page, token % group.slot_tokens] = signs[token]

    def _compute_state(self, step: Step, group: PagedGroup, signs: list[int]) -> None:
        memory, pages = self.memory[group.number], step.pages[group.number]
        assert pages[0] != NULL, "no live state"
        if step.start and not step.is_void:
            found = memory[pages[0], 0]
            assert found == signs[step.start - 1], f"the state of {group.tag} is not the one after {step.start} tokens"
        for tag, position, page in step.checkpoints:
            assert step.start < position <= step.end, f"a checkpoint at {position} of a step {step.start} to {step.end}"
            if tag == group.tag:
                memory[page, 0] = signs[position - 1]
        for back in range(len(pages)):
            memory[pages[len(pages) - 1 - back], 0] = signs[step.end - 1 - back]

    def check_committed(self, sequence: Sequence, tokens: list[int]) -> None:
        """All that is needed to go on from what is committed is there; nothing is queued."""
        signs = signatures(sequence.namespace, tokens[: sequence.committed])
        for group in self.groups:
            if group.is_state or not group.has_pages:
                continue
            pages = self.cache.state.tables[group.number].pages[sequence.row]
            for token in needed_tokens(group, sequence.committed):
                page = int(pages[token // group.slot_tokens])
                assert page != NULL, f"token {token} of {group.tag} is gone at {sequence.committed}"
                found = self.memory[group.number][page, token % group.slot_tokens]
                assert found == signs[token], f"token {token} of {group.tag} holds somebody else's row"


def needed_tokens(group: PagedGroup, position: int) -> list[int]:
    """By the definition of a reach: the tokens that the token at `position` reads, itself apart."""
    head, tail = group.reach.head, int(group.reach.tail(position))
    return [token for token in range(position) if token < head or token >= tail]


def signatures(namespace: Hashable, tokens: list[int]) -> list[int]:
    """For each token, a number that stands for it and all before it."""
    sign, signs = hash(namespace), []
    for token in tokens:
        sign = hash((sign, token))
        signs.append(sign)
    return signs


# ---- oracles


def node_pages(cache: Cache, node: Node, group: PagedGroup) -> list[int]:
    """The pages of a group that a node of the tree keeps."""
    if group.is_state:
        nth = cache.state.states.index(group)
        return [point.states[nth] for point in node.points if point.states]
    pages: list[int] = node.pages[group.number][node.pages[group.number] != NULL].tolist()
    return pages


def needed_pages(cache: Cache, group: PagedGroup, pins: Iterable[Any] = ()) -> set[int]:
    """The pages that running sequences and pins cannot do without, by what is in the tables."""
    state, needed = cache.state, set[int]()
    table = state.tables[group.number]
    for row, sequence in state.by_row.items():
        blocks = int(table.blocks[row])
        if group.is_state:
            nth = state.states.index(group)
            in_flight = {at for at in sequence.snapshots if at > sequence.committed and at != sequence.copy_at}
            needed |= {*table.pages[row, :blocks].tolist(), *(sequence.snapshots[at][nth] for at in in_flight)}
            if sequence.restore is not None:
                needed.add(sequence.restore.states[nth])
            continue
        tokens = needed_tokens(group, int(state.counters.committed[row]))
        slots = {token // group.slot_tokens for token in tokens}
        slots |= set(range(int(state.counters.committed[row]) // group.slot_tokens, blocks))
        needed |= {int(table.pages[row, slot]) for slot in slots}
    for pin in pins:
        if group.is_state:
            needed.add(pin.point.states[state.states.index(group)])
            continue
        pages = [page for node in pin.point.node.path() for page in node.pages[group.number].tolist()]
        needed |= {pages[token // group.slot_tokens] for token in needed_tokens(group, pin.length)}
    return needed - {NULL}


def could_have(cache: Cache, wanted: dict[str, int], pins: Iterable[Any] = ()) -> bool:
    """Brute force: whether so many pages of each group would be there if nothing unneeded were kept."""
    for pool in cache.state.pools:
        free, lack = pool.num_superpages, 0
        for group, size in ((pages.group, pages.per_superpage) for pages in pool.groups):
            needed = needed_pages(cache, group, pins)
            taken = {page // size for page in needed}
            free -= len(taken)
            usable = len(taken) * size - len(needed)
            lack += max(0, -(-(wanted.get(group.tag, 0) - usable) // size))
        if lack > free:
            return False
    return True


def check_books(cache: Cache, pins: Iterable[Any] = ()) -> None:
    """Every page is free or held by as many as are counted, the counts of what is cached and evictable are true, and
    tables and kernel tables agree."""
    pins = list(pins)
    for pool in cache.state.pools:
        for pages in pool.groups:
            _check_group(cache, pages, pool, pins)
        taken = [(pages.num_allocated + pages.free_pages.size) // pages.per_superpage for pages in pool.groups]
        assert pool.free_superpages.size + sum(taken) == pool.num_superpages
    counters = cache.state.counters
    for row, sequence in cache.state.by_row.items():
        assert counters.published[row] == sequence.node.end
        assert bool(counters.last_snapshot[row]) == bool(sequence.snapshots)
    nodes = list(cache.state.prefix.tree.nodes())
    assert len(nodes) == cache.state.prefix.tree.num_nodes
    for node in nodes:
        assert node.parent is not None
        assert node.parent.children[node.tokens[: cache.grid].tobytes()] is node
        assert node.start == node.parent.end
        assert [p.position for p in node.points] == sorted({p.position for p in node.points})
        assert all(p.node is node and node.start < p.position <= node.end for p in node.points)
        if not node.children and not node.pins:
            assert node.points, "a leaf that nobody holds ends at a point"
            assert node.points[-1].position == node.end
        for point in node.points:
            waits = point.queue is not None or point.held >= 0
            assert waits or not can_go(cache, point), f"the point at {point.position} is lost"
            assert not (waits and point.pins), f"the point at {point.position} is pinned, and waits"


def can_go(cache: Cache, point: Point) -> bool:
    """Whether a point must wait for its eviction, in a queue or held by tables that name its pages."""
    node = point.node
    is_end = not node.children and not node.pins and node.points[-1] is point
    stands = point.kind != Kind.SPACED or node.first_spaced() is point
    return not point.pins and (is_end or (stands and bool(cache.state.windows or cache.state.states)))


def check_points(cache: Cache, group: PagedGroup) -> None:
    """The tree keeps exactly the window pages that its points need."""
    needed: dict[int, set[int]] = {}
    for node in cache.state.prefix.tree.nodes():
        for point in node.points:
            slots = {token // group.slot_tokens for token in needed_tokens(group, point.position)}
            for above in node.path():
                needed.setdefault(above.id, set()).update(slots)
    for node in cache.state.prefix.tree.nodes():
        start = node.start // group.slot_tokens
        kept = {start + i for i, page in enumerate(node.pages[group.number].tolist()) if page != NULL}
        inside = {slot for slot in needed.get(node.id, ()) if start <= slot < node.end // group.slot_tokens}
        assert kept == inside, f"{group.tag}: blocks {kept} are kept in {node.start} to {node.end}, {inside} are needed"


def points_by_page(cache: Cache, group: PagedGroup) -> Counter[int]:
    """How many points are counted as holders of each page of a window: of those that need it, the ones that keep it."""
    counts: Counter[int] = Counter()
    for node in cache.state.prefix.tree.nodes():
        path = [page for above in node.path() for page in above.pages[group.number].tolist()]
        for point in node.points:
            slots = {t // group.slot_tokens for t in needed_tokens(group, point.position) if t >= point.kept_from}
            counts.update(path[slot] for slot in slots)
    return counts


def _check_group(cache: Cache, pages: GroupPages, pool: PagePool, pins: list[Any]) -> None:
    state, group = cache.state, pages.group
    table, tag = state.tables[group.number], group.tag
    cached = Counter(page for node in state.prefix.tree.nodes() for page in node_pages(cache, node, group))
    assert all(count == 1 for count in cached.values()), f"{tag}: a page is in the tree twice"
    assert len(cached) == pages.num_cached, f"{tag}: {len(cached)} pages are cached"
    held: Counter[int] = Counter()
    snapshots: set[int] = set()
    for row, sequence in state.by_row.items():
        held.update(page for page in table.held(row, sequence.node.end).tolist() if page)
        held.update(page for _, run in sequence.retained.get(group.number, ()) for page in run.tolist())
        if group.is_state:
            nth = state.states.index(group)
            snapshots |= {taken[nth] for taken in sequence.snapshots.values()}
    held.update(snapshots)
    if group.is_state:
        assert set(pages.snapshots_but(np.empty(0, np.int32)).tolist()) == snapshots, f"{tag}: counts of snapshots"
    if group.is_window:
        for pin in pins:
            needed = {token // group.slot_tokens for token in needed_tokens(group, pin.length)}
            path = [page for node in pin.point.node.path() for page in node.pages[group.number].tolist()]
            held.update(path[slot] for slot in needed)
    if group.is_window:
        check_points(cache, group)
        cached = points_by_page(cache, group)
    free = (pool.free_superpages if pages.is_whole else pages.free_pages).all
    times = np.bincount(free, minlength=(pool.num_superpages + 1) * pages.per_superpage)
    assert times.max() <= 1, f"{tag}: a page is free twice"
    assert not times[[*held, *cached]].any(), f"{tag}: a free page is held"
    assert not times[NULL]
    assert NULL not in held
    assert not (group.is_window and pages.holders[NULL])
    for page in set(held) | set(cached):
        holders = held[page] + cached[page]
        if group.is_window:
            assert divmod(int(pages.holders[page]), TREE) == (cached[page], held[page]), f"{tag}: page {page}"
        else:
            assert holders == 1, f"{tag}: page {page} has {holders} holders"
    assert len(set(held) | set(cached)) == pages.num_allocated, f"{tag}: pages are lost"
    unneeded = set(cached) - set(held) - needed_pages(cache, group, pins)
    if group.is_full:
        unneeded = {p for n in state.prefix.tree.nodes() if not n.pins for p in node_pages(cache, n, group)}
        stand = [s.node for s in state.by_row.values()] + [pin.point.node for pin in pins]
        locked = {node.id for at in stand for node in at.path()}
        assert unneeded == {
            p for n in state.prefix.tree.nodes() if n.id not in locked for p in node_pages(cache, n, group)
        }
    assert pages.num_evictable == len(unneeded), f"{tag}: {pages.num_evictable} evictable, {len(unneeded)} are"
    if not pages.is_whole:
        counts = Counter(page // pages.per_superpage for page in unneeded)
        assert {i: n for i, n in enumerate(pages.evictable_in.tolist()) if n} == dict(counts)
    if table.kernel_blocks > 1:
        expected = np.stack([table.kernel_ids(table.pages[row]).ravel() for row in range(len(table.pages))])
        assert (expected == table.kernels).all()


def longest_hit(cache: Cache, namespace: Hashable, prompt: list[int], drop_last_blocks: int = 0) -> int:
    """By brute force: walk the tokens one by one, note the blocks on the way, try every position from the end."""
    there: list[set[int]] = [set() for _ in cache.state.groups]
    root = cache.state.prefix.tree.roots.get(namespace)
    position = _walk(root, prompt, cache, there) if root is not None else 0
    last = min(position, len(prompt) - 1) // cache.grid * cache.grid - drop_last_blocks * cache.grid
    for p in range(last, 0, -1):
        if p % cache.grid == 0 and all(can_go_on(g, there[g.number], p) for g in cache.state.groups):
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
        for group in cache.state.groups:
            if group.is_state:
                there[group.number] |= {point.position for point in child.points if point.states}
            else:
                start = child.start // group.slot_tokens
                pages = enumerate(child.pages[group.number].tolist())
                there[group.number] |= {start + i for i, page in pages if page != NULL or not group.has_pages}
        best = _walk(child, prompt, cache, there) if same == len(run) else child.start + same
    return best


def can_go_on(group: PagedGroup, there: set[int], position: int) -> bool:
    """Whether every token that the next one would read is in a block that is there."""
    if group.is_state:
        return position in there
    return all(token // group.slot_tokens in there for token in needed_tokens(group, position))
