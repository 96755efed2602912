"""Weights of a `.safetensors` file, in pinned memory or on a GPU.

    tensors = pinpool.safetensors.load("model.safetensors", "cuda:0", library="torch")
    model.load_state_dict(tensors)

On a GPU the tensors are views of one piece of its memory. The file goes there through buffers of a pool, piece by piece, so
that reading and copying run at once and little memory of the host is needed.

Without a device the tensors are views of one buffer of a pool, into which several threads read the file: nothing is copied.
The memory goes back when the last of them is gone.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeVar

from . import _device, _pinpool
from ._errors import LoadError
from ._pool import Pool

__all__ = ["load"]

# The longest header that is read; one of this length describes more than 100,000 tensors.
_HEADER_BYTES_MAX = 16 << 20
# Each tensor begins at a multiple of this.
_ALIGN = 64
# What a thread reads at once: little enough that all threads end together.
_PIECE_BYTES = 8 << 20
# What is copied to a GPU at once.
_COPY_BYTES = 16 << 20
# Seconds that a thread waits for a buffer of the pool, since copies give them back.
_COPY_WAIT = 10

# The name in a file: bytes of an element, the name in NumPy, the name in torch.
_DTYPES = {
    "BOOL": (1, "bool", "bool"),
    "U8": (1, "uint8", "uint8"),
    "I8": (1, "int8", "int8"),
    "F8_E4M3": (1, None, "float8_e4m3fn"),
    "F8_E5M2": (1, None, "float8_e5m2"),
    "F8_E8M0": (1, None, "float8_e8m0fnu"),
    "U16": (2, "uint16", "uint16"),
    "I16": (2, "int16", "int16"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, None, "bfloat16"),
    "U32": (4, "uint32", "uint32"),
    "I32": (4, "int32", "int32"),
    "F32": (4, "float32", "float32"),
    "U64": (8, "uint64", "uint64"),
    "I64": (8, "int64", "int64"),
    "F64": (8, "float64", "float64"),
    "C64": (8, "complex64", "complex64"),
}


_Piece = TypeVar("_Piece")


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    #: First byte in the file.
    begin: int
    nbytes: int


def load(
    path: str | os.PathLike[str],
    device: Any = None,
    *,
    library: Literal["numpy", "torch"] = "numpy",
    pool: Pool | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """The tensors of the file by name.

    In pinned memory they are arrays of NumPy or tensors of torch, in one buffer of `pool` that has all bytes of the file. On
    `device="cuda:0"` they are of type `DeviceArray`, or with `library="torch"` tensors for torch's current stream, and the
    pool needs room for a few pieces of 16 MiB. Without a pool the memory comes from one of its own. `workers` threads read, one
    for each core.

    LoadError if the file is no whole safetensors file, OSError if it cannot be read, LimitError if the pool or the GPU has no
    room for it, TypeError if the library has no such dtype, BackendError if there is no such GPU.
    """
    if library not in ("numpy", "torch"):
        raise ValueError(f"library={library!r}: tensors can be of 'numpy' or 'torch'")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: 1 or more")
    path, gpu = os.fspath(path), _device.opened(device)
    if pool is None:
        pool = Pool(name="weights", device=None if gpu is None else gpu.ordinal)
    workers = workers or len(os.sched_getaffinity(0))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tensors = _header(fd, path)
        if gpu is not None:
            return _load_to_gpu(gpu, fd, path, tensors, library, pool, workers)
        dtypes = {tensor.dtype: _dtype(tensor, library, path) for tensor in tensors}
        places, end = _padded(tensors)
        buffer = pool.get(end)
        with memoryview(buffer) as bytes_of:
            _read(fd, path, bytes_of, tensors, places, workers)
    finally:
        os.close(fd)
    view = _numpy_view if library == "numpy" else _torch_view
    return {tensor.name: view(buffer, tensor, at, dtypes[tensor.dtype]) for tensor, at in zip(tensors, places)}


def _padded(tensors: list[_Tensor]) -> tuple[list[int], int]:
    """The place of each tensor in memory, and the end of the last one."""
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return places, end


def _load_to_gpu(
    gpu: _pinpool.Device, fd: int, path: str, tensors: list[_Tensor], library: str, pool: Pool, workers: int
) -> dict[str, Any]:
    torch_dtypes = {}
    if library == "torch":
        torch_dtypes = {tensor.dtype: _dtype(tensor, library, path) for tensor in tensors}
    start = tensors[0].begin if tensors else 0
    places = [tensor.begin - start for tensor in tensors]
    if all(at % _DTYPES[tensor.dtype][0] == 0 for tensor, at in zip(tensors, places)):
        end = sum(tensor.nbytes for tensor in tensors)
        pieces = _pieces([(start, 0, end)])
    else:
        # As no writer of the format leaves them; but the format allows it, and the GPU needs its alignment.
        places, end = _padded(tensors)
        pieces = _pieces([(tensor.begin, at, tensor.nbytes) for tensor, at in zip(tensors, places)])
    memory = gpu.allocate(end)

    def copy(piece: tuple[int, int, int]) -> None:
        begin, at, length = piece
        buffer = pool.get(length, timeout=_COPY_WAIT)
        with memoryview(buffer) as bytes_of:
            _read_exactly(fd, path, bytes_of, begin)
        memory._fill(buffer, at)

    _in_threads(copy, pieces, workers)
    arrays = {
        tensor.name: _device.DeviceArray(memory, at, tensor.shape, _DTYPES[tensor.dtype][2])
        for tensor, at in zip(tensors, places)
    }
    if library == "numpy":
        return arrays
    torch = _device.imported_torch("library='torch'")
    whole = torch.from_dlpack(_device.DeviceArray(memory, 0, (end,)))
    return {
        tensor.name: whole[at : at + tensor.nbytes].view(torch_dtypes[tensor.dtype]).reshape(tensor.shape)
        for tensor, at in zip(tensors, places)
    }


def _pieces(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same bytes in pieces: first byte in the file, place in the memory, length."""
    return [
        (begin + offset, at + offset, min(_COPY_BYTES, length - offset))
        for begin, at, length in ranges
        for offset in range(0, length, _COPY_BYTES)
    ]


