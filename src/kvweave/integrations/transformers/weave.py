"""KVWeave: pages under a transformers model, so that `generate` never computes a prefix twice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from kvweave.cache import Cache, Sequence
from kvweave.errors import BadTokens, MissingExtra
from kvweave.integrations.transformers.build import counts_padding, make_layer, takes_no_padding
from kvweave.integrations.transformers.layers.own import past_class
from kvweave.integrations.transformers.past import Past, Visit
from kvweave.integrations.transformers.prefill import prefill, retention
from kvweave.integrations.transformers.prompts import Prompt, Prompts, pad_token
from kvweave.integrations.transformers.record import Record, WeaveStats
from kvweave.integrations.transformers.session import Session
from kvweave.integrations.transformers.support import Served, examine
from kvweave.plan import Plan, plan
from kvweave.tensor import Arena

if TYPE_CHECKING:
    from kvweave.integrations.transformers.attach import Attached
    from kvweave.store import AnyStore

log = logging.getLogger(__name__)

DECLINED = "behind a prefix that was found it computes token by token, which takes longer than the prefix"
"""Why models whose scan starts afresh take nothing from a store."""


class KVWeave:
    """Serves one model from `memory` bytes of pages, planned from its config. One `generate` at a time, in any thread.

    `block_tokens` is how finely prefixes are found; prompts are computed `prefill_tokens` at once. What else a
    `kvweave.Cache` takes (policy, retention, rows, max_tokens) goes through. `close` gives the memory back.

    With a `store` (a directory, a URL, or one that is open: `kvweave.integrations.places`) prefixes outlive the process
    and are shared with others that have the same model; `weights` names its weights, which else are hashed. A request
    waits `store_wait_s` for the store at most, and as long again at its end.
    """

    def __init__(
        self,
        model: Any,
        memory: int | str = "2GiB",
        *,
        block_tokens: int | Mapping[str, int] = 16,
        prefill_tokens: int = 4096,
        store: str | Path | AnyStore[Any] | None = None,
        weights: str | None = None,
        store_wait_s: float = 5.0,
        **cache_options: Any,
    ) -> None:
        self.model = model
        self.served = examine(model)
        self.prefill_tokens = prefill_tokens
        self.plan = make_plan(self.served, memory, block_tokens)
        attached = self._attach(store)
        try:
            unit = 1
            if attached:
                self.plan, unit = make_plan(attached.served, memory, block_tokens), attached.store.schema.chunk_tokens
            self.core = Cache(self.plan, **{"retention": retention(self.served, unit), **cache_options})
            self.arena = Arena(self.plan, str(model.device))
            self._layers = [make_layer(type(model).__name__, self.arena, entry) for entry in self.served.entries]
            self._keeper = attached.keeper(model, self.core, self.arena, weights, store_wait_s) if attached else None
        except BaseException:
            if attached:
                attached.close()
            raise
        self._past_class = past_class(self.served.own_cache)
        self._counts_padding = counts_padding(self.served)
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        self._lock = threading.RLock()
        self.records: list[Record] = []

    def _attach(self, store: str | Path | AnyStore[Any] | None) -> Attached | None:
        """Open the store, or say why this model has no use for one."""
        self._declined = ""
        if store is None:
            return None
        if self.served.scans_afresh:
            log.warning("%s takes nothing from a store: %s", type(self.model).__name__, DECLINED)
            self._declined = DECLINED
            return None
        try:
            from kvweave.integrations.transformers.attach import attach  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("KVWeave(store=...)", "store", error.name) from error
        return attach(store, self.served, self.plan, type(self.model).__name__)

    # ---- generate

    def generate(
        self, *inputs: Any, attention_mask: torch.Tensor | None = None, namespace: Hashable = "", **options: Any
    ) -> Any:
        """`model.generate`, and its answer; what an earlier prompt or answer shares with these prompts is not computed.

        Takes `input_ids` (after the model, if you like) and the options of `model.generate`. `namespace` is what must
        be equal for a prefix to be shared: an adapter, a tenant.
        """
        ids = self._input_ids(inputs, options)
        start = time.perf_counter()
        with self._lock:
            prompts = Prompts.read(ids, attention_mask, pad_token(self.model, options))
            with self._open(prompts, namespace, options.pop("prefill_chunk_size", None)) as past:
                given = {"use_cache": True, **options, self.served.cache_name: past}
                answer = self.model.generate(ids, attention_mask=prompts.mask, **given)
            self.records.append(_record(prompts, past, answer, start))
        return answer

    def _input_ids(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        given = [item for item in inputs if item is not self.model]
        ids = given[0] if given else options.pop("input_ids", options.pop("inputs", None))
        others = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
        if len(given) > 1 or others or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise BadTokens(
                "generate takes input_ids [batch, tokens], and no other tensor than attention_mask: tokens are what a"
                f" prefix is found by; got {len(given)} inputs, {', '.join(others) or 'no other tensors'}"
            )
        return ids

    # ---- pasts

    def past(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, namespace: Hashable = ""
    ) -> Past:
        """All but the last token of each prompt, found or computed, as a transformers cache.

        Give it to the model with the last tokens, or to `model.generate` with all of them. It is a context: close it,
        so that its pages are free again.
        """
        return self._open(Prompts.read(input_ids, attention_mask, pad_token(self.model, {})), namespace)

    def session(self, namespace: Hashable = "") -> Session:
        """A conversation, empty yet."""
        return Session(partial(self.generate, namespace=namespace), self.model.device)

    def _open(self, prompts: Prompts, namespace: Hashable, prefill_tokens: int | None = None) -> Past:
        """Open a sequence a row and compute what is missing; all or nothing."""
        self.core.bind_thread()  # who generates owns the core meanwhile; the lock is ours
        if any(prompts.pads) and takes_no_padding(self.served):
            raise BadTokens("this model takes tokens several together, padding among them: prompts of one length only")
        sequences: list[Sequence] = []
        visit = self._keeper.visit() if self._keeper else None
        most = prefill_tokens or self.prefill_tokens
        try:
            for prompt in prompts.rows(namespace, self._counts_padding):
                sequence, points = visit.open(prompt) if visit else (self._open_one(prompt), ())
                sequences.append(sequence)
                on_point = partial(visit.capture, sequence) if visit else bool
                prefill(self.model, self.served, self._past([sequence]), prompt, most, points, on_point)
        except BaseException:
            for sequence in sequences:
                self.core.close(sequence)
            raise
        past = self._past(sequences, prompts.width - 1, visit)
        past.expects_prompts = True
        return past

    def _open_one(self, prompt: Prompt) -> Sequence:
        """A hit is taken, unless what is left would have to be computed token by token, and is long."""
        sequence = self.core.open(prompt.tokens, namespace=prompt.namespace)
        left = len(prompt.tokens) - sequence.num_cached
        if self.served.scans_afresh and sequence.num_cached and left > max(64, len(prompt.tokens) // 8):
            self.core.close(sequence, keep=False)
            sequence = self.core.open(prompt.tokens, namespace=prompt.namespace, reuse=False)
        return sequence

    def _past(self, sequences: list[Sequence], columns: int | None = None, visit: Visit | None = None) -> Past:
        columns = sequences[0].length if columns is None else columns
        past: Past = self._past_class(self.core, self.arena, self._layers, sequences, columns, visit)
        return past

    # ---- around the model's forward

    def _before(
        self, _model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any] | None:
        past = options.get(self.served.cache_name)
        if not isinstance(past, Past) or past.core is not self.core:
            return None
        ids = args[0] if args else options.get("input_ids")
        if ids is None:
            raise BadTokens("a past of kvweave needs input_ids: tokens are what a prefix is found by")
        if past.expects_prompts and ids.shape[1] > past.columns:
            args, options = (), self._without(past.columns, ids, options)
            ids = options["input_ids"]
        past.begin(ids)
        return args, options

    def _without(self, length: int, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """A first call with whole prompts, as some ways to generate make it: only what comes after `length` is new."""
        changed = {**options, "input_ids": ids[:, length:]}
        if changed.get("position_ids") is not None:
            changed["position_ids"] = changed["position_ids"][..., length:]
        if self.served.cache_name != "past_key_values":
            changed["attention_mask"] = None
        return changed

    def _after(self, _model: Any, _args: tuple[Any, ...], options: dict[str, Any], _output: Any) -> None:
        past = options.get(self.served.cache_name)
        if isinstance(past, Past) and past.core is self.core:
            past.finish()

    # ---- the store, stats, and the end

    @property
    def store(self) -> AnyStore[Any] | None:
        """The store that prefixes come from and go to, if there is one."""
        return self._keeper.store if self._keeper else None

    def stats(self) -> WeaveStats:
        """All requests so far, and the core's books of this moment."""
        use = self._keeper.use() if self._keeper else None
        return WeaveStats.of(self.records, self.core.stats(), use, self._declined)

    def reset(self) -> None:
        """Forget all that is cached."""
        self.core.reset()

    def close(self) -> None:
        """Take the hooks off the model and give the memory back; twice is once."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._keeper and not self.arena.is_closed:
            self._keeper.close()
        self.arena.close()

    def __enter__(self) -> KVWeave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_plan(
    served: Served, memory: int | str, block_tokens: int | Mapping[str, int], context: int | None = None
) -> Plan:
    """Layer-major, for a layer's pages are gathered by themselves; `context` is a length that must fit."""
    return plan(served.spec, memory, block_tokens=block_tokens, layout="layer_major", context=context)


def _record(prompts: Prompts, past: Past, answer: Any, start: float) -> Record:
    end, sequences = time.perf_counter(), getattr(answer, "sequences", answer)
    new_tokens = (sequences.shape[1] - prompts.width) * len(sequences)
    first = (past.first_token_at or end) - start
    stored, saving = (past.visit.num_loaded, past.visit.save_seconds) if past.visit else (0, 0.0)
    reused = past.num_cached + stored
    return Record(len(prompts), prompts.num_tokens, reused, new_tokens, first, end - start, stored, saving)
