"""MANY requests at once: continuous batching of transformers models over kvweave's pages."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.engine", "transformers"):
    from kvweave.engine.engine import Engine
    from kvweave.engine.engine_request import EngineRequest, Result
    from kvweave.engine.sampling import Sampling, TokenLogprobs
    from kvweave.engine.worker import EngineStats

__all__ = ["Engine", "EngineRequest", "EngineStats", "Result", "Sampling", "TokenLogprobs"]
