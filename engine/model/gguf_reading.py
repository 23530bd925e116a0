"""Reading a GGUF file: metadata as plain values, tensors as fp32 arrays.

Owns the only use of the `gguf` package's reader and dequantiser. Two promises hold: every error names the
file and, where there is one, the tensor; and every tensor's bytes are known to lie inside the file before any
of them is read. Nothing here knows what a tensor means; `gguf_convert` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

READABLE_TYPES = frozenset(
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
) | frozenset(GGMLQuantizationType[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))


class GgufError(ValueError):
    """The file is not a GGUF file this code can convert; the message names the file and the tensor or key."""


class _BoundedReader(GGUFReader):
    """`GGUFReader` that refuses a tensor reaching past the end of the file, by name."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, raw_name, _, dims, raw_type, offset = field.parts
            name = bytes(raw_name).decode("utf-8", "replace")
            try:
                kind = GGMLQuantizationType(int(raw_type[0]))
            except ValueError as error:
                raise GgufError(f"tensor {name!r} has unknown type {int(raw_type[0])}") from error
            block, size = GGML_QUANT_SIZES[kind]
            elements = math.prod(int(n) for n in dims)
            end = int(start_offs) + int(offset[0]) + elements * size // block
            if end > len(self.data):
                raise GgufError(
                    f"tensor {name!r} ends at byte {end}, but the file has only {len(self.data)} bytes: "
                    "the file is truncated; fetch it again"
                )
        super()._build_tensors(start_offs, fields)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file: metadata as plain Python values, tensors as views that are not yet read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The metadata value of `key`; raises `GgufError` when the file lacks it."""
        if key not in self.metadata:
            raise GgufError(f"{self.path}: metadata key {key!r} is missing")
        return self.metadata[key]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in row-major order (GGUF itself lists the fastest dimension first)."""
        return tuple(int(n) for n in reversed(self._tensor(name).shape))

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantised to fp32, row-major; raises `GgufError` when it holds NaN or infinity."""
        tensor = self._tensor(name)
        if tensor.tensor_type not in READABLE_TYPES:
            raise GgufError(f"{self.path}: tensor {name!r} has unsupported type {tensor.tensor_type.name}")
        try:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            values = values.reshape(self.shape(name))
        except (ValueError, NotImplementedError) as error:
            raise GgufError(f"{self.path}: tensor {name!r} can't be dequantised: {error}") from error
        if not np.isfinite(values).all():
            raise GgufError(f"{self.path}: tensor {name!r} holds NaN or infinity: the file is corrupt")
        return np.ascontiguousarray(values)

    def _tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise GgufError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]


def open_gguf(path: Path) -> GgufFile:
    """Open `path` (seconds for a large vocabulary); raises `GgufError` unless it is a whole GGUF file."""
    if not path.is_file():
        raise GgufError(f"{path}: no such file")
    try:
        reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from error
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, MemoryError) as error:
        raise GgufError(f"{path}: not a readable GGUF file ({error}): it is truncated or corrupt") from error
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
