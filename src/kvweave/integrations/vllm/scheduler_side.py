"""The scheduler's side: which requests load what, and which pages are saved in a step. No call waits for a store."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvweave.integrations.vllm.connector_settings import ConnectorSettings
from kvweave.integrations.vllm.engine_groups import EngineGroup, hit_alignment
from kvweave.integrations.vllm.load_or_compute import Speeds
from kvweave.integrations.vllm.pinned_prompts import PinnedPrompts
from kvweave.integrations.vllm.request_lookups import RequestLookup, RequestLookups
from kvweave.integrations.vllm.request_state import RequestState
from kvweave.integrations.vllm.running_saves import RunningSaves, SavedRange
from kvweave.integrations.vllm.step_messages import LoadJob, SaveJob, StepJobs, TableSlice, WorkerReport
from kvweave.store import BaseStore

log = logging.getLogger("kvweave.vllm")
BlockIds = Sequence[Sequence[int]]
"""By the engine's group: the block table of a request."""
Offers = Mapping[str, Sequence[tuple[int, int, int]]]
"""By request: (group, block, tokens) of snapshots that are valid at the end of this step."""


class Scheduled(NamedTuple):
    """A request of this step: tokens computed before it, and in it."""

    request: str
    num_computed: int
    num_new: int


class SchedulerSide:
    """Bookkeeping of requests."""

    def __init__(
        self,
        settings: ConnectorSettings,
        store: BaseStore[Any],
        groups: Sequence[EngineGroup],
        saves: RunningSaves,
    ) -> None:
        self._settings, self._store, self._groups = settings, store, groups
        self._alignment, self._chunk = hit_alignment(groups), store.schema.chunk_tokens
        self._states = [group for group in groups if group.is_state]
        self._requests: dict[str, RequestState] = {}
        self._loads: list[LoadJob] = []
        self.saves, self._lookups = saves, RequestLookups(store, settings.lookup_timeout_s, self._alignment)
        self._step_began, self._step_tokens = 0.0, 0
        self.speeds = Speeds()
        self.counts, self.seconds = Counter[str](), dict.fromkeys(("lookup_seconds", "load_seconds"), 0.0)
        self._taken: dict[str, float] = {}
        self._pins = PinnedPrompts(store, self.counts)

    # ---- a request's way in

    def add(self, request: str, state: RequestState) -> None:
        self._requests[request] = state
        if not state.settings.skip_load:
            self._look_up(state)

    def match(self, request: str, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond those that the engine has; None: ask again, the lookup is on its way."""
        state = self._requests.get(request)
        if state is None or state.settings.skip_load:
            return 0
        if state.lookup is None and (state.hit is None or state.is_hit_old):
            self._look_up(state)
        if state.lookup is not None and not self._found(state, state.lookup):
            return None
        if state.hit is None:  # the lookup failed
            return 0
        num_tokens = state.hit.position - num_computed
        if num_tokens < max(1, self._settings.min_load_tokens):
            return 0
        if state.start != num_computed:
            state.start, state.sizes = num_computed, self._store.load_sizes(state.hit, num_computed)
        if not self._settings.always_load and not self.speeds.is_load_faster(state.sizes, num_tokens):
            self.counts["computed_instead"] += 1
            return 0
        return num_tokens

    def _look_up(self, state: RequestState) -> None:
        prompt = state.hash_up_to(len(state.tokens) if self._settings.save_generated else state.num_prompt_tokens)
        state.hit, state.lookup = None, self._lookups.begin(prompt)

    def _found(self, state: RequestState, lookup: RequestLookup) -> bool:
        try:
            found = self._lookups.result(lookup)
        except Exception as error:  # whatever a tier raises: the engine goes on
            log.warning("a lookup failed, and is a miss: %r", error)
            state.lookup, state.settings = None, replace(state.settings, skip_load=True)
            return True
        if found is None:
            return False
        state.lookup, state.found_at = None, time.monotonic()
        state.saved = max(state.saved, found.stored)
        state.hit, state.start, state.sizes = found.hit, 0, found.sizes
        if state.limit is not None and state.limit < found.hit.position:
            state.hit = self._store.shorten(found.hit, state.limit, self._alignment)
            state.sizes = self._store.load_sizes(state.hit)
        self.counts["lookups"] += 1
        self.counts["tokens_found"] += state.hit.position
        self.seconds["lookup_seconds"] += state.found_at - lookup.asked_at
        return True

    def allocated(self, request: str, block_ids: BlockIds, num_external: int) -> None:
        """The engine has blocks for what `match` promised; with 0 it takes nothing of it."""
        state = self._requests.get(request)
        if state is None or state.hit is None or not num_external:
            return
        position, tables = state.start + num_external, dict[str, TableSlice]()
        for group in self._groups:
            ids, size = block_ids[group.number], group.block_tokens
            last = -(-position // size)
            if group.is_state:
                tables[group.table] = _slice(position // self._chunk - 1, ids[last - 1 : last])
            else:  # before `start` there are blocks of the engine's own cache, which others may be reading
                tables[group.table] = _slice(state.start // size, ids[state.start // size : last])
        self._loads.append(LoadJob(request, state.hit.ticket(), state.start, position, tables))
        state.loading, state.hit, state.num_loading = state.hit, None, num_external
        self.counts["loads"] += 1
        self.counts["tokens_loaded"] += num_external

    # ---- each step

    def step(
        self, scheduled: Iterable[Scheduled], tables: Callable[[str], BlockIds | None], offers: Offers
    ) -> StepJobs:
        """The jobs of a step; to be called once it is decided what is computed in it."""
        self._store.poll()  # operations are polled by their handles; this drops those that are not waited for
        saves, num_new = [], 0
        for each in scheduled:
            num_new += each.num_new
            state = self._requests.get(each.request)
            if state is not None and not state.settings.skip_save:
                points, snapshots = self._points(state, each, offers.get(each.request, ()))
                if points and (block_ids := tables(each.request)) is not None:
                    saves.append(self._save(state, points, block_ids, snapshots))
        self._lookups.step(is_idle=not num_new)
        self._step_began, self._step_tokens = time.monotonic(), num_new
        loads, self._loads = tuple(self._loads), []
        return StepJobs(loads, tuple(saves))

    def _points(
        self, state: RequestState, each: Scheduled, offers: Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], dict[int, dict[int, int]]]:
        """Where the request can be resumed after this step and is not saved: chunk ends; of models with states those
        at which vLLM offers all of them, by position and group."""
        known = len(state.tokens) if self._settings.save_generated else state.num_prompt_tokens
        end = min(each.num_computed + each.num_new, known)
        if end // self._chunk * self._chunk <= state.saved:
            return [], {}
        if not self._states:
            first = max(state.saved // self._chunk + 1, -(-each.num_computed // self._chunk))
            return [chunk * self._chunk for chunk in range(first, end // self._chunk + 1)], {}
        snapshots: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            if block and state.saved < tokens <= end and tokens % self._chunk == 0:
                snapshots.setdefault(tokens, {})[group] = block
        whole = {tokens: blocks for tokens, blocks in snapshots.items() if len(blocks) == len(self._states)}
        return sorted(whole), whole

    def _save(
        self,
        state: RequestState,
        points: Sequence[int],
        block_ids: BlockIds,
        snapshots: Mapping[int, Mapping[int, int]],
    ) -> SaveJob:
        start, end, tables = state.saved, points[-1], dict[str, TableSlice]()
        for group in self._groups:
            if group.is_state:
                pages = np.zeros(end // self._chunk, np.int32)
                for tokens, blocks in snapshots.items():
                    pages[tokens // self._chunk - 1] = blocks[group.number]
                tables[group.table] = TableSlice(0, pages)
            else:
                first = max(start, int(group.reach.tail(points[0]))) // self._chunk * self._chunk // group.block_tokens
                tables[group.table] = _slice(first, block_ids[group.number][first : -(-end // group.block_tokens)])
        state.hash_up_to(end)
        number = self.saves.begin(SavedRange(state, start, tuple(points)), tables)
        state.saved = end
        self.counts["saves"] += 1
        self.counts["tokens_saved"] += end - start
        return SaveJob(number, state.hashed(end), start, tuple(points), tables)

    def report(self, report: WorkerReport) -> None:
        """What the workers say has ended."""
        self.saves.report(report)
        self._pins.proceed(self.saves.is_saving)
        self.counts["failed_saves"] += len(report.failed_saves)
        for request, seconds in report.load_seconds.items():
            self.seconds["load_seconds"] += sum(seconds.values())
            if state := self._requests.get(request):
                self.speeds.observe_load(state.sizes, state.num_loading, seconds)
        for request, position in report.reached.items():
            self.counts["short_loads"] += 1
            if state := self._requests.get(request):
                state.limit, state.saved = position, 0

    def stepped(self) -> None:
        """The output of a step is there. With several steps in flight its time is too long, by one step at most."""
        self.speeds.observe_compute(self._step_tokens, time.monotonic() - self._step_began)
        self._step_tokens = 0

    def loaded(self, requests: Iterable[str]) -> None:
        """Loads of all workers have ended, well or not."""
        for request in requests:
            if (state := self._requests.get(request)) and state.loading is not None:
                self._store.release_later(state.loading)
                state.loading = None

    def source_of(self, request: str) -> str:
        """The farthest tier that a request is being loaded from, or would be."""
        state = self._requests.get(request)
        hit = (state.loading or state.hit) if state else None
        return self._store.farthest_tier(hit) if hit else ""

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        now: dict[str, float] = {**self.counts, **self.seconds}
        added = {name: number - self._taken.get(name, 0) for name, number in now.items()}
        self._taken = now
        return {name: number for name, number in added.items() if number}

    # ---- the end

    def finished(self, request: str) -> None:
        state = self._requests.pop(request, None)
        if state is None:
            return
        self._pins.request_ended(state)
        self._pins.proceed(self.saves.is_saving)
        if state.lookup is not None:
            self._lookups.abandon(state.lookup)
        for hit in (state.hit, state.loading):
            if hit is not None:
                self._store.release_later(hit)


def _slice(first: int, pages: Sequence[int]) -> TableSlice:
    return TableSlice(first, np.asarray(pages, np.int32))
