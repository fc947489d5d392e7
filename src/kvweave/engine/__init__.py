"""MANY requests at once: continuous batching of transformers models over kvweave's pages."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.engine", "transformers"):
    from kvweave.engine.engine import Engine, EngineStats
    from kvweave.engine.engine_request import EngineRequest, Result
    from kvweave.engine.sampling import Sampling, TokenLogprobs

__all__ = ["Engine", "EngineRequest", "EngineStats", "Result", "Sampling", "TokenLogprobs"]
