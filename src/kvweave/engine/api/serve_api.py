"""Serving an endpoint with uvicorn until a signal ends it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from kvweave.errors import BadOption

GRACE_S = 30
"""How long answers under way may take after the first signal."""
ENDING_S = 10
"""How long it may take to end them."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, on which nobody listens yet. Raises `BadOption`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise BadOption(f"cannot listen on {host}, port {port}: {str(error).rstrip('.')}; choose another") from error
    return bound


def serve_api(app: Starlette, address: socket.socket, end_answers: Callable[[], None]) -> None:
    """Blocks, and closes the socket. SIGINT or SIGTERM lets answers under way end, for a while; then, or at a second
    signal, `end_answers` is called, which ends them with an error, and the server stops."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S + ENDING_S)
    _Server(config, end_answers).run(sockets=[address])


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
