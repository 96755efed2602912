"""Arrays in the memory of a GPU, for every library that takes `__dlpack__` or `__cuda_array_interface__`."""

from __future__ import annotations

import math
import re
from typing import Any

from . import _pinpool

__all__ = ["DeviceArray"]

# By the name of NumPy or torch: the letter of NumPy's typestr (None: it has none), the code of DLPack, bytes of an element.
KINDS: dict[str, tuple[str | None, int, int]] = {
    "bool": ("b", 6, 1),
    "uint8": ("u", 1, 1),
    "int8": ("i", 0, 1),
    "float8_e4m3fn": (None, 10, 1),
    "float8_e5m2": (None, 12, 1),
    "float8_e8m0fnu": (None, 14, 1),
    "float8_e4m3fnuz": (None, 11, 1),
    "float8_e5m2fnuz": (None, 13, 1),
    "uint16": ("u", 1, 2),
    "int16": ("i", 0, 2),
    "float16": ("f", 2, 2),
    "bfloat16": (None, 4, 2),
    "uint32": ("u", 1, 4),
    "int32": ("i", 0, 4),
    "float32": ("f", 2, 4),
    "uint64": ("u", 1, 8),
    "int64": ("i", 0, 8),
    "float64": ("f", 2, 8),
    "complex64": ("c", 5, 8),
}


class DeviceArray:
    """An array in the memory of a GPU, without gaps: a view of a `DeviceBuffer`, which it keeps.

    `torch.from_dlpack(array)`, `cupy.from_dlpack(array)` and `cupy.asarray(array)` are the same memory. An import by DLPack
    names the stream that is to use the array: it waits for the copy, and the memory has no other use before the work that is
    enqueued on that stream by the end of the last reference is over. `__cuda_array_interface__` says on which stream the copy
    runs, and nobody says where the array is used: `record_stream` does, or the end of the last reference waits for the
    whole device.
    """

    __slots__ = ("__weakref__", "_at", "buffer", "dtype", "shape")

    #: The memory.
    buffer: _pinpool.DeviceBuffer
    #: The lengths.
    shape: tuple[int, ...]
    #: The name of the element's type, as in NumPy and torch.
    dtype: str

    def __init__(self, buffer: _pinpool.DeviceBuffer, at: int, shape: tuple[int, ...], dtype: str = "uint8") -> None:
        self.buffer, self._at, self.shape, self.dtype = buffer, at, shape, dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * KINDS[self.dtype][2]

    @property
    def device(self) -> str:
        """Where the memory is, as "cuda:0"."""
        return self.buffer.device

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self.buffer._address(self._at)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def record_stream(self, stream: Any) -> None:
        """`stream` waits until the bytes are there, and the memory stays until what is enqueued on it is over."""
        self.buffer.record_stream(stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        letter, _, size = KINDS[self.dtype]
        if letter is None:
            raise AttributeError(f"the array interface has no type {self.dtype}: import the array by DLPack")
        return {
            "shape": self.shape,
            "typestr": f"{'<' if size > 1 else '|'}{letter}{size}",
            "data": (self.buffer._address(self._at) if self.nbytes else 0, False),
            "version": 3,
            "strides": None,
            "stream": self.buffer.stream,
        }

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is in the memory of {self.device}: import it there, and copy")
        if copy:
            raise BufferError("an array is exported without a copy: leave `copy` out, and copy the import")
        _, code, size = KINDS[self.dtype]
        has_version = max_version is not None and max_version[0] >= 1
        return self.buffer._dlpack(self._at, list(self.shape), code, size * 8, stream, has_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def tensor(self) -> Any:
        """The array as a tensor of torch, for torch's current stream: no copy."""
        torch = imported_torch("tensor()")
        return torch.from_dlpack(self)

    def __repr__(self) -> str:
        return f"<pinpool.DeviceArray {self.shape} of {self.dtype} on {self.device}>"


def imported_torch(what: str) -> Any:
    """The module torch."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{what} needs PyTorch, which cannot be imported here: pip install torch") from error
    return torch


def opened(device: Any) -> _pinpool.Device | None:
    """The GPU that `device` names, None for host memory: "cuda:1", "cuda", 1, "cpu", None, or a torch.device."""
    if device is None or isinstance(device, _pinpool.Device):
        return device
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 1_000_000_000:
        return _pinpool.Device(device)
    # By its text, so that torch need not be there.
    name = device if isinstance(device, str) else str(device) if type(device).__module__ == "torch" else None
    if name == "cpu":
        return None
    found = re.fullmatch(r"cuda(?::([0-9]{1,9}))?", name or "")
    if found is None:
        raise ValueError(f"device={device!r}: 'cuda:0', 'cuda:1', ..., 0, 1, ..., or None for pinned memory of the host")
    return _pinpool.Device(int(found[1] or 0))
