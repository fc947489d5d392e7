"""Everything that depends on vLLM's version: its records in our words. A version that is not known is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import vllm
from vllm.distributed import get_pp_group
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvweave.copying import PayloadCopier
from kvweave.errors import CannotServe, KVWeaveError, StoreError
from kvweave.integrations.model_identity import config_digest, depends_on_length, weights_name
from kvweave.integrations.vllm.announced_blocks import AnnouncedBlocks, RemovedBlocks
from kvweave.integrations.vllm.binding import Binder
from kvweave.integrations.vllm.connector_settings import ConnectorSettings
from kvweave.integrations.vllm.engine_groups import EngineGroup, EngineLayer, saved_blocks
from kvweave.integrations.vllm.kernel_rows import KernelRows
from kvweave.integrations.vllm.layouts import ON_CPU
from kvweave.integrations.vllm.probe import WriteRows
from kvweave.integrations.vllm.request_keys import AdapterFile
from kvweave.integrations.vllm.running_saves import SavedRange
from kvweave.plan import Parallel
from kvweave.spec import Chunk, Full, ModelSpec, Reach, State, Window
from kvweave.spec.hf import from_config
from kvweave.store import Namespace, model_digest

log = logging.getLogger("kvweave.vllm")
T = TypeVar("T")
KNOWN_VERSIONS = ("0.32",)
REACHES: Mapping[type, Callable[[Any], Reach]] = {
    FullAttentionSpec: lambda _: Full(),
    MLAAttentionSpec: lambda _: Full(),
    SlidingWindowSpec: lambda spec: Window(spec.sliding_window + spec.extra_retained_tokens),
    ChunkedLocalAttentionSpec: lambda spec: Chunk(spec.attention_chunk_size),
    MambaSpec: lambda _: State(),
}
"""By the exact class: a subclass keeps its blocks by rules of its own."""


def check_engine(config: Any) -> None:
    """Raises `CannotServe` for a version or a mode that was never tried."""
    version = vllm.__version__
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise CannotServe(f"vLLM {version}", f"this version is not known here; known: {', '.join(KNOWN_VERSIONS)}")
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise CannotServe(f"{name}={getattr(parallel, name)}", "ranks divide the tokens of a request; take 1")
    if config.speculative_config is not None and config.speculative_config.method not in ("ngram", "suffix"):
        method = config.speculative_config.method
        raise CannotServe(f"speculative decoding by {method!r}", "its drafts have KV of their own; take ngram")


def recompute_failures(config: Any) -> bool:
    """Have vLLM recompute what could not be loaded; returns whether that was changed.

    By default it fails the request. The scheduler reads the policy after it has made its connector.
    """
    transfer = config.kv_transfer_config
    changed = bool(transfer.kv_load_failure_policy != "recompute")
    transfer.kv_load_failure_policy = "recompute"
    return changed


def engine_groups(cache_config: Any) -> tuple[EngineGroup, ...]:
    """The groups whose blocks can be shared; scratch groups are none."""
    groups = []
    for number in cache_config.prefix_cacheable_group_ids:
        group = cache_config.kv_cache_groups[number]
        specs = {type(spec): spec for spec in _layer_specs(group)}
        (kind, spec), *others = specs.items()
        if others or kind not in REACHES:
            names = ", ".join(kind.__name__ for kind in specs)
            raise CannotServe(f"group {number} of vLLM's", f"it keeps blocks by rules not known here: {names}")
        if kind is MambaSpec and spec.mamba_cache_mode != "align":
            raise CannotServe(
                f"a model whose states are kept in mode {spec.mamba_cache_mode!r}",
                "there are no snapshots at block boundaries; say --enable-prefix-caching --mamba-cache-mode align",
            )
        layers = tuple(group.layer_names)
        groups.append(EngineGroup(number, group.kv_cache_spec.block_size, REACHES[kind](spec), layers))
    return tuple(groups)


def _layer_specs(group: Any) -> list[Any]:
    """Also of a group that has no layer on this rank."""
    spec = group.kv_cache_spec
    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def engine_layers(
    config: Any, cache_config: Any, groups: Sequence[EngineGroup], caches: Mapping[str, Any]
) -> list[EngineLayer]:
    """The layers of this worker, with the tensors that vLLM registered for them."""
    modules, layers = config.compilation_config.static_forward_context, []
    for group in groups:
        for name in group.layers:
            raw, module = caches[name], modules[name]
            tensors = tuple(module.kv_cache) if group.is_state else (raw,)
            per_page = raw.shape[0] // cache_config.num_blocks
            kind = _state_kind(module, raw) if group.is_state else _attention_kind(module)
            layers.append(EngineLayer(name, extract_layer_index(name), kind, tensors, raw, per_page))
    return layers


def _state_kind(module: Any, cache: Any) -> str:
    return f"{module.mamba_type.name}{ON_CPU if cache.device.type == 'cpu' else ''}"


def _attention_kind(module: Any) -> str:
    backend = module.get_attn_backend().get_name()
    variant = getattr(module, "isa", None) or getattr(getattr(module, "impl", None), "isa", None)
    return f"{backend} {variant}" if variant else str(backend)


def binder(config: Any, chunk_tokens: int) -> Binder:
    return Binder(
        spec=_declared_spec(config),
        parallel=_parallel(config.parallel_config),
        version=vllm.__version__,
        channels_first=is_conv_state_dim_first(),
        chunk_tokens=chunk_tokens,
    )


def _parallel(parallel: Any) -> Parallel:
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return Parallel(tp=tp, tp_rank=parallel.rank % tp, pp=pp, pp_rank=parallel.rank // tp % pp)


def of_all_stages(own: T) -> list[T]:
    """What each pipeline stage has, this rank's own among them. Waits until all stages have called it."""
    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    every: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(every, own, group=group.cpu_group)
    return every


