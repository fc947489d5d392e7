# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""Checksums of payloads in staging memory: the XXH3 of each part, computed by one program each, as the host does.

XXH3 adds the products of 16 stripes of 64 bytes to eight lanes, scrambles these, and goes on; at the end the lanes are
folded into one number. The stripes of a block are added at once: only the scrambling has an order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvweave.copying import PART_BYTES, Bytes, PartChecksums
from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.kernel import Kernel

SIZES = PART_BYTES // 8, 1024
"""Words of a part, and of a step in which a last part is copied."""
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's own."""
LAST_SECRET, FOLD_SECRET = 121, 11
"""Where in it the keys of the last stripe begin, and those of the lanes at the end."""


@triton.jit
def _products(words, keys):
    """What stripes `[STRIPES, 8]` add to the lanes; neighbours get each other's words."""
    keyed = words ^ keys
    product = tl.sum((keyed & 0xFFFFFFFF) * (keyed >> 32), 0)
    even, odd = tl.split(tl.reshape(tl.sum(words, 0), (4, 2)))
    return product + tl.reshape(tl.join(odd, even), (8,))


@triton.jit
def _numbers(pointer):
    return tl.load(pointer).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["parts", "payload_words", "payload_out", "last_words"])
def sum_parts(flat, secret, out, parts, payload_words, payload_out, last_words, PART: tl.constexpr, COPY: tl.constexpr):
    """Program (p, i) writes the XXH3 of part i of payload p to `out`, where a payload has `payload_out` numbers. Behind
    `parts` sums come the `last_words` of a last part of another length, as they are: the host sums it.

    `secret` holds 24 words of XXH3's secret, 8 for the last stripe, 8 for the end, and the first lanes.
    """
    payload, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flat += payload * payload_words + part * PART
    out += payload * payload_out + part
    if part == parts:
        for start in range(0, last_words, COPY):
            at = start + tl.arange(0, COPY)
            tl.store(out + at, tl.load(flat + at, mask=at < last_words), mask=at < last_words)
    else:
        lane, stripe = tl.arange(0, 8), tl.arange(0, 16)
        places = stripe[:, None] * 8 + lane[None, :]
        keys, scrambling = _numbers(secret + stripe[:, None] + lane[None, :]), _numbers(secret + 16 + lane)
        last_keys = tl.where(stripe[:, None] < 15, keys, _numbers(secret + 24 + lane)[None, :])
        lanes = _numbers(secret + 40 + lane)
        for start in tl.static_range(0, PART - 128, 128):
            lanes += _products(_numbers(flat + start + places), keys)
            lanes = (lanes ^ (lanes >> 47) ^ scrambling) * 0x9E3779B1
        lanes += _products(_numbers(flat + PART - 128 + places), last_keys)
        one, other = tl.split(tl.reshape(lanes ^ _numbers(secret + 32 + lane), (4, 2)))
        folded = tl.sum((one * other) ^ tl.umulhi(one, other), 0)
        folded += _numbers(secret + 48)
        folded = (folded ^ (folded >> 37)) * 0x165667919E3779F9
        tl.store(out, (folded ^ (folded >> 32)).to(tl.int64, bitcast=True))


@cache
def _compiled(device: int) -> Kernel:  # noqa: ARG001  (kernels belong to a device)
    return Kernel(sum_parts.warmup(*[torch.int64] * 3, 0, 0, 0, 0, *SIZES, num_warps=1, grid=(1,)))


@cache
def _secret_on(device: int) -> torch.Tensor:
    return secret_words().to(f"cuda:{device}")


def secret_words() -> torch.Tensor:
    """What `sum_parts` takes as `secret`."""
    first = (0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    then = (0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1)
    ends = [SECRET[at : at + 64] for at in (LAST_SECRET, FOLD_SECRET)]
    begin = np.array([*first, *then, PART_BYTES * first[1] % (1 << 64)], "<u8")
    return torch.from_numpy(np.frombuffer(SECRET + b"".join(ends) + begin.tobytes(), np.int64).copy())


class ChecksumLayout(NamedTuple):
    """What is found of payloads of one length: for each the sums of `parts`, and `last_bytes` of a last part that is of
    another length, in whole words."""

    payload_bytes: int

    @property
    def last_bytes(self) -> int:
        """Of the last part, if it is not as long as the others."""
        over = self.payload_bytes % PART_BYTES
        return over + PART_BYTES * (self.payload_bytes > PART_BYTES) if over or not self.payload_bytes else 0

    @property
    def parts(self) -> int:
        return (self.payload_bytes - self.last_bytes) // PART_BYTES

    @property
    def words(self) -> int:
        return self.parts + self._last_words

    @property
    def _last_words(self) -> int:
        return -(-self.last_bytes // 8)

    def launch(self, commands: CommandBuffer, payloads: int, flat: int, out: int, stream: int, device: int) -> None:
        """Sum as many payloads, one after the other from `flat` on, into memory that the device can write to."""
        grid = payloads, self.parts + bool(self.last_bytes)
        numbers = self.parts, self.payload_bytes // 8, self.words, self._last_words
        if all(grid):
            _compiled(device).launch(commands, grid, stream, flat, _secret_on(device).data_ptr(), out, *numbers)

    def found(self, out: Bytes, payloads: int) -> list[PartChecksums]:
        """What the kernel wrote."""
        size, sums, last = 8 * self.words, 8 * self.parts, self.last_bytes
        each = out[: size * payloads].reshape(payloads, size)
        if self.parts and not last:
            return [PartChecksums(own.tobytes()) for own in each]
        return [PartChecksums(own[:sums].tobytes(), own[sums : sums + last].copy()) for own in each]
