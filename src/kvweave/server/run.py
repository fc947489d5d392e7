"""Runs a daemon until it is stopped: signals, systemd notification, and logging."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket

from kvweave.server.daemon import Daemon
from kvweave.server.polling import runner
from kvweave.server.settings import Settings

log = logging.getLogger("kvweave.server")


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then drain, and return."""
    with runner(settings.poll_s) as loop:
        is_stuck = loop.run(_run(settings))
    if is_stuck:  # a thread that hangs in a tier would keep the process alive
        logging.shutdown()
        os._exit(0)


async def _run(settings: Settings) -> bool:
    """Run; returns whether a tier hung at the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop, signal.Signals(number).name)
    async with Daemon(settings) as daemon:
        # What was imported and opened stays. A full garbage collection that visits it stops everything for 30 ms.
        gc.collect()
        gc.freeze()
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
    log.info("stopped")
    return daemon.is_stuck


def _stop(event: asyncio.Event, name: str) -> None:
    log.info("%s: stopping", name)
    event.set()


def notify(state: str) -> None:
    """Notify systemd (sd_notify), if it started this process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    where = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        try:
            out.sendto(state.encode(), where)
        except OSError as error:
            log.warning("cannot tell %s that %s: %s", address, state, error)
