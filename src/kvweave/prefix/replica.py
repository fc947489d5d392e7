"""A replica: another process's copy of the tree, rebuilt from events, that answers with the engine's exact hit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from kvweave.plan import Plan
from kvweave.pool import NULL
from kvweave.pool.group import paged_groups
from kvweave.prefix.events import VERSION, Cleared, Event, Joined, Kept, Lost, Named, Removed, Split, Stored, Trimmed
from kvweave.prefix.node import Kind, Node, Point
from kvweave.prefix.prompt import Span, as_tokens, content_digest, with_contents
from kvweave.prefix.tree import Tree

HERE = 1
"""Stands for any page: a replica knows that a block is there, not where."""
UNNAMED = -(2**31)
"""Stands for any content that the cache has not named: no run has this token."""


class Replica:
    """Feed it all events of a cache from its start, in order; then `hit` equals the cache's own."""

    version = VERSION

    def __init__(self, plan: Plan) -> None:
        self.tree = Tree(paged_groups(plan))
        self._groups = {group.tag: group for group in self.tree.groups}
        self._nodes: dict[int, Node] = {}
        self._contents: dict[bytes, int] = {}
        """The tokens of contents, by their digests."""

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            getattr(self, f"_{type(event).__name__.lower()}")(event)

    def hit(self, tokens: object, namespace: Hashable = "", spans: Sequence[Span] = ()) -> int:
        """The tokens that the engine would reuse of a prompt; at least one stays to be computed."""
        prompt = with_contents(as_tokens(tokens), spans, self._token)
        return self.tree.hit(self.tree.match(namespace, prompt), len(prompt) - 1)

    def _token(self, content: bytes) -> int:
        return self._contents.get(content_digest(content), UNNAMED)

    def _named(self, event: Named) -> None:
        if event.token:
            self._contents[event.digest] = event.token
        else:
            del self._contents[event.digest]

    def _stored(self, event: Stored) -> None:
        tokens = np.array(event.tokens, np.int32)
        if event.parent is None:
            self._nodes[event.node] = self.tree.root(event.namespace)
        else:
            parent = self._nodes[event.parent]
            self._nodes[event.node] = self.tree.insert(parent, tokens, self.tree.empty_pages(len(tokens)))

    def _kept(self, event: Kept) -> None:
        self._mark(event.node, event.tag, event.blocks, HERE)

    def _lost(self, event: Lost) -> None:
        self._mark(event.node, event.tag, event.blocks, NULL)

    def _mark(self, name: int, tag: str, blocks: tuple[int, ...], value: int) -> None:
        node, group = self._nodes[name], self._groups[tag]
        if group.is_state:
            for block in blocks:
                self._mark_state(node, (block + 1) * group.slot_tokens, value)
            return
        pages = node.pages[group.number].copy()
        pages[np.array(blocks, np.int64) - node.start // group.slot_tokens] = value
        node.pages[group.number] = pages

    def _mark_state(self, node: Node, position: int, value: int) -> None:
        """The states of all groups come and go together, so any of their events will do."""
        point = node.point_at(position)
        if value == NULL and point is not None:
            node.points.remove(point)
        elif value != NULL and point is None:
            self.tree.add_point(Point(node, position, Kind.BRANCH, (value,)))

    def _split(self, event: Split) -> None:
        self._nodes[event.upper] = self.tree.split(self._nodes[event.node], event.position)

    def _joined(self, event: Joined) -> None:
        self.tree.join([self._nodes.pop(event.upper), self._nodes[event.node]])

    def _trimmed(self, event: Trimmed) -> None:
        self.tree.trim(self._nodes[event.node], event.end)

    def _removed(self, event: Removed) -> None:
        self.tree.remove(self._nodes.pop(event.node))

    def _cleared(self, _event: Cleared) -> None:
        self.tree.clear()
        self._nodes.clear()
        self._contents.clear()
