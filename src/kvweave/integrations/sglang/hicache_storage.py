"""A storage backend for SGLang's HiCache: pages of its host pools in a store of kvweave's, under SGLang's own keys.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvweave",
        "module_path": "kvweave.integrations.sglang", "class_name": "KVWeaveStorage", "interface_v1": 1,
        "kvweave": {"socket": "/run/user/1000/kvweave.sock"}}'

SGLang's keys are chains of SHA-256 over tokens, seeded with the request's salt and LoRA; the namespace adds the model,
its weights and the tenant. Calls may wait, up to `timeout_s`: SGLang makes them in threads of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvweave.errors import BadOption, CannotServe, KVWeaveError, StoreError
from kvweave.integrations.engine_store import close_engine_store, open_engine_store
from kvweave.integrations.keyed_pages import page_prompt, page_schema, promised
from kvweave.integrations.model_identity import weights_name
from kvweave.integrations.sglang.host_pages import HostPages, shared_rank
from kvweave.integrations.sglang.restorable_lengths import Flags, leading, longest, restorable
from kvweave.integrations.sglang.storage_settings import StorageSettings
from kvweave.store import HashedPrompt, Namespace

log = logging.getLogger("kvweave.sglang")


class KVWeaveStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of every registered host pool. What fails is a page that is not there; nothing is raised to SGLang."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002 - SGLang's signature
        self._config = storage_config
        self._settings = StorageSettings.of(storage_config.extra_config)
        model = str(storage_config.model_name or "")
        weights = _weights_name(model, self._settings.weights)
        self._namespace = Namespace(f"sglang {model}", weights, tenant=self._settings.tenant)
        self._store: Any = None
        self._pools: dict[str, HostPages] = {}
        self.registered_pools: dict[Any, Any] = {}

    def on_host_pools_registered(self) -> None:
        """All pools are known: their pages' sizes are the store's schema."""
        pools = {str(name): pool for name, pool in ({PoolName.KV: self.mem_pool_host} | self.registered_pools).items()}
        self._pools = {name: HostPages(name, pool, shared_rank(self._config, name)) for name, pool in pools.items()}
        schema = page_schema(pages.kind for pages in self._pools.values())
        self._shards = {shard.tag: number for number, shard in enumerate(schema.shards)}
        self._store = open_engine_store(
            self._settings.store, self._settings.socket, schema, str(self._config.model_name)
        )

    # ---- what there is

    def _prompt(self, keys: Sequence[str]) -> HashedPrompt:
        return page_prompt([bytes.fromhex(key) for key in keys], self._namespace)

    def _present(self, keys: Sequence[str]) -> dict[str, Flags]:
        """By pool: which pages there are. A store that does not answer has none."""
        try:
            asked = self._store.submit_lookup([self._prompt(keys)], lease=False, budget_s=self._settings.timeout_s)
            (hit,) = asked.result(self._settings.timeout_s)
        except (KVWeaveError, OSError) as error:
            log.warning("a lookup of %d pages failed, and is a miss: %r", len(keys), error)
            return {name: np.zeros(len(keys), bool) for name in self._pools}
        return {name: hit.present[number] for name, number in self._shards.items()}

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:  # noqa: ARG002
        present = self._present(keys)
        num_kv = leading(present[PoolName.KV])
        hits = {PoolName.KV: num_kv} if num_kv else {}
        lengths = np.ones(num_kv, bool)
        for transfer in pool_transfers or ():
            pages = present.get(str(transfer.name), np.zeros(len(keys), bool))[:num_kv]
            own = restorable(pages, _num_trailing(transfer))
            lengths &= own
            hits |= {transfer.name: longest(own)} if own.any() else {}
        return PoolTransferResult(longest(lengths), hits, (np.flatnonzero(lengths) + 1).tolist())

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        return leading(self._present(keys)[PoolName.KV])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # ---- moving pages

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        return {transfer.name: self._get(transfer.name, transfer.keys, transfer.host_indices) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        return {transfer.name: self._set(transfer.name, transfer.keys, transfer.host_indices) for transfer in transfers}

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._set(PoolName.KV, keys, host_indices)

    def _get(self, name: Any, keys: list[str] | None, host_indices: Any) -> list[bool]:
        """Fill pages up to the first that is not there; none behind it counts."""
        keys = keys or []
        if (first := self._first_tokens(name, keys, host_indices)) is None:
            return [False] * len(keys)
        try:
            number, sink = self._shards[str(name)], self._pools[str(name)].sink(first)
            hit = promised(self._store, self._prompt(keys))
            moved = self._store.load(hit, sink, shards=[number], budget_s=self._settings.timeout_s)
        except (KVWeaveError, OSError) as error:
            log.warning("a load of %d pages of %s failed: %r", len(keys), name, error)
            moved = 0
        return [page < moved for page in range(len(keys))]

    def _set(self, name: Any, keys: list[str] | None, host_indices: Any) -> list[bool]:
        keys = keys or []
        if (first := self._first_tokens(name, keys, host_indices)) is None:
            return [False] * len(keys)
        number, source = self._shards[str(name)], self._pools[str(name)].source(first)
        save = self._store.submit_save(self._prompt(keys), source, shards=[number], budget_s=self._settings.timeout_s)
        try:
            save.result(self._settings.timeout_s)
        except (KVWeaveError, OSError) as error:
            log.warning("a save of %d pages of %s failed: %r", len(keys), name, error)
            return [False] * len(keys)
        lost = {page for _, page in save.failed}
        return [page not in lost for page in range(len(keys))]

    def _first_tokens(self, name: Any, keys: Sequence[str], host_indices: Any) -> Sequence[int] | None:
        """Where the pages lie; None, with a word in the log, for a pool or indices that do not fit."""
        if (pages := self._pools.get(str(name))) is None:
            log.warning("host pool %s was registered late: its pages are not stored", name)
            return None
        if (first := pages.first_tokens(len(keys), host_indices)) is None:
            log.error("host pool %s: %d keys, but indices of other pages", name, len(keys))
        return first

    # ---- what the interface has besides

    def clear(self) -> bool:
        """Other engines may be using what is stored: `kvweave clear` removes it, this does not."""
        log.warning("the store was not cleared, since others may share it: `kvweave clear` does that")
        return False

    def close(self) -> None:
        if self._store is not None:
            close_engine_store(self._store)
            self._store = None

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:  # noqa: ARG002
        raise BadOption('pages are moved by batch_get_v1 and batch_get_v2: say "interface_v1": 1')

    batch_get = set = batch_set = get
    """Never called with `interface_v1`."""


def _num_trailing(transfer: Any) -> int | None:
    """How many pages at the end a pool needs; None: all."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return None
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    raise CannotServe(f"host pool {transfer.name}", f"its pages hit by a rule not known here: {transfer.hit_policy}")


def _weights_name(model: str, given: str) -> str:
    try:
        return weights_name(model, None, given)
    except StoreError:  # a repository's name: SGLang itself knows models by name only
        return f"name {model}"
