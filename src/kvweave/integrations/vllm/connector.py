"""The connector: vLLM's calls, handed to the scheduler's and the worker's side."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvweave.errors import CannotServe
from kvweave.integrations.engine_store import close_engine_store, open_engine_store
from kvweave.integrations.vllm import adapter
from kvweave.integrations.vllm.announced_blocks import AnnouncedBlocks, RemovalFollower, groups_of_shards
from kvweave.integrations.vllm.binding import Bound, join_stages
from kvweave.integrations.vllm.connector_metrics import ConnectorPromMetrics, ConnectorStats
from kvweave.integrations.vllm.connector_settings import ConnectorSettings, RequestSettings
from kvweave.integrations.vllm.engine_groups import EngineLayer, chunk_tokens
from kvweave.integrations.vllm.probe import prove
from kvweave.integrations.vllm.request_keys import NamespaceMaker, spans_of
from kvweave.integrations.vllm.request_state import RequestState
from kvweave.integrations.vllm.running_saves import RunningSaves
from kvweave.integrations.vllm.scheduler_side import Scheduled, SchedulerSide
from kvweave.integrations.vllm.step_messages import StepJobs, WorkerReport
from kvweave.integrations.vllm.trace_recorder import RecordedRequest, TraceRecorder
from kvweave.integrations.vllm.worker_side import WorkerSide
from kvweave.spec import ModelSpec
from kvweave.store import PagePayloads, Schema

log = logging.getLogger("kvweave.vllm")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    jobs: StepJobs


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: WorkerReport

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.report.add(other.report))


@dataclass
class StoredSpec(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the workers store: the scheduler's side looks up the same."""

    spec: ModelSpec
    chunk_tokens: int
    tags: frozenset[tuple[str, str]]
    """Of this worker (`Bound.tags`)."""


class KVWeaveConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefixes of every hybrid model in a store of kvweave's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adapter.check_engine(vllm_config)
        self._config = vllm_config
        self._settings = ConnectorSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._groups = adapter.engine_groups(kv_cache_config)
        self._chunk_tokens = self._settings.chunk_tokens or chunk_tokens(self._groups)
        transfer = vllm_config.kv_transfer_config
        done = {"skip_save": transfer.is_kv_producer, "skip_load": transfer.is_kv_consumer}
        self._skipped: dict[str, Any] = {name: True for name, is_done in done.items() if not is_done}
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._recorder: TraceRecorder | None = None
        self._stored: StoredSpec | None = None
        if role is KVConnectorRole.SCHEDULER and adapter.recompute_failures(vllm_config):
            log.warning(
                'kv_load_failure_policy was "fail", by which a blob lost in a store fails a request: it is "recompute"'
                " now. Say so in --kv-transfer-config"
            )

    # ---- start

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Bind this worker's tensors, prove their layouts, and open the store."""
        layers = adapter.engine_layers(self._config, self._kv_cache_config, self._groups, kv_caches)
        bound = self._bind(layers)
        if self._chunk_tokens % bound.unit_tokens:
            self._chunk_tokens = math.lcm(self._chunk_tokens, bound.unit_tokens)
            bound = self._bind(layers)
        for layer in bound.opaque:
            log.warning("%s (%s) is stored as opaque pages: only the same kernel, block size, degree and version of"
                        " vLLM can read them", layer.name, layer.kind)  # fmt: skip
        schema = self._schema(bound.spec)
        pages = PagePayloads(schema, bound.memory, adapter.copier(bound.memory.pools))
        proved = prove(schema, pages, bound, self._groups, layers, adapter.row_writer(self._config))
        log.info("%d layouts of %d layers proved; %d layers are opaque", proved, len(layers), len(bound.opaque))
        self._stored, self._store = StoredSpec(bound.spec, self._chunk_tokens, bound.tags), self._open(schema)
        self._worker = WorkerSide(self._settings, self._store, pages)

    def _bind(self, layers: Sequence[EngineLayer]) -> Bound:
        """This worker's memory, with the spec of the whole model."""
        try:
            bound = adapter.binder(self._config, self._chunk_tokens).bind(self._groups, layers)
        except Exception:
            adapter.of_all_stages(None)  # they wait for this one
            raise
        specs: list[ModelSpec | None] = adapter.of_all_stages(bound.spec)
        if None in specs:
            raise CannotServe(f"pipeline stage {specs.index(None)}", "its memory could not be bound; see its log")
        return replace(bound, spec=join_stages([spec for spec in specs if spec]))

    def _schema(self, spec: ModelSpec) -> Schema:
        settings = self._settings
        stages = adapter.stage_starts(self._config, settings.stages)
        return Schema.of(spec, chunk_tokens=self._chunk_tokens, parts=settings.parts, stages=stages, tails=True)

    def _open(self, schema: Schema) -> Any:
        model = str(self._config.model_config.model)
        return open_engine_store(self._settings.store, self._settings.socket, schema, model)

    def get_handshake_metadata(self) -> StoredSpec | None:
        return self._stored

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], StoredSpec]) -> None:
        specs = {(each.spec, each.chunk_tokens) for each in metadata.values()}
        if len(specs) != 1:
            raise CannotServe(f"an engine of {len(metadata)} workers", f"they store {len(specs)} different specs")
        ((spec, self._chunk_tokens),) = specs
        self._namespaces = NamespaceMaker(adapter.namespace(self._config, self._settings, spec))
        schema = self._schema(spec)
        self._store = self._open(schema)
        saves = RunningSaves(self._pins.pin, self._pins.unpin, len(metadata))
        if adapter.publishes_events(self._config):
            saves.keep_saved = True
            tags = frozenset[tuple[str, str]]().union(*(each.tags for each in metadata.values()))
            self._announced = AnnouncedBlocks(groups_of_shards(schema, self._groups, tags))
            self._removals = RemovalFollower(self._store)
        self._scheduler = SchedulerSide(self._settings, self._store, self._groups, saves)
        if self._settings.record:
            self._recorder = TraceRecorder(adapter.trace_path(self._config, self._settings.record))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pins = adapter.BlockPins(gpu_block_pool)

    # ---- scheduler's side

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is None or not adapter.has_tokens(request):
            return
        settings, wrong = RequestSettings.of(request.kv_transfer_params, self._settings.tenant)
        for complaint in wrong:
            log.warning("request %s: not understood: %s", request.request_id, complaint)
        if self._skipped:
            settings = replace(settings, **self._skipped)
        lora = adapter.adapter_file(request)
        namespace = self._namespaces.of(settings, request.cache_salt, lora)
        spans, length, name = spans_of(request.mm_features), request.num_prompt_tokens, lora.name if lora else None
        prompt = self._store.prompt(request.prompt_token_ids, namespace, spans)
        if self._recorder:
            recorded = RecordedRequest(request.all_token_ids, length, namespace.fingerprint.hex(), spans)
            self._recorder.begin(request.request_id, recorded)
        state = RequestState(settings, request.all_token_ids, length, prompt, request.block_hashes, name)
        self._scheduler.add(request.request_id, state)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._scheduler.match(request.request_id, num_computed_tokens) if self._scheduler else 0
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler and num_external_tokens:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata(StepJobs())
        if self._recorder:
            for request, num_cached in adapter.cached_tokens(scheduler_output):
                self._recorder.scheduled(request, num_cached)
        blocks = scheduler_output.kv_connector_block_state
        scheduled = (
            Scheduled(request, computed, scheduler_output.num_scheduled_tokens[request])
            for request, computed in adapter.computed_tokens(scheduler_output)
        )
        return StepMetadata(self._scheduler.step(scheduled, blocks.get_block_ids, blocks.boundary_state_offloads))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        self._scheduler.stepped()
        if isinstance(meta := connector_output.kv_connector_worker_meta, WorkerMetadata):
            self._scheduler.report(meta.report)
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        if self._scheduler:
            self._scheduler.finished(request.request_id)
        if self._recorder:
            self._recorder.end(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """The weights may have changed: from now on nothing is shared with what was stored before."""
        if self._scheduler:
            self._namespaces.forget()
        return True

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping: what has ended is reported in a step, and pins and events wait for it."""
        return self._scheduler is not None and bool(self._scheduler.saves)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.saves.has_pins

    def take_events(self) -> Iterable[Any]:
        if self._scheduler is None or not self._scheduler.saves.keep_saved:
            return ()
        saved, self._scheduler.saves.saved = self._scheduler.saves.saved, []
        events: list[Any] = []
        for each in saved:
            events += adapter.stored_events(self._kv_cache_config, self._groups, each, self._announced)
        if removals := self._removals.take():
            gone = self._announced.removed(removals.keys) if removals.complete else self._announced.everything()
            events += adapter.removed_events(gone)
        return [*events, *adapter.removed_events(self._announced.forgotten())]

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        return {adapter.hit_source(self._scheduler.source_of(request.request_id)): num_external_tokens}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Groups whose blocks a load writes completely; of a window's first block it writes the end only, and what
        lies before must be zeros, not what another layer left there."""
        return tuple(group.number for group in self._groups if group.reach.span is None)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counts = self._scheduler.take_counts() if self._scheduler else {}
        return ConnectorStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(*args)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker:
            self._worker.start_loads(self._jobs.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves begin after the forward pass."""

    def wait_for_save(self) -> None:
        if self._worker:
            self._worker.start_saves(self._jobs.saves)

    @property
    def _jobs(self) -> StepJobs:
        jobs: StepJobs = self._get_connector_metadata().jobs
        return jobs

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        ended, failed = self._worker.take_loads() if self._worker else (set(), set())
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        report = self._worker.take_report() if self._worker else WorkerReport()
        return None if report.is_empty else WorkerMetadata(report)

    def shutdown(self) -> None:
        if self._recorder:
            self._recorder.close()
        if self._scheduler or self._worker:
            close_engine_store(self._store)
