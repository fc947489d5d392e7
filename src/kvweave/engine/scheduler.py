"""The scheduler: which tokens of which jobs are computed next, within a budget of tokens and the pages that there are.

    running   jobs with pages: those that generate go first, all in one call; then prompts, in chunks
    waiting   jobs without: new ones, and those that were preempted, which go on from what they left in the cache

When pages are short, jobs of the worst rank are preempted for better ones that run, and jobs of lower priority for
those that wait; the best one can always go on, so nothing deadlocks. A prompt whose beginning is just being computed
for another job waits for that. Plain Python over the core; nothing here knows of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from kvweave.cache import Cache, Copies, Sequence
from kvweave.cache.arguments import whole_number
from kvweave.engine.job import Job, JobChunk, StepPlan
from kvweave.errors import BadOption, NeverFits, OutOfPages

Open = Callable[[Job], Sequence]
"""Opens the sequence of a job, with all its tokens so far."""
Limit = Callable[[Job, int], int]
"""The largest position up to which a job may be computed in one chunk that starts at a position."""


LEAST_SHARED = 64
"""Tokens: shorter prefixes are computed again sooner than a step more is made for them."""


class Scheduler:
    """Jobs over one core. Used by the thread that owns the core.

    A step computes at most `budget` tokens, of at most `max_running` jobs. Models that cannot be computed in chunks say
    so by `whole_prompts`: their first chunk may exceed the budget.
    """

    def __init__(
        self,
        core: Cache,
        open_sequence: Open,
        *,
        budget: int = 2048,
        max_running: int = 64,
        limit: Limit | None = None,
        whole_prompts: bool = False,
    ) -> None:
        budget, max_running = whole_number(budget, "budget"), whole_number(max_running, "max_running")
        if budget < 1 or max_running < 1:
            raise BadOption(f"a step computes at least one token of one job, not {budget} of {max_running}")
        self.core, self.budget, self.max_running = core, budget, max_running
        self._open, self._limit, self._whole_prompts = open_sequence, limit, whole_prompts
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self._served: Counter[Hashable] = Counter()
        """Tokens computed for each tenant that has jobs, as far as it matters for taking turns."""
        self._arrived = 0
        self._has_full_only = all(group.cache.reach.span is None for group in core.plan.groups)

    # ---- adding and removing jobs

    def check(self, num_prompt: int, max_new: int) -> None:
        """Raise `NeverFits` for a job that could never run, not even alone. Any thread may ask."""
        self.core.check_fits(num_prompt + max_new)
        if self._whole_prompts:
            self.core.check_fits(num_prompt, num_prompt)

    def add(self, job: Job) -> None:
        job.number, self._arrived = self._arrived, self._arrived + 1
        active = {other.tenant for other in (*self.running, *self.waiting)}
        self._served = Counter({tenant: self._served[tenant] for tenant in active})
        if job.tenant not in active:  # the share of a tenant starts afresh when it has no jobs
            self._served[job.tenant] = min(self._served.values(), default=0)
        self.waiting.append(job)
        if not self._has_full_only:
            self._expect_branch(job)

    def remove(self, job: Job) -> None:
        """A job is done, cancelled or failed: what it committed stays cached. Calling it twice is fine."""
        if job.sequence:
            self.core.close(job.sequence)
            job.sequence = None
        for jobs in (self.running, self.waiting):
            if job in jobs:
                jobs.remove(job)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    # ---- a step

    def plan(self) -> StepPlan:
        """Allocate pages for the next step. It has no chunks if every job waits for tokens under way, or if
        another holder of the cache has all pages."""
        while True:
            step = StepPlan([], [])
            self._generate(step)
            self._prefill(step)
            self._admit(step)
            if step.chunks or len(self.running) < 2 or any(job.num_pending for job in self.running):
                return step
            self._preempt(max(self.running, key=lambda job: job.rank))

    def commit(self, chunks: Iterable[JobChunk]) -> list[Copies]:
        """The chunks are computed, and all their tokens are known; later steps may be under way. Returns copies to be
        made before the next step."""
        alike: dict[tuple[bool, bool], list[JobChunk]] = {}
        for chunk in chunks:
            self._served[chunk.job.tenant] += chunk.num_tokens
            if chunk.sequence.is_open:
                alike.setdefault((chunk.job.is_shared, chunk.is_told), []).append(chunk)
        return [self._commit_alike(found, *how) for how, found in alike.items()]

    def _commit_alike(self, chunks: list[JobChunk], share: bool, are_told: bool) -> Copies:
        sequences, ends = [chunk.sequence for chunk in chunks], [chunk.end for chunk in chunks]
        tokens = [chunk.ids for chunk in chunks] if are_told else None
        return self.core.commit(sequences, ends, tokens=tokens, share=share)

    def _generate(self, step: StepPlan) -> None:
        """One token of every job that generates; where pages are short, without those of the worst rank."""
        generating = (job for job in self.running if job.num_left == 1 and job.num_computed and not job.is_answered)
        jobs = sorted(generating, key=lambda job: job.rank)
        while jobs:
            sequences = [job.sequence for job in jobs if job.sequence]
            try:
                copies = self.core.extend(sequences, 1)
            except OutOfPages:
                victim = max(self.running, key=lambda job: job.rank)
                if len(self.running) == 1:
                    return
                self._preempt(victim)
                jobs = [job for job in jobs if job is not victim]
                continue
            step.copies.append(copies)
            for job, sequence in zip(jobs, sequences, strict=True):
                step.chunks.append(JobChunk(job, sequence, sequence.length - 1, sequence.length, True))
            return

    def _prefill(self, step: StepPlan) -> None:
        """The next chunks of prompts. A job that only lacks its last token generates."""
        jobs = [job for job in self.running if job.num_left > 1 or not job.num_computed]
        for job in sorted(jobs, key=lambda job: job.rank):
            if job.sequence and not self._extend(step, job, lambda other, job=job: other.rank > job.rank):  # type: ignore[misc]
                return

    def _admit(self, step: StepPlan) -> None:
        """Jobs that wait, in turn; the first one that does not fit ends it, so that none is overtaken for ever."""
        waiting = (job for job in self.waiting if not job.num_pending)
        order = sorted(waiting, key=lambda job: (-job.priority, self._served[job.tenant], job.number))
        for job in order:
            if len(self.running) >= self.max_running or self._left(step) <= 0:
                return
            if self._is_being_computed(job):
                continue
            job.branches = self._branches(job, order)
            job.sequence, job.num_opened = self._open(job), len(job.tokens)
            if not self._extend(step, job, lambda other, job=job: other.priority < job.priority):  # type: ignore[misc]
                self.core.close(job.sequence)
                job.sequence = None
                return
            if job.num_cached is None:
                job.num_cached = step.chunks[-1].start
            self.waiting.remove(job)
            self.running.append(job)

    def _left(self, step: StepPlan) -> int:
        return self.budget - sum(chunk.num_tokens for chunk in step.chunks)

    def _extend(self, step: StepPlan, job: Job, may_preempt: Callable[[Job], bool]) -> bool:
        """The next chunk of a job, shorter where pages are short; False if there is no room for a single token."""
        assert job.sequence, "it runs"
        if self._left(step) <= 0:
            return False
        start, job_left = job.num_computed, job.num_left
        end = count = self._end(step, job, job.sequence, start) - start
        while True:
            try:
                step.copies.append(self.core.extend(job.sequence, count))
            except (OutOfPages, NeverFits) as error:  # a step may be too long for windows, whatever else is free
                if count > 1 and (not self._whole_prompts or isinstance(error, NeverFits)):
                    count = -(-count // 2)
                elif victim := self._victim(step, job, may_preempt):
                    self._preempt(victim)
                    count = end
                else:
                    return False
                continue
            step.chunks.append(JobChunk(job, job.sequence, start, start + count, count == job_left))
            return True

    def _end(self, step: StepPlan, job: Job, sequence: Sequence, start: int) -> int:
        limits = [len(job.tokens), sequence.stop or len(job.tokens)]
        if self._limit:
            limits.append(self._limit(job, start))
        if not self._whole_prompts or start:
            limits.append(start + self._left(step))
        return min(limits)

    def _victim(self, step: StepPlan, job: Job, may_preempt: Callable[[Job], bool]) -> Job | None:
        """The worst of the jobs that may be preempted for another, and are not part of the step."""
        taken = {chunk.job.number for chunk in step.chunks}
        others = [other for other in self.running if other is not job and other.number not in taken]
        return max(filter(may_preempt, others), key=lambda other: other.rank, default=None)

    def _preempt(self, job: Job) -> None:
        assert job.sequence, "it runs"
        self.core.close(job.sequence)
        job.sequence = None
        job.num_preempted += 1
        self.running.remove(job)
        self.waiting.append(job)

    # ---- twins

    def _is_being_computed(self, job: Job) -> bool:
        """Whether a job that runs is about to leave a longer prefix of this one than can be found now."""
        found = None
        for other in self.running:
            if other.sequence and other.tenant == job.tenant and other.sequence.committed < other.num_prompt:
                expected = self._expected(other, other.sequence, job)
                if expected > other.sequence.committed:
                    found = self._found(other.sequence, job) if found is None else found
                    if expected > found:
                        return True
        return False

    def _branches(self, job: Job, waiting: list[Job]) -> tuple[int, ...]:
        """Where others that wait leave the prompt of a job that is about to be opened: the one position at which a
        resume point saves most of their tokens. Full attention alone can go on from anywhere."""
        if self._has_full_only:
            return ()
        others = (other for other in waiting[: self.max_running] if other is not job and other.tenant == job.tenant)
        commons = sorted((common for other in others if (common := _common(job, other)) >= LEAST_SHARED), reverse=True)
        savings = ((count * common, common) for count, common in enumerate(commons, 1))
        return max(savings, default=(0,))[1:]

    def _expect_branch(self, job: Job) -> None:
        """Let the prompts that are being computed leave a point where this job, which came too late to be among their
        branches, leaves them; if it will find none nearby anyway."""
        for other in self.running:
            if other.sequence and other.tenant == job.tenant and other.num_computed < other.num_prompt:
                common = _common(other, job)
                if common - self._expected(other, other.sequence, job) >= LEAST_SHARED:
                    self.core.add_branch(other.sequence, common)

    def _found(self, of_twin: Sequence, job: Job) -> int:
        return self.core.lookup(job.tokens, namespace=of_twin.namespace)

    def _expected(self, other: Job, sequence: Sequence, job: Job) -> int:
        """How long a prefix of `job` will be cached when the prompt of the other one is computed."""
        common = _common(other, job)
        if self._has_full_only:
            return common // self.core.grid * self.core.grid
        return max((point for point in sequence.prompt_points if point <= common), default=0)


def _common(other: Job, job: Job) -> int:
    """Tokens of the prompt of another job that `job` begins with, and could find: its last one is computed."""
    count = min(len(job.tokens) - 1, job.num_prompt, other.num_prompt)
    differ = np.flatnonzero(job.prompt[:count] != other.prompt[:count])
    return int(differ[0]) if len(differ) else count