def stage_starts(config: Any, num_stages: int) -> list[int]:
    """The first layer of each pipeline stage, as vLLM divides them; 0: of as many as this engine has."""
    num_layers = config.model_config.get_total_num_hidden_layers()
    count = num_stages or config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(num_layers, stage, count)[0] for stage in range(count)]


def _declared_spec(config: Any) -> ModelSpec | None:
    try:
        return from_config(config.model_config.hf_config)
    except KVWeaveError as error:
        log.warning("the model's config does not say what its layers keep: %s", error)
        return None


def row_writer(config: Any) -> WriteRows:
    """Writes rows as the engine's own kernels do."""
    modules = config.compilation_config.static_forward_context
    return KernelRows(modules, config.model_config.dtype, channels_first=is_conv_state_dim_first()).write


# ---- the scheduler's side


class BlockPins:
    """Keeps blocks out of the free list, and gives them back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])


def namespace(config: Any, settings: ConnectorSettings, spec: ModelSpec) -> Namespace:
    """What is common to all requests of this engine."""
    model, cache = config.model_config, config.cache_config
    length = f" up to {model.max_model_len}" if depends_on_length(model.hf_config) else ""
    weights = _weights_name(config, settings)
    return Namespace(
        model_digest(spec),
        weights=weights if model.quantization is None else f"{weights} quantised {model.quantization}",
        rotary=config_digest(model.hf_config) + length,
        kv_dtype="" if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        multimodal=str(getattr(model, "mm_processor_kwargs", None) or ""),
    )


def _weights_name(config: Any, settings: ConnectorSettings) -> str:
    model = config.model_config
    if config.load_config.load_format == "dummy":
        return f"dummy {model.seed}"
    try:
        return weights_name(str(model.model), getattr(model.hf_config, "_commit_hash", None), settings.weights)
    except StoreError as error:
        raise StoreError(f'{error}; say "weights": NAME in kv_connector_extra_config') from None


def hit_source(tier: str) -> CacheHitSource:
    """vLLM's word for a tier."""
    known = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    return known.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


def publishes_events(config: Any) -> bool:
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def removed_events(removed: RemovedBlocks) -> Iterator[BlockRemoved]:
    for group, hashes in removed.items():
        yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=group, ownership="kvweave")


def stored_events(
    cache_config: Any, groups: Sequence[EngineGroup], saved: SavedRange, announced: AnnouncedBlocks
) -> Iterator[BlockStored]:
    """vLLM's events for what is stored now: its own block hashes, group by group."""
    prompt = saved.state.prompt
    for group in groups:
        spec = cache_config.kv_cache_groups[group.number].kv_cache_spec
        facts = {
            "block_size": group.block_tokens,
            "lora_id": None,
            "lora_name": saved.state.adapter,
            "medium": MEDIUM_STORAGE,
            "group_idx": group.number,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": getattr(spec, "sliding_window", None),
            "ownership": "kvweave",
        }
        for first, stop in saved_blocks(group, saved.start, saved.points):
            made = [_hash(cache_config, group, saved, block) for block in range(first - 1, stop)]
            tokens = list(saved.state.tokens[first * group.block_tokens : stop * group.block_tokens])
            announced.add(group, prompt.chunk_tokens, prompt.prefixes, first, made[1:])
            yield BlockStored(block_hashes=made[1:], parent_block_hash=made[0], token_ids=tokens, **facts)


def _hash(cache_config: Any, group: EngineGroup, saved: SavedRange, block: int) -> Any:
    """A group's block has the hash of its last tokens; before the first there is none."""
    if block < 0:
        return None
    last = (block + 1) * group.block_tokens // cache_config.hash_block_size - 1
    return maybe_convert_block_hash(saved.state.block_hashes[last])


def has_tokens(request: Any) -> bool:
    """Whether tokens say all of a prompt; embeddings do not."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def adapter_file(request: Any) -> AdapterFile | None:
    lora = request.lora_request
    return None if lora is None else AdapterFile(lora.lora_name, lora.lora_path)


def trace_path(config: Any, path: str) -> Path:
    """Where an engine records its requests: each of several data-parallel ones has a file of its own."""
    parallel, given = config.parallel_config, Path(path)
    if parallel.data_parallel_size == 1:
        return given
    return given.with_name(f"{given.stem}-{parallel.data_parallel_index}{given.suffix}")


def cached_tokens(output: Any) -> Iterator[tuple[str, int]]:
    """The requests that run for the first time in a step, with the tokens that were found for them."""
    return ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)


def computed_tokens(output: Any) -> Iterator[tuple[str, int]]:
    """The requests of a step, with the tokens computed before it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def copier(pools: Mapping[str, Any]) -> PayloadCopier | None:
    """For memory on a GPU; None on the host."""
    if all(isinstance(pool, np.ndarray) for pool in pools.values()):
        return None
    from kvweave.transfer.payload_copier import payload_copier  # noqa: PLC0415 - needs Triton

    return payload_copier(pools)
