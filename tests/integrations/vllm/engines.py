"""A real vLLM engine on the CPU, in this process, with or without our connector."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

SETTLE_S = 30
"""A save that waits for room in a full arena takes seconds."""

LogProb = tuple[tuple[int, float], ...]
"""Of one step: the likeliest tokens."""


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    cached: int
    tokens: tuple[int, ...]
    logprobs: tuple[LogProb, ...] = field(repr=False)

    def difference(self, other: Answer) -> float:
        """The largest difference of a log-probability; infinity where tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        return max(map(_difference, self.logprobs, other.logprobs))

    def first_difference(self, other: Answer) -> float:
        """The same of the first token alone, whichever it is."""
        return _difference(self.logprobs[0], other.logprobs[0])


def _difference(mine: LogProb, theirs: LogProb) -> float:
    """Over the tokens that both name; infinity if there are none."""
    both = dict(mine).keys() & dict(theirs).keys()
    return max((abs(dict(mine)[token] - dict(theirs)[token]) for token in both), default=float("inf"))


def tokens(length: int, seed: int = 0) -> list[int]:
    """Pseudo-random, none of them special."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 500 for i in range(length)]


class Engine:
    """One engine. Greedy, eight tokens, with log-probabilities."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def counts(self) -> Mapping[str, int]:
        """Of the connector's scheduler side."""
        counts: Mapping[str, int] = self.scheduler.connector._scheduler.counts
        return counts

    @staticmethod
    def sampling(new_tokens: int = 8, params: Mapping[str, Any] | None = None) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        return SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=4, extra_args=extra
        )

    def ask(
        self,
        *prompts: Sequence[int],
        new_tokens: int = 8,
        params: Mapping[str, Any] | None = None,
        salt: str | None = None,
        **options: Any,
    ) -> list[Answer]:
        """All at once. `params` are the requests' `kv_transfer_params`."""
        inputs = [{"prompt_token_ids": [*each], **({"cache_salt": salt} if salt else {})} for each in prompts]
        outputs = self.llm.generate(inputs, self.sampling(new_tokens, params), use_tqdm=False, **options)
        return [_answer(output) for output in outputs]

    def one(self, prompt: Sequence[int], **options: Any) -> Answer:
        (answer,) = self.ask(prompt, **options)
        return answer

    def interrupted(self, prompt: Sequence[int], interrupt: Callable[[], None], new_tokens: int = 8) -> Answer:
        """One request, with an interruption when half of its tokens are made."""
        made = self.llm.llm_engine
        made.add_request("interrupted", {"prompt_token_ids": [*prompt]}, self.sampling(new_tokens))
        while made.has_unfinished_requests():
            (output,) = made.step() or [None]
            if output is not None and len(output.outputs[0].token_ids) == new_tokens // 2:
                interrupt()
        return _answer(output)

    def preempt(self) -> None:
        """The running requests, as vLLM does it where blocks are lacking; their blocks may stay in its own cache."""
        while self.scheduler.running:
            self.scheduler._preempt_request(self.scheduler.running.pop(), time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.clear()

    @contextmanager
    def free_blocks(self, num_blocks: int) -> Iterator[list[Any]]:
        """Leaves the engine so many blocks; yields the requests that are preempted meanwhile."""
        pool, preempted, real = self.scheduler.kv_cache_manager.block_pool, list[Any](), self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **more: Any) -> None:
            preempted.append(request)
            real(request, *args, **more)

        held = pool.get_new_blocks(pool.get_num_free_blocks() - num_blocks)
        self.scheduler._preempt_request = counted
        try:
            yield preempted
        finally:
            self.scheduler._preempt_request = real
            pool.free_blocks(held)

    def most_blocks(self, prompt: Sequence[int], new_tokens: int) -> int:
        """How many blocks one request holds at most."""
        pool, made = self.scheduler.kv_cache_manager.block_pool, self.llm.llm_engine
        free: list[int] = [pool.get_num_free_blocks()]
        made.add_request("measured", {"prompt_token_ids": [*prompt]}, self.sampling(new_tokens))
        while made.has_unfinished_requests():
            made.step()
            free.append(pool.get_num_free_blocks())
        return max(free) - min(free)

    def settle(self) -> None:
        """Until every save is in the store."""
        connector, until = self.scheduler.connector, time.monotonic() + SETTLE_S
        while connector is not None and connector._scheduler.saves:
            assert time.monotonic() < until, "saves never ended"
            self.core.step_fn()
            time.sleep(0.002)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, when everything is saved."""
        self.settle()
        assert self.llm.reset_prefix_cache()


def without_checkpoints() -> None:
    """vLLM 0.32's CPU kernel for Mamba-2 cannot take snapshots within a prefill, but the engine counts on them: every
    prompt of more than a block would end in an IndexError. Snapshots at the ends of steps remain."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    declared = MambaMixer2.get_kv_cache_spec
    if declared.__name__ != "without":

        def without(self: Any, config: Any) -> Any:
            return replace(declared(self, config), num_prefill_checkpoint_blocks=0)

        MambaMixer2.get_kv_cache_spec = without


def with_flat_rows() -> None:
    """vLLM 0.32's CPU kernel for rotary embeddings rotates wrong rows of tensors that have three axes, as LFM2's keys
    and queries have. A batch has other answers then than each prompt alone, and neither has those of transformers."""
    from vllm.model_executor.models import lfm2

    made = lfm2.get_rope
    if made.__name__ != "flat":

        def flat(*args: Any, **options: Any) -> Any:
            rope = made(*args, **options)
            return lambda positions, query, key: rope(positions, query.flatten(1), key.flatten(1))

        lfm2.get_rope = flat


def with_inputs_of_stages(worker: Any) -> None:
    """vLLM 0.32's CPU worker allocates what it receives from the pipeline stage before in its warm-up, which it leaves
    out in eager mode. Run in each worker."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _answer(output: Any) -> Answer:
    (made,) = output.outputs
    logprobs = tuple(tuple(sorted((t, each.logprob) for t, each in step.items())) for step in made.logprobs)
    return Answer(output.num_cached_tokens or 0, tuple(made.token_ids), logprobs)


@contextmanager
def engine(model: Path, store: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine of `model`; `store` is the connector's extra config."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    without_checkpoints()
    with_flat_rows()
    transfer = None
    if store is not None:
        transfer = KVTransferConfig(
            kv_connector="KVWeaveConnector",
            kv_connector_module_path="kvweave.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"always_load": True, **store},
        )
    dtype = json.loads((model / "config.json").read_text())["dtype"]  # by itself vLLM makes float32 bfloat16
    usual = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "dtype": dtype}
    made = None
    try:
        llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=True,
            enable_prefix_caching=True,
            **{**usual, "kv_transfer_config": transfer, **options},
        )
        if options.get("pipeline_parallel_size", 1) > 1:
            llm.collective_rpc(with_inputs_of_stages)
        made = Engine(llm)
        yield made
    finally:
        if made is not None:
            made.core.shutdown()
            del made.llm, made.core, llm
        del made
        gc.collect()
        cleanup_dist_env_and_memory()
