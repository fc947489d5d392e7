"""Inside vLLM: `kv_connector="KVWeaveConnector"`, `kv_connector_module_path="kvweave.integrations.vllm"`."""

from kvweave.integrations.vllm.connector import KVWeaveConnector

__all__ = ["KVWeaveConnector"]
