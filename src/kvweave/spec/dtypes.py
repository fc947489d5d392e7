"""Element types a cache may hold, by the names torch and safetensors use."""

from __future__ import annotations

from enum import StrEnum

from kvweave.errors import UnknownName


class DType(StrEnum):
    """An element type; `bits` is its size in memory."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E8M0 = "float8_e8m0fnu"
    FLOAT4_E2M1 = "float4_e2m1fn"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    INT4 = "int4"
    UINT8 = "uint8"

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def align_bytes(self) -> int:
        """An element's natural alignment; packed nibbles go by whole bytes."""
        return max(1, self.bits // 8)

    @classmethod
    def parse(cls, name: object) -> DType:
        """Accepts short names (`bf16`, `fp8`) and `torch.bfloat16`."""
        text = str(name).removeprefix("torch.").lower()
        try:
            return cls(_SHORT.get(text, text))
        except ValueError:
            raise UnknownName("dtype", name, [*cls, *_SHORT]) from None


_BITS = {
    DType.FLOAT64: 64,
    DType.FLOAT32: 32,
    DType.FLOAT16: 16,
    DType.BFLOAT16: 16,
    DType.FLOAT8_E4M3: 8,
    DType.FLOAT8_E5M2: 8,
    DType.FLOAT8_E8M0: 8,
    DType.FLOAT4_E2M1: 4,
    DType.INT64: 64,
    DType.INT32: 32,
    DType.INT8: 8,
    DType.INT4: 4,
    DType.UINT8: 8,
}
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}
