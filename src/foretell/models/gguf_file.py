"""The GGUF container: metadata and tensors of one file, every length checked against the file's size.

The `gguf` package reads the same format, and spends 11 s on a vocabulary of 262,144 tokens because it wraps each string
in arrays; this reader takes half a second. Dequantisation is the package's.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_MAX_DIMS = 4
_VALUES_PER_BLOCK = 4_194_304
"""Values dequantised at once: 16 MB of float32 and as much again of temporaries."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """In torch's order, slowest dimension first."""
    type_id: int
    start: int
    num_bytes: int


class GgufFile:
    """One GGUF file, mapped. Use as a context manager.

    Raises:
        ModelError: not a GGUF file, of an unknown version or tensor type, or truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._data = _map_file(path)
        try:
            self._read()
        except ModelError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise _corrupt(path, error) from None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._data.close()

    def read_bfloat16(self, name: str, *, offset: float = 0.0) -> Tensor:
        """Dequantise a tensor, add `offset` in float32, and round to bfloat16.

        Cost: blocks of rows, so that the float32 values of a large tensor are never resident together.

        Raises:
            ModelError: the values cannot be decoded.
        """
        import torch
        from gguf import GGMLQuantizationType, dequantize

        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=torch.bfloat16)
        flat = out.view(-1, info.shape[-1])  # [R, C]
        step = max(1, _VALUES_PER_BLOCK // info.shape[-1])
        try:
            for first in range(0, len(flat), step):
                rows = self._rows(info, first, min(first + step, len(flat)))  # [r, bytes of a row] uint8
                values = torch.from_numpy(dequantize(rows, GGMLQuantizationType(info.type_id)))  # [r, C]
                flat[first : first + step] = values.float() + offset if offset else values.float()
        except Exception as error:
            raise _corrupt(self.path, error) from None
        return out

    def read_float32(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor."""
        info = self.tensors[name]
        if info.type_id != 0:
            raise ModelError(f"{self.path}: tensor {name!r} must be float32: download the file again")
        return list(struct.unpack_from(f"<{prod(info.shape)}f", self._data, info.start))

    def _rows(self, info: TensorInfo, first: int, last: int) -> np.ndarray[Any, Any]:
        """Return a copy of rows `first` to `last`, their bytes; a view would keep the file mapped."""
        import numpy as np

        row_bytes = info.num_bytes // prod(info.shape[:-1])
        raw = bytearray(self._data[info.start + first * row_bytes : info.start + last * row_bytes])
        return np.frombuffer(raw, dtype=np.uint8).reshape(last - first, row_bytes)

    def _read(self) -> None:
        magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", self._data, 0)
        if magic != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file (it starts with {magic!r}): check the path")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}, only {_VERSIONS} are supported: convert it again")
        position = 24
        for _ in range(num_fields):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._data, position)
            self.metadata[key], position = self._value(kind, position + 4)
        self._read_tensor_table(num_tensors, position)

    def _read_tensor_table(self, num_tensors: int, position: int) -> None:
        entries = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dims,) = struct.unpack_from("<I", self._data, position)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
            *dims, type_id, offset = struct.unpack_from(f"<{num_dims}QIQ", self._data, position + 4)
            position += 4 + 8 * num_dims + 12
            entries.append((name, tuple(reversed(dims)), type_id, offset))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-position // alignment) * alignment
        for name, shape, type_id, offset in entries:
            num_bytes = self._num_bytes(name, shape, type_id)
            if start + offset + num_bytes > len(self._data):
                raise ValueError(f"tensor {name!r} ends beyond the file")
            self.tensors[name] = TensorInfo(shape, type_id, start + offset, num_bytes)

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        except (KeyError, ValueError):
            raise ModelError(
                f"{self.path}: tensor {name!r} has unknown type {type_id}: use another quantisation"
            ) from None
        if 0 in shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name!r} of shape {shape} does not fit blocks of {block_size}")
        return prod(shape) // block_size * block_bytes

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind != _ARRAY:
            scalar = _SCALARS[kind]
            return scalar.unpack_from(self._data, position)[0], position + scalar.size
        kind, count = struct.unpack_from("<IQ", self._data, position)
        position += 12
        if kind in _SCALARS:
            packed = struct.Struct(f"<{count}{_SCALARS[kind].format[-1]}")
            return list(packed.unpack_from(self._data, position)), position + packed.size
        if count > len(self._data):
            raise ValueError(f"an array of {count} values is longer than the file")
        values = []
        for _ in range(count):
            value, position = self._value(kind, position)
            values.append(value)
        return values, position

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, position)
        end = position + 8 + length
        if end > len(self._data):
            raise ValueError("a string ends beyond the file")
        return self._data[position + 8 : end].decode("utf-8", errors="replace"), end


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read ({error}): check the path") from None


def _corrupt(path: Path, error: Exception) -> ModelError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelError(f"{path} is truncated or corrupt ({reason}): download it again")
