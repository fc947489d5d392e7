"""The arena is registered for DMA by processes that use CUDA, and ordinary memory in all others."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvweave.server import Client, protocol
from kvweave.server.dma import PORTABLE, READ_ONLY, DMARegistration
from tests.server.models import serving, settings


class Cuda:
    """What is asked of `torch.cuda`, and what was done."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.devices, self.flags = code, dict[int, int](), list[int](), list[int]()
        self.is_available: Callable[[], bool] = lambda: True
        self.is_initialized: Callable[[], bool] = lambda: True
        self.current_device: Callable[[], int] = lambda: 3
        self.synchronize: Callable[[], None] = lambda: None

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        self.devices.append(number)
        yield

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.flags.append(flags)
        if not self.code:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_connection_registers_the_whole_arena_and_its_end_undoes_it(tmp_path: Path, cuda: Cuda) -> None:
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        until(lambda: client.is_registered)
        assert cuda.registered == {client.arena.ctypes.data: client.arena.nbytes}
        assert (cuda.devices, cuda.flags) == ([3], [PORTABLE])
        assert client.register()  # it is already
        client.close()
        assert not cuda.registered
        assert not client.is_registered
        client.ask(protocol.Ping(), protocol.Done)  # connects anew
        until(lambda: client.is_registered)
    assert not cuda.registered


def test_an_arena_that_can_only_be_read_is_registered_as_such_and_the_inbox_beside_it(
    tmp_path: Path, cuda: Cuda
) -> None:
    with serving(settings(tmp_path, inbox=1 << 20)):
        client = Client(tmp_path / "kv.sock")
        until(lambda: client.is_registered and len(cuda.registered) == 2)
        assert sorted(cuda.flags) == [PORTABLE, PORTABLE | READ_ONLY]
        assert client.mapped.inbox.ctypes.data in cuda.registered
        client.close()
        assert not cuda.registered


def test_an_arena_that_is_lost_stays_registered_while_somebody_may_copy_from_it(tmp_path: Path, cuda: Cuda) -> None:
    with serving(settings(tmp_path)):
        client = Client(tmp_path / "kv.sock", cool_s=0.0)
        until(lambda: client.is_registered)
        held = client.arena[:100]
    with serving(settings(tmp_path)):
        client.ask(protocol.Ping(), protocol.Done)
        until(lambda: client.is_registered)
        assert len(cuda.registered) == 2
        assert held.ctypes.data in cuda.registered
        del held
        assert [*cuda.registered] == [client.arena.ctypes.data]
        client.close()


def test_a_process_that_came_to_cuda_later_may_register_then(tmp_path: Path, cuda: Cuda) -> None:
    cuda.is_initialized = lambda: False
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        assert not client.is_registered
        assert client.register(1)
        assert cuda.devices == [1]


def test_memory_that_cuda_refuses_is_ordinary_memory_and_a_line_in_the_log(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.code, memory = 2, np.zeros(1 << 16, np.uint8)
    registration = DMARegistration(memory)
    with caplog.at_level(logging.WARNING):
        assert not registration.register(0)
    assert "cannot register memory (code 2)" in caplog.text
    registration.close()


def test_nothing_is_registered_after_the_end(cuda: Cuda) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    registration = DMARegistration(memory)
    registration.close()
    assert not registration.register(0)
    assert not cuda.registered


def test_memory_that_is_gone_is_registered_no_more(cuda: Cuda) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    registration = DMARegistration(memory)
    assert registration.register(0)
    part = memory[100:200]
    del memory
    assert cuda.registered
    del part
    assert not cuda.registered


def test_torch_is_not_loaded_for_it(tmp_path: Path) -> None:
    code = f"import sys; from kvweave.server import Client; Client({str(tmp_path / 'kv.sock')!r}); "
    with serving(settings(tmp_path)):
        command = [sys.executable, "-c", code + "print('torch' in sys.modules)"]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert told.stdout == b"False\n"
