"""Serving an endpoint with uvicorn until a signal ends it."""

from __future__ import annotations

import uvicorn
from starlette.applications import Starlette

GRACE_S = 30
"""How long answers under way may take after the first signal."""


def serve_api(app: Starlette, host: str, port: int) -> None:
    """Blocks. SIGINT or SIGTERM lets answers under way end, for a while; then the engine is closed."""
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run()
