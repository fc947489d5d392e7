"""kvweave: a KV-cache engine for LLMs whose layers differ."""

__version__ = "0.1.0.dev0"
