"""Weights of `.safetensors` files, in pinned memory or on a GPU.

    tensors = pinpool.safetensors.load("model.safetensors", "cuda:0", library="torch")
    model.load_state_dict(tensors)

On a GPU the tensors of a file are views of one piece of its memory. The file goes there through buffers of a pool, piece by piece, so
that reading and copying run at once and little memory of the host is needed.

Without a device the tensors are views of one buffer of a pool for each file, into which several threads read it: nothing is copied.
The memory goes back when the last of them is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from . import _device
from ._arguments import count
from ._errors import LoadError
from ._pool import Pool
from ._weights_file import DTYPES, Header, Tensor, files_of, read_header

__all__ = ["Header", "Tensor", "header", "load"]

# Each tensor begins at a multiple of this.
_ALIGN = 64
# What a thread reads at once: little enough that all threads end together.
_PIECE_BYTES = 8 << 20
# What is copied to a GPU at once.
_COPY_BYTES = 16 << 20
# Seconds that a thread waits for a buffer of the pool, since copies give them back.
_COPY_WAIT = 10


class _Run(NamedTuple):
    """Bytes that lie together, in the file and in memory."""

    begin: int
    at: int
    nbytes: int


def header(path: str | os.PathLike[str]) -> Header:
    """What the file has, or all files of a `model.safetensors.index.json`: `metadata`, and of each name in `tensors` dtype, shape and bytes.

    LoadError if it is no whole safetensors file, OSError if it cannot be read. No tensor is read.
    """
    metadata, files = files_of(os.fspath(path))
    tensors: dict[str, Tensor] = {}
    for file, names in files.items():
        with open(file, "rb") as opened:
            its = read_header(opened.fileno(), file)
        metadata = {**its.metadata, **metadata}
        tensors |= _chosen(its.tensors, file, names)
    return Header(metadata, tensors)


def load(
    path: str | os.PathLike[str],
    device: Any = None,
    *,
    names: Iterable[str] | None = None,
    slices: Mapping[str, slice | tuple[slice, ...]] | None = None,
    library: Literal["numpy", "torch"] = "numpy",
    pool: Pool | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """The tensors by name: of the file, or of all files of a `model.safetensors.index.json`.

    `names` are those that are loaded, by default all. `slices={"w": np.s_[:, 0:512]}` is the part of a tensor that is read and loaded, as
    of `w[:, 0:512]`.

    In pinned memory they are arrays of NumPy or tensors of torch, in one buffer of `pool` for each file. On `device="cuda:0"`, or 0, they
    are of type `DeviceArray`, or with `library="torch"` tensors for torch's current stream, and the pool needs room for a few pieces of
    16 MiB. Without a pool the memory comes from one of its own. `workers` threads read, one for each core. NumPy has BF16 and F8
    types where `ml_dtypes` is installed.

    LoadError if a file is no whole safetensors file, OSError if it cannot be read, KeyError if a name is not there, LimitError if the pool
    or the GPU has no room, TypeError if the library has no such dtype, BackendError if there is no such GPU.
    """
    if library not in ("numpy", "torch"):
        raise ValueError(f"library={library!r}: tensors can be of 'numpy' or 'torch'")
    gpu = _device.opened(device)
    if pool is None:
        pool = Pool(name="weights", device=None if gpu is None else gpu.ordinal)
    workers = len(os.sched_getaffinity(0)) if workers is None else count("workers", workers, 1)
    wanted, slices = None if names is None else list(dict.fromkeys(names)), slices or {}
    path = os.fspath(path)
    has: set[str] = set()
    parts: list[tuple[int, str, dict[str, Tensor]]] = []
    with contextlib.ExitStack() as opened:
        for file, of_file in files_of(path)[1].items():
            has.update(of_file or ())
            if of_file is not None and wanted is not None and not set(of_file).intersection(wanted):
                continue
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            tensors = _chosen(read_header(fd, file).tensors, file, of_file)
            has.update(tensors)
            parts.append((fd, file, {name: tensors[name] for name in tensors if wanted is None or name in wanted}))
        for name in [*(wanted or ()), *slices]:
            if name not in has:
                raise KeyError(f"{path} has no tensor {name!r}")
        loaded: dict[str, Any] = {}
        for fd, file, tensors in parts:
            cut = {name: tensor.part(name, slices[name]) if name in slices else tensor for name, tensor in tensors.items()}
            loaded |= _load(fd, file, cut, gpu, library, pool, workers)
    return loaded


def _chosen(tensors: dict[str, Tensor], file: str, names: list[str] | None) -> dict[str, Tensor]:
    for name in names or ():
        if name not in tensors:
            raise LoadError(f"{file}: no tensor {name!r}, which the index says is there: fetch the files again")
    return tensors if names is None else {name: tensors[name] for name in names}


def _load(
    fd: int, path: str, tensors: dict[str, Tensor], gpu: Any, library: str, pool: Pool, workers: int
) -> dict[str, Any]:
    """The tensors of one file."""
    if not tensors:
        return {}
    dtypes = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            dtypes[tensor.dtype] = _dtype(name, tensor, library, gpu, path)
    places, end, runs = {}, 0, []
    for name, tensor in tensors.items():
        places[name] = at = end
        for begin, nbytes in tensor.runs:
            runs.append(_Run(begin, at, nbytes))
            at += nbytes
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    if gpu is not None:
        memory = gpu.allocate(end)

        def copy(piece: list[_Run]) -> None:
            start, last = piece[0].at, piece[-1]
            buffer = pool.get(last.at + last.nbytes - start, timeout=_COPY_WAIT)
            with memoryview(buffer) as whole:
                _read(fd, path, whole, piece, start)
            memory._fill(buffer, start)

        _in_threads(copy, _pieces(runs, _COPY_BYTES), workers)
        if library == "numpy":
            return {
                name: _device.DeviceArray(memory, places[name], tensor.shape, dtypes[tensor.dtype]) for name, tensor in tensors.items()
            }
        whole = _device.DeviceArray(memory, 0, (end,)).tensor()
        return {name: _torch_view(whole, tensor, places[name], dtypes[tensor.dtype]) for name, tensor in tensors.items()}
    buffer = pool.get(end)
    with memoryview(buffer) as target:
        _in_threads(lambda piece: _read(fd, path, target, piece, 0), _pieces(runs, _PIECE_BYTES), workers)
    if library == "numpy":
        return {name: _numpy_view(buffer, tensor, places[name], dtypes[tensor.dtype]) for name, tensor in tensors.items()}
    torch = _device.imported_torch("library='torch'")
    whole = torch.frombuffer(memoryview(buffer), dtype=torch.uint8) if end else torch.empty(0, dtype=torch.uint8)
    return {name: _torch_view(whole, tensor, places[name], dtypes[tensor.dtype]) for name, tensor in tensors.items()}


def _dtype(name: str, tensor: Tensor, library: str, gpu: Any, path: str) -> Any:
    _, in_numpy, in_torch = DTYPES[tensor.dtype]
    has = f"{path}: {name} has the dtype {tensor.dtype}, which"
    if library == "torch":
        torch = _device.imported_torch("library='torch'")
        if (found := getattr(torch, in_torch or "", None)) is None:
            raise TypeError(f"{has} torch {torch.__version__} has not")
        return found
    if gpu is not None:
        if in_torch not in _device.KINDS:
            raise TypeError(f"{has} a DeviceArray has not: use library='torch'")
        return in_torch
    import numpy as np

    if in_numpy is not None:
        return np.dtype(in_numpy)
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, in_torch or ""))
    except (ImportError, AttributeError):
        raise TypeError(f"{has} NumPy has not: use library='torch', or install ml_dtypes for BF16 and F8") from None


def _pieces(runs: list[_Run], most: int) -> list[list[_Run]]:
    """The same bytes in pieces of at most `most` bytes of memory each."""
    pieces: list[list[_Run]] = []
    for run in runs:
        done = 0
        while done < run.nbytes:
            at = run.at + done
            if not pieces or at >= pieces[-1][0].at + most:
                pieces.append([])
            start = pieces[-1][0].at if pieces[-1] else at
            length = min(run.nbytes - done, start + most - at)
            pieces[-1].append(_Run(run.begin + done, at, length))
            done += length
    return pieces


def _read(fd: int, path: str, target: memoryview, piece: list[_Run], start: int) -> None:
    """Fills `target`, whose first byte is at `start`. The lock of Python is free while the kernel copies."""
    for run in piece:
        done = 0
        while done < run.nbytes:
            with target[run.at - start + done : run.at - start + run.nbytes] as rest:
                read = os.preadv(fd, [rest], run.begin + done)
            if not read:
                raise LoadError(f"{path}: truncated: it ended at byte {run.begin + done} while it was read")
            done += read


def _in_threads(call: Callable[[list[_Run]], None], pieces: list[list[_Run]], workers: int) -> None:
    threads = ThreadPoolExecutor(min(workers, len(pieces)) or 1, thread_name_prefix="pinpool-weights")
    try:
        for _ in threads.map(call, pieces):
            pass
    finally:
        # Also after an error and Ctrl-C: no thread writes to memory after this.
        threads.shutdown(cancel_futures=True)


def _numpy_view(buffer: Any, tensor: Tensor, at: int, dtype: Any) -> Any:
    import numpy as np

    if not tensor.nbytes:
        return np.empty(tensor.shape, dtype)
    return np.frombuffer(buffer, np.uint8, tensor.nbytes, at).view(dtype).reshape(tensor.shape)


def _torch_view(whole: Any, tensor: Tensor, at: int, dtype: Any) -> Any:
    import torch

    shape = tensor.shape
    if DTYPES[tensor.dtype][0] == 4 and shape:
        # An element of torch is two of the format.
        shape = (*shape[:-1], shape[-1] // 2)
    if not tensor.nbytes:
        return torch.empty(shape, dtype=dtype, device=whole.device)
    return whole[at : at + tensor.nbytes].view(dtype).reshape(shape)
