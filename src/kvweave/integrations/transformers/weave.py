"""KVWeave: pages under a transformers model, so that `generate` reuses every prefix that was computed before."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from kvweave.cache import Cache
from kvweave.errors import BadCall, BadOption, MissingExtra, NeverFits, OutOfPages
from kvweave.integrations.model_identity import config_digest
from kvweave.integrations.transformers.attention_interface import SwitchedConfigs
from kvweave.integrations.transformers.build_layers import counts_padding, layer_attentions, make_layer
from kvweave.integrations.transformers.calls import CallReader, GenerateCall
from kvweave.integrations.transformers.captured_forward import CapturedForward
from kvweave.integrations.transformers.core_lock import CoreLock
from kvweave.integrations.transformers.hooks import ForwardHooks
from kvweave.integrations.transformers.layers.model_caches import cache_class
from kvweave.integrations.transformers.model_changes import ModelChanges
from kvweave.integrations.transformers.opening import Opener
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.prefill import Pieces, retention, uncut
from kvweave.integrations.transformers.prompts import Prompts
from kvweave.integrations.transformers.replaced_functions import ReplacedFunctions
from kvweave.integrations.transformers.request_record import RequestRecord, RequestRecords, WeaveStats
from kvweave.integrations.transformers.rope import LengthRope
from kvweave.integrations.transformers.session import Session
from kvweave.integrations.transformers.step_graphs import StepGraphs
from kvweave.integrations.transformers.support import Served, examine, uncompiled, wrapped
from kvweave.plan import Plan, make_plan
from kvweave.tensor import Arena

if TYPE_CHECKING:
    from kvweave.integrations.transformers.model_store import ModelStore
    from kvweave.store import BaseStore

log = logging.getLogger(__name__)

DECLINED = "behind a prefix that was found it computes token by token, which takes longer than the prefix"
"""Why models whose scan ignores the cached state do not use a store."""


class KVWeave:
    """Serves one model from `memory` bytes of pages, planned from its config. One `generate` at a time, in any thread.

    `block_tokens` is the granularity of reuse; prompts are computed `prefill_tokens` at a time. `context` is a length
    (of a prompt and its answer) that must fit at least once: in less memory it is `NeverFits`. Other options of
    `kvweave.Cache` (policy, retention, rows, max_tokens) are passed on. `close` frees the memory.

    Before each request the model is checked for changes: KV that was computed with other weights or adapters is not
    reused. A PeftModel or a wrapper of `torch.compile` stands for the model inside.

    With a `store` (a directory, a URL, or an open store: `kvweave.integrations.open_store`) prefixes outlive the
    process and are shared with processes that run the same model; `weights` names its weights, which otherwise are
    hashed. A request waits at most `store_wait_s` for the store before it computes, and as long again at its end.

    Attention reads pages in place where it can; with `in_place=False` the model's own attention computes on gathered
    rows, and results are transformers' to the last bit. On a GPU, steps of few tokens are replayed as CUDA graphs
    unless `graphs=False`; with `compile_layers` their layers are compiled by `torch.compile`, which takes some seconds
    at first.
    """

    def __init__(
        self,
        model: Any,
        memory: int | str = "2GiB",
        *,
        block_tokens: int | Mapping[str, int] = 16,
        prefill_tokens: int = 4096,
        context: int | None = None,
        store: str | Path | BaseStore[Any] | None = None,
        weights: str | None = None,
        store_wait_s: float = 5.0,
        in_place: bool = True,
        graphs: bool | None = None,
        compile_layers: bool = False,
        **cache_options: Any,
    ) -> None:
        if prefill_tokens < 1:
            raise BadOption(f"prefill_tokens must be at least 1, not {prefill_tokens}")
        models = wrapped(model)
        self._outermost, self.model = models[0], models[-1]
        self.served = examine(self.model)
        self.prefill_tokens = prefill_tokens
        self.plan = plan_for(self.served, memory, block_tokens, context)
        rope = LengthRope(self.model)
        self._calls = CallReader(self.model, self.served, rope)
        opened = self._open_store(store)
        try:
            unit = 1
            if opened:
                self.plan = plan_for(opened.served, memory, block_tokens, context)
                unit = opened.store.schema.chunk_tokens
            self.core = Cache(self.plan, **{"retention": retention(self.served, unit), **cache_options})
            self._uncut = 0 if "retention" in cache_options else uncut(self.served)
            self.memory = self._make_memory(rope, in_place)
            self._store_sync = opened.store_sync(self.model, self.memory, weights, store_wait_s) if opened else None
        except BaseException:
            if opened:
                opened.close()
            raise
        self.arena = self.memory.arena
        self._made_for = self.model.dtype, self.model.device
        self._config = config_digest(self.model.config)
        of_past, counting = cache_class(self.served.own_cache), counts_padding(self.served)
        self.opener = Opener(self.model, self.served, self.memory, of_past, counting, self._store_sync)
        self._generate, self._own_generate = self._outermost.generate, self.model.generate
        hooks: list[Any] = [*ForwardHooks(self.memory, self.served).register(models)]
        hooks += [ReplacedFunctions(self.model)] if in_place else []
        self._unhook = weakref.finalize(self, _remove, hooks)
        self._unhook.atexit = False  # at exit the model may be gone already, and needs no unhooking
        self.records = RequestRecords()
        with self.memory.core_lock, uncompiled(self.model), torch.no_grad():
            self.opener.learn_attention()
            is_wanted = self.model.device.type == "cuda" if graphs is None else graphs
            self.graphs = StepGraphs(self.model, self.served, self.memory, is_wanted, compile_layers)
            if is_wanted:
                self.graphs.learn()
        if self.graphs.is_useful:
            hooks.append(CapturedForward(self.model, self.graphs, self.served.cache_name))

    def _make_memory(self, rope: LengthRope, in_place: bool) -> PagedMemory:
        name = type(self.model).__name__
        with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
            arena = Arena(self.plan, str(self.model.device))
            attention = layer_attentions(arena, self.served.entries) if in_place else {}
            layers = [make_layer(name, arena, entry, attention.get(n)) for n, entry in enumerate(self.served.entries)]
        return PagedMemory(
            self.core,
            arena,
            layers,
            CoreLock(self.core),
            rope,
            ModelChanges(self.model),
            list(attention.values()),
            SwitchedConfigs(self.model),
        )

    def _open_store(self, store: str | Path | BaseStore[Any] | None) -> ModelStore | None:
        """Open the store; None, with a warning, if this model cannot use one."""
        self._declined = ""
        if store is None:
            return None
        if self.served.scans_afresh:
            log.warning("%s takes nothing from a store: %s", type(self.model).__name__, DECLINED)
            self._declined = DECLINED
            return None
        with MissingExtra.on_import("KVWeave(store=...)", "store"):
            from kvweave.integrations.transformers.model_store import open_model_store  # noqa: PLC0415 - an extra
        return open_model_store(store, self.served, self.plan, type(self.model).__name__)

    # ---- generate

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """As `model.generate`, with the same result; prefixes shared with earlier prompts or answers are not computed
        again.

        Takes `input_ids` (the model may be given before it), `attention_mask` and the options of `model.generate`.
        Prefixes are shared within one `namespace` (for example a tenant). Calls that pages cannot serve (with
        `use_cache=False`, `past_key_values` and the like) are computed by transformers alone: `records[-1].fallback`
        says why.
        """
        return self.answer(self.read_call(*inputs, **options))

    def read_call(self, *inputs: Any, namespace: Hashable = "", **options: Any) -> GenerateCall:
        """Read a call of `generate` without computing anything; raises `BadTokens` if `generate` would."""
        return self._calls.read(tuple(item for item in inputs if item is not self.model), options, namespace)

    def answer(self, call: GenerateCall, without_pages: Callable[[], Any] | None = None) -> Any:
        """Generate for a call that was read. If there are too few pages for its prompts, `without_pages` answers; where
        it is not given, that is `NeverFits` or `OutOfPages`."""
        start = time.perf_counter()
        if call.prompts is None:
            answer = self._generate(**call.options)
            self.records.append(_record_fallback(call.options["inputs"], call.fallback, answer, start))
            return answer
        self.check_model()
        pieces = Pieces(call.prefill_tokens or self.prefill_tokens, call.is_one_loop, self._uncut)
        with self.memory.core_lock, uncompiled(self.model):
            try:
                past = self.opener.open(call.prompts, call.namespace, pieces, call.extras, call.images)
            except (NeverFits, OutOfPages) as error:
                if without_pages is None:
                    raise
                reason = str(error)
            else:
                return self._answer_on_pages(call, call.prompts, past, start)
        answer = without_pages()
        self.records.append(_record_fallback(call.prompts.ids, reason, answer, start))
        return answer

    def _answer_on_pages(self, call: GenerateCall, prompts: Prompts, past: PagedCache, start: float) -> Any:
        with past:
            given = {**call.options, "attention_mask": prompts.mask, self.served.cache_name: past}
            if past.positions is not None:
                given["position_ids"] = past.positions
            answer = self._own_generate(prompts.ids, **given)
        self.records.append(_record(prompts, past, answer, start))
        return answer

    # ---- caches

    def past(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, namespace: Hashable = ""
    ) -> PagedCache:
        """A transformers cache with all but the last token of each prompt, found or computed.

        Pass it to the model with the last tokens, or to `model.generate` with all tokens. Use it as a context, or close
        it, to free its pages.
        """
        prompts = self._calls.prompts(input_ids, attention_mask, self._calls.pad_token())
        self.check_model()
        with self.memory.core_lock, uncompiled(self.model):
            past = self.opener.open(prompts, namespace, Pieces(self.prefill_tokens))
        past.made_for = self.memory.model_changes.version()
        return past

    def remember(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, namespace: Hashable = ""
    ) -> None:
        """Compute a prompt that later ones will begin with, such as a system prompt, so that the first of them is a
        hit."""
        one_more = input_ids[:, -1:]  # its last token is never computed, so it may be any token
        mask = None if attention_mask is None else torch.cat([attention_mask, attention_mask[:, -1:]], dim=1)
        self.past(torch.cat([input_ids, one_more], dim=1), mask, namespace=namespace).close()

    def session(self, namespace: Hashable = "") -> Session:
        """A new conversation."""
        return Session(partial(self.generate, namespace=namespace), self.model.device)

    def check_model(self) -> None:
        """Raise `BadCall` if this KVWeave is closed, or its pages do not fit the model any more."""
        if self.is_closed:
            raise BadCall("this KVWeave is closed: make another")
        wrapped(self._outermost)  # adapters added since may be of a kind that cannot be served
        now = self.model.dtype, self.model.device
        if now != self._made_for:
            (dtype, device), (was, there) = now, self._made_for
            raise BadCall(
                f"the model is {dtype} on {device} now; pages were made for {was} on {there}: close this KVWeave and"
                " make another"
            )
        config = config_digest(self.model.config)
        if config != self._config and examine(self.model).spec != self.served.spec:
            raise BadCall(
                "the model's config says by now that layers keep something else (a window, a chunk, their types) than"
                " pages were made for: undo that, or close this KVWeave and make another"
            )
        self._config = config

    # ---- the store, stats, and the end

    @property
    def store(self) -> BaseStore[Any] | None:
        """The store in use, if there is one."""
        return self._store_sync.store if self._store_sync else None

    def stats(self) -> WeaveStats:
        """Sums over all requests so far, and the core's current statistics."""
        usage = self._store_sync.usage() if self._store_sync else None
        return self.records.stats(self.core.stats(), usage, self._declined)

    def reset(self) -> None:
        """Drop everything that is cached."""
        with self.memory.core_lock:
            self.core.reset()

    @property
    def attends_in_place(self) -> bool:
        """Whether the attention of every layer, if there is any, reads pages where they lie; if not, rows are gathered
        for some."""
        return self.memory.attends_in_place

    @property
    def is_closed(self) -> bool:
        return bool(self.arena.is_closed)

    def close(self) -> None:
        """Remove the hooks from the model and free the memory; calling it twice is fine."""
        self._unhook()
        self.graphs.close()
        if self._store_sync and not self.is_closed:
            self._store_sync.close()
        self.arena.close()

    def __enter__(self) -> KVWeave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_for(
    served: Served, memory: int | str, block_tokens: int | Mapping[str, int], context: int | None = None
) -> Plan:
    """The plan for a model, layer-major: a layer's pages are gathered by themselves. `context` is a length that must
    fit."""
    return make_plan(served.spec, memory, block_tokens=block_tokens, layout="layer_major", context=context)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _record(prompts: Prompts, past: PagedCache, answer: Any, start: float) -> RequestRecord:
    end, sequences = time.perf_counter(), getattr(answer, "sequences", answer)
    new_tokens = (sequences.shape[1] - prompts.width) * len(sequences)
    first = (past.first_token_at or end) - start
    stored, saving = (past.store_batch.num_loaded, past.store_batch.save_seconds) if past.store_batch else (0, 0.0)
    reused = past.num_cached + stored
    return RequestRecord(len(prompts), prompts.num_tokens, reused, new_tokens, first, end - start, stored, saving)


def _record_fallback(ids: torch.Tensor, reason: str, answer: Any, start: float) -> RequestRecord:
    seconds = time.perf_counter() - start
    sequences = getattr(answer, "sequences", answer)  # of a loop of the user's own, it may be anything
    new_tokens = (sequences.shape[1] - ids.shape[1]) * len(sequences) if isinstance(sequences, torch.Tensor) else 0
    return RequestRecord(len(ids), ids.numel(), 0, new_tokens, seconds, seconds, fallback=reason)