def _header(fd: int, path: str) -> list[_Tensor]:
    """What the file says it has, in the order of its bytes: they fill the file without gaps."""

    def broken(why: str) -> LoadError:
        return LoadError(f"{path}: broken safetensors: {why}; write it again, or fetch it again")

    file_bytes = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if file_bytes < 8 or length > min(file_bytes - 8, _HEADER_BYTES_MAX):
        raise broken(f"the header has {length} B by its first 8 bytes, and the file {file_bytes} B")
    text = os.pread(fd, length, 8)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [
            _Tensor(name, str(entry["dtype"]), tuple(map(operator.index, entry["shape"])), begin, end - begin)
            for name, entry in header.items()
            for begin, end in [map(operator.index, entry["data_offsets"])]
        ]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise broken(f"the header cannot be read ({type(error).__name__}: {error})") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes, tensor.name))
    end = 0
    for tensor in tensors:
        name, dtype, shape = tensor[:3]
        size = _DTYPES.get(dtype, (0,))[0]
        if not size:
            raise broken(f"{name} has the dtype {dtype}, which is none of {', '.join(_DTYPES)}")
        if min(shape, default=0) < 0 or math.prod(shape) * size != tensor.nbytes:
            raise broken(f"{name} has {tensor.nbytes} B, but {math.prod(shape) * size} B by its shape {shape} of {dtype}")
        if tensor.begin != end:
            raise broken(f"{name} begins at byte {tensor.begin} of the data, where byte {end} is the next")
        end += tensor.nbytes
    if 8 + length + end != file_bytes:
        raise broken(f"the tensors end at byte {8 + length + end}, the file at {file_bytes}")
    return [tensor._replace(begin=8 + length + tensor.begin) for tensor in tensors]


def _dtype(tensor: _Tensor, library: str, path: str) -> Any:
    _, in_numpy, in_torch = _DTYPES[tensor.dtype]
    if library == "numpy":
        if in_numpy is None:
            raise TypeError(f"{path}: {tensor.name} has the dtype {tensor.dtype}, which NumPy has not: use library='torch'")
        import numpy as np

        return np.dtype(in_numpy)
    torch = _device.imported_torch("library='torch'")
    found = getattr(torch, in_torch, None)
    if found is None:
        raise TypeError(f"{path}: {tensor.name} has the dtype {tensor.dtype}, which torch {torch.__version__} has not")
    return found


def _read(fd: int, path: str, into: memoryview, tensors: list[_Tensor], places: list[int], workers: int) -> None:
    """Fills the buffer. The lock of Python is free while the kernel copies."""
    pieces = [
        (tensor, at, offset, min(_PIECE_BYTES, tensor.nbytes - offset))
        for tensor, at in zip(tensors, places)
        for offset in range(0, tensor.nbytes, _PIECE_BYTES)
    ]

    def fill(piece: tuple[_Tensor, int, int, int]) -> None:
        tensor, at, offset, length = piece
        with into[at + offset : at + offset + length] as part:
            _read_exactly(fd, path, part, tensor.begin + offset)

    _in_threads(fill, pieces, workers)


def _read_exactly(fd: int, path: str, into: memoryview, begin: int) -> None:
    done = 0
    while done < len(into):
        with into[done:] as rest:
            read = os.preadv(fd, [rest], begin + done)
        if not read:
            raise LoadError(f"{path}: truncated: it ended at byte {begin + done} while it was read")
        done += read


def _in_threads(call: Callable[[_Piece], None], pieces: list[_Piece], workers: int) -> None:
    threads = ThreadPoolExecutor(min(workers, len(pieces)) or 1, thread_name_prefix="pinpool-weights")
    try:
        for _ in threads.map(call, pieces):
            pass
    finally:
        # Also after an error and Ctrl-C: no thread writes to memory after this.
        threads.shutdown(cancel_futures=True)


def _numpy_view(buffer: Any, tensor: _Tensor, at: int, dtype: Any) -> Any:
    import numpy as np

    if not tensor.nbytes:
        return np.empty(tensor.shape, dtype)
    return np.frombuffer(buffer, dtype, math.prod(tensor.shape), at).reshape(tensor.shape)


def _torch_view(buffer: Any, tensor: _Tensor, at: int, dtype: Any) -> Any:
    import torch

    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    count = math.prod(tensor.shape)
    return torch.frombuffer(memoryview(buffer), dtype=dtype, count=count, offset=at).reshape(tensor.shape)
