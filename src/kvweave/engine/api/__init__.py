"""An OpenAI-compatible endpoint over an engine. Needs `kvweave[api]`."""
