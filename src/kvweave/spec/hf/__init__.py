"""Any Hugging Face config.json -> a model spec. Needs neither torch nor transformers."""

from kvweave.spec.hf.reader import from_config

__all__ = ["from_config"]
