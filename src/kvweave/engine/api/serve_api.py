"""Serving an endpoint with uvicorn until a signal ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

GRACE_S = 30
"""How long answers under way may take after the first signal."""
ENDING_S = 10
"""How long it may take to end them."""


def serve_api(app: Starlette, host: str, port: int, end_answers: Callable[[], None]) -> None:
    """Blocks. SIGINT or SIGTERM lets answers under way end, for a while; then, or at a second signal, `end_answers` is
    called, which ends them with an error, and the server stops."""
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=GRACE_S + ENDING_S)
    _Server(config, end_answers).run()


class _Server(uvicorn.Server):  # type: ignore[misc]
    def __init__(self, config: uvicorn.Config, end_answers: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_answers = end_answers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In a thread: a signal may interrupt whoever holds the locks that ending answers needs."""
        ending = threading.Timer(0 if self.should_exit else GRACE_S, self._end_answers)
        ending.daemon = True
        ending.start()
        if self.should_exit:
            self._captured_signals.append(sig)
        else:
            super().handle_exit(sig, frame)
