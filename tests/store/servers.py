"""Real servers on loopback: Redis, a Redis cluster, one that speaks S3. They are started, killed, started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def installed(name: str, how: str) -> str:
    """Where a program is; a test that needs one that is not there is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: {how}")
    return found


def free_port(most: int = 65535) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= most:
            return port


def wait_until(happens: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


NO_MOONCAKE = "Mooncake is not installed: pip install 'kvweave[mooncake]', apt-get install libibverbs1 librdmacm1"


class Server(ABC):
    """A process that listens on a port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    def start(self) -> None:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self.command(), **quiet)
        wait_until(lambda: answers(self.port), f"{self.command()[0]} answers")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections, and answers nothing."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.start()
            yield
        finally:
            self.kill()


class MooncakeMaster(Server):
    """Knows which client holds what."""

    def command(self) -> list[str]:
        binary = installed("mooncake_master", "pip install 'kvweave[mooncake]'")
        return [binary, f"--rpc_port={self.port}", f"--metrics_port={free_port()}"]


class Redis(Server):
    """A redis-server without persistence, or with it (`--appendonly yes`)."""

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__()
        self._binary = installed("redis-server", "apt-get install redis-server")
        self._directory, self._options = directory, options
        self.url = f"redis://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        return [self._binary, *place, "--save", "", *self._options]


class RedisCluster:
    """Three masters that share the slots, without replicas."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._client = installed("redis-cli", "apt-get install redis-tools")
        self.nodes: list[Redis] = []
        for number in range(3):
            (folder := directory / str(number)).mkdir()
            bus = ("--cluster-port", str(free_port()), "--cluster-node-timeout", "500")
            self.nodes.append(Redis(folder, "--cluster-enabled", "yes", *bus, *options))
        self.url = self.nodes[1].url

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            for node in self.nodes:
                node.start()
            places = [f"127.0.0.1:{node.port}" for node in self.nodes]
            made = subprocess.run(
                [self._client, "--cluster", "create", *places, "--cluster-yes"], capture_output=True, check=False
            )
            assert not made.returncode, made.stdout
            wait_until(self.is_whole, "the nodes agree")
            yield
        finally:
            for node in self.nodes:
                node.kill()

    def is_whole(self) -> bool:
        return all("cluster_state:ok" in self._info(node) for node in self.nodes)

    def _info(self, node: Redis) -> str:
        command = [self._client, "-p", str(node.port), "cluster", "info"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


class S3(Server):
    """A server that speaks S3 (moto's), with one bucket. It keeps nothing over a restart."""

    bucket = "kvweave-tests"

    def __init__(self) -> None:
        super().__init__()
        self._binary = installed("moto_server", "pip install 'moto[s3]' flask flask-cors")
        self.url, self.endpoint = f"s3://{self.bucket}/kv", f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        account = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1", "endpoint": self.endpoint}
        return {**account, "client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}

    @property
    def environment(self) -> dict[str, str]:
        """The same, as the clouds' own tools take it."""
        account = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        return account | {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true"}

    def command(self) -> list[str]:
        return [self._binary, "--host", "127.0.0.1", "--port", str(self.port)]

    def start(self) -> None:
        super().start()
        wait_until(self._has_bucket, "there is a bucket")

    def _has_bucket(self) -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT"))
        except urllib.error.URLError:
            return False
        return True
