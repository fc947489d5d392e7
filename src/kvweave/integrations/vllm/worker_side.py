"""A worker's side: loads into this rank's pages, and saves out of them, by the store's threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvweave.integrations.vllm.connector_settings import ConnectorSettings
from kvweave.integrations.vllm.step_messages import LoadJob, SaveJob, Slices, WorkerReport
from kvweave.store import BaseStore, Operation, PagePayloads, Saved
from kvweave.store.payload_copies import Tables

log = logging.getLogger("kvweave.vllm")


class RunningLoad(NamedTuple):
    job: LoadJob
    operation: Operation[int]
    began: float


class LoadResults(NamedTuple):
    """Requests whose loads have ended; `failed` are some of them."""

    ended: set[str]
    failed: set[str]


class WorkerSide:
    """Jobs of one rank. No call waits."""

    def __init__(self, settings: ConnectorSettings, store: BaseStore[Any], pages: PagePayloads) -> None:
        self._settings, self._store, self._pages = settings, store, pages
        self._loads: list[RunningLoad] = []
        self._saves: dict[int, Operation[Saved]] = {}
        self._gathering: set[int] = set()
        self._report = WorkerReport()

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            hit, sink = self._store.redeem(job.ticket), self._pages.sink(_tables(job.tables))
            operation = self._store.submit_load(
                hit,
                sink,
                start=job.start,
                shards=self._pages.reads,
                request=job.request,
                budget_s=self._settings.load_timeout_s,
            )
            self._loads.append(RunningLoad(job, operation, time.monotonic()))

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """To be called when this step's kernels were submitted."""
        for job in jobs:
            self._saves[job.number] = self._store.submit_save(
                job.prompt,
                self._pages.source(_tables(job.tables)),
                points=job.points,
                shards=self._pages.writes,
                start=job.start,
                request=job.number,
            )
            self._gathering.add(job.number)

    def take_loads(self) -> LoadResults:
        """The loads that have ended since the last call."""
        ended, failed = set[str](), set[str]()
        for load in [load for load in self._loads if load.operation.is_done]:
            self._loads.remove(load)
            ended.add(load.job.request)
            if (reached := self._reached(load)) < load.job.position:
                failed.add(load.job.request)
                self._report.reached[load.job.request] = reached
            else:
                self._report.load_seconds[load.job.request] = self._seconds(load)
        return LoadResults(ended, failed)

    def _seconds(self, load: RunningLoad) -> dict[str, float]:
        """By group: its share of the time since the load was submitted."""
        moving, total = load.operation.shard_seconds, time.monotonic() - load.began
        shares = dict[str, float]()
        for shard, seconds in moving.items():
            tag = self._store.schema.shards[shard].tag
            shares[tag] = shares.get(tag, 0.0) + total * seconds / (sum(moving.values()) or 1.0)
        return shares

    def _reached(self, load: RunningLoad) -> int:
        try:
            return load.operation.result(timeout=0)
        except Exception as error:  # whatever a tier or a driver raises: the engine goes on
            log.warning("a load failed, and is computed instead: %r", error)
            return 0

    def take_report(self) -> WorkerReport:
        """What has ended since the last call."""
        report, self._report = self._report, WorkerReport()
        done = [number for number, save in self._saves.items() if save.is_done]  # before: what is done is gathered
        for number in [number for number in self._gathering if self._saves[number].is_gathered]:
            self._gathering.remove(number)
            report.gathered[number] = 1
        for number in done:
            save = self._saves.pop(number)
            report.ended[number] = 1
            if save.error is not None or save.failed:
                report.failed_saves.add(number)
                level = logging.WARNING if save.error is not None else logging.DEBUG
                log.log(level, "save %d: %d pieces were not kept: %r", number, len(save.failed), save.error)
        self._store.poll()
        return report


def _tables(slices: Slices) -> Tables:
    return {name: each.table() for name, each in slices.items()}
