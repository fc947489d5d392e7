"""Serving an endpoint with uvicorn until a signal ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

GRACE_S = 30
"""How long answers under way may take after the first signal."""


def serve_api(app: Starlette, host: str, port: int, end_answers: Callable[[], None]) -> None:
    """Blocks. SIGINT or SIGTERM lets answers under way end, for a while; then the engine is closed. A second signal
    calls `end_answers`, so that the wait is over."""
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    _Server(config, end_answers).run()


class _Server(uvicorn.Server):  # type: ignore[misc]
    def __init__(self, config: uvicorn.Config, end_answers: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_answers = end_answers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # in a thread: a signal may interrupt whoever holds the locks that this needs
            threading.Thread(target=self._end_answers, daemon=True).start()
            self._captured_signals.append(sig)
        else:
            super().handle_exit(sig, frame)
