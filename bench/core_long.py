"""Lives of a cache with long prompts, long chats and deep trees, calls timed; bench/core_scaling.py reports them."""

from __future__ import annotations

import numpy as np

from bench.core_calls import BLOCK, CallTimes, Kinds, Life, num_pages, plan_of
from kvweave.cache import Cache
from kvweave.prefix import Retention

LONG = 131_072


def chat(kinds: Kinds, turns: int, times: CallTimes, *, branches: bool) -> None:
    """A chat of many turns, each a hit on the one before; then others come until nothing is left of it.

    With `branches` the last block of each turn is written anew in the next, so that no two turns become one run.
    """
    life = Life(times, Cache(plan_of(kinds, turns * num_pages(kinds, 2, 2)), rows=8, max_tokens=64 * turns))
    shape = "which part at every turn" if branches else "in a row"
    times.enter(f"{turns} turns {shape}")
    tokens = life.tokens(2 * BLOCK)
    for _ in range(turns):
        tokens = np.concatenate([tokens, life.tokens(BLOCK)])
        life.serve(np.concatenate([tokens, life.tokens(BLOCK)]) if branches else tokens)
    times("open warm", life.cache.open, tokens).close()
    times.enter(f"evicting {turns} turns {shape}")
    for _ in range(2 * turns):
        life.serve(life.tokens(2 * BLOCK + 8))


def one_token_blocks(kinds: Kinds, nodes: int, times: CallTimes) -> None:
    """Blocks of a token, a node each; one extend takes the pages of all of them."""
    life = Life(
        times, Cache(plan_of(kinds, num_pages(kinds, nodes + 64, nodes, LONG), block=1), rows=8, max_tokens=2 * nodes)
    )
    times.enter(f"{nodes} nodes of a token")
    tokens = life.tokens(nodes // 2)
    for length in range(1, len(tokens)):
        life.serve_quietly(np.concatenate([tokens[:length], life.tokens(1)]))
    life.serve(life.tokens(nodes - 64))


def split_everywhere(kinds: Kinds, length: int, times: CallTimes) -> None:
    """A prompt of which every prefix was asked for."""
    life = Life(
        times,
        Cache(plan_of(kinds, num_pages(kinds, length // BLOCK + 64, 64, 8192)), rows=8, max_tokens=length + BLOCK),
    )
    times.enter(f"{length // 1024}k split at every block", length)
    tokens = life.tokens(length)
    life.serve_quietly(tokens)
    for end in range(2 * BLOCK, length, BLOCK):
        times("open of a prefix", life.cache.open, tokens[:end]).close()
    for _ in range(5):
        times("open warm", life.cache.open, tokens).close()
        times("lookup", life.cache.lookup, tokens)


def parted_everywhere(kinds: Kinds, length: int, times: CallTimes) -> None:
    """A prompt from whose every block another one goes its own way."""
    life = Life(
        times,
        Cache(
            plan_of(kinds, num_pages(kinds, 4 * length // BLOCK, 2 * length // BLOCK, 8192)),
            rows=8,
            max_tokens=length + 4 * BLOCK,
        ),
    )
    times.enter(f"{length // 1024}k parted at every block", length)
    tokens = life.tokens(length)
    life.serve_quietly(tokens)
    for end in range(BLOCK, length, BLOCK):
        life.serve_quietly(np.concatenate([tokens[:end], life.tokens(BLOCK + 1)]))
    for _ in range(5):
        times("lookup", life.cache.lookup, tokens)
        times("close of a hit", life.cache.close, times("open warm", life.cache.open, tokens))
        times("unpin", life.cache.unpin, times("pin", life.cache.pin, tokens))
    times.enter(f"evicting {length // 1024}k parted at every block")
    for _ in range(length // BLOCK):
        life.serve(life.tokens(2 * BLOCK + 8))


def dense_points(kinds: Kinds, length: int, times: CallTimes) -> None:
    """A prompt with a resume point at every block, cold and warm; then a cache full of it is asked for one page."""
    pages = num_pages(kinds, length // BLOCK + 8, length // BLOCK + 8, LONG)
    cache = Cache(plan_of(kinds, pages), rows=8, max_tokens=length + BLOCK, retention=Retention(every=BLOCK))
    life = Life(times, cache)
    times.enter(f"{length // 1024}k with a point at every block", length)
    tokens = life.tokens(length)
    life.serve(tokens)
    for end in (length, length // 2, length // 4):
        times("open warm", cache.open, tokens[:end]).close()
    times.enter(f"evicting {times.phase}")
    for _ in range(50):
        life.serve(life.tokens(2 * BLOCK + 8))


def long_prompt(kinds: Kinds, length: int, times: CallTimes) -> None:
    """A prompt of default retention: cold, warm, and evicted a page at a time."""
    life = Life(
        times, Cache(plan_of(kinds, num_pages(kinds, length // BLOCK + 8, 64, 8192)), rows=8, max_tokens=length + BLOCK)
    )
    times.enter(f"{length // 1024}k", length)
    tokens = life.tokens(length)
    life.serve(tokens)
    for _ in range(5):
        times("lookup", life.cache.lookup, tokens)
        times("close of a hit", life.cache.close, times("open warm", life.cache.open, tokens))
    times.enter(f"evicting {times.phase}")
    for _ in range(50):
        life.serve(life.tokens(2 * BLOCK + 8))
