"""SHARING: a daemon without a GPU that owns an arena in shared memory and the tiers behind it; and its clients."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.server", "server"):
    from kvweave.server.client import Client
    from kvweave.server.daemon import Daemon
    from kvweave.server.description import Description
    from kvweave.server.remote_hit import PinnedHit, RemoteHit
    from kvweave.server.remote_store import RemoteStore
    from kvweave.server.report import Report
    from kvweave.server.settings import Disk, Limits, Settings, default_socket

__all__ = [
    "Client",
    "Daemon",
    "Description",
    "Disk",
    "Limits",
    "PinnedHit",
    "RemoteHit",
    "RemoteStore",
    "Report",
    "Settings",
    "default_socket",
]
