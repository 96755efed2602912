"""Serves torch's pinned memory from a pool (`install`), and copies batches to a GPU (`prefetch`, `to_device`).

    import pinpool.torch
    pinpool.torch.install(max_bytes="8GiB")

From then on `pin_memory=True`, `Tensor.pin_memory()` and every library that requests pinned memory from torch use the pool. torch
reports each non-blocking copy, and the memory is reused only after these copies, even if it comes from `Pool.empty`, a `SharedPool`
or a `Loader`. Keep a tensor whose copy a CUDA graph captures until the last replay: memory that torch requested is reused once the
capture has ended and the tensor is gone.

`torch.cuda.host_memory_stats()` shows the pool. Its `active_requests` and `active_bytes` count only the blocks that torch has not freed.
Its `allocations.peak`, and after a reset also `allocated_bytes.peak`, are the highest values that calls of `host_memory_stats()` have seen;
`pool.stats()["memory"]["peak_held_bytes"]` is exact. The `max` and `min` of its times cover the whole life of the pool:
`reset_peak_host_memory_stats()` does not change them. From torch 2.15 on, memory snapshots show the blocks in use and their history.

The C++ interface of torch's host allocator differs between versions of torch; `host_allocator.cpp` implements it. Wheels contain
this file compiled for the versions known when `build_wheels.sh` built them. For other versions, and after an installation from a
clone, the first call compiles the file (about 10 s) and keeps the result in torch's extension cache (`TORCH_EXTENSIONS_DIR`).
This needs a C++ compiler and `pip install ninja setuptools` (the extra `torch`), but no CUDA toolkit. If a compilation is killed,
its lock file remains, and `install` raises BackendError after 10 minutes: delete the file `lock` in that extension's directory of the cache.

The pool does not serve memory requested while a CUDA graph is captured (torch keeps it with the graph), memory pinned before `install`,
and memory that other libraries register with `cudaHostRegister`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from .. import _arrays, _device, _pinpool
from .._errors import AlreadyInstalledError, BackendError, PinpoolError
from .._layout import map_items
from .._log import logger
from .._pool import Pool
from . import _allocator, _limit

if TYPE_CHECKING:
    import torch

    from .._settings import PoolSettings, Time

__all__ = ["install", "installed_pool", "prefetch", "to_device", "uninstall"]

#: `PINPOOL_TORCH_IN_USE` in host_allocator.cpp.
_STATUS_IN_USE = 4
#: The default `wait`.
_WAIT_SECONDS = 1
#: Settings, and the values with which this default applies: other values have other waits.
_WAIT_NEUTRAL_VALUES = {"wait": "", "on_full": "error", "preset": "adaptive"}

_lock = threading.Lock()
#: The allocator, once it is loaded.
_library: ctypes.CDLL | None = None
_installed: Pool | None = None


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # Another thread of the parent may hold the lock.


os.register_at_fork(after_in_child=_after_fork)


def install(pool: Pool | None = None, /, **settings: Unpack[PoolSettings]) -> Pool:
    """Serves torch's pinned memory from a pool, and returns the pool.

    Call it once at startup, before any thread requests pinned memory. Memory pinned earlier stays with torch. Do not
    close the pool before `uninstall`, for example with a `with` statement: torch's requests would raise RuntimeError.

    Args:
        pool: a `pinpool.Pool`; by default a new one.
        settings: settings of a new `pinpool.Pool`. These defaults differ: `max_bytes` is three quarters of the memory of the cgroup
            or machine, divided by `LOCAL_WORLD_SIZE`; this also applies to "auto". A log line states it. If several ranks run on a host without
            this variable, set `max_bytes`; if `WORLD_SIZE` or `torch.distributed` shows several ranks, the log line is a warning. With
            a `ledger` or the preset `tensorflow`, `max_bytes` has the default of `Pool`. `backend` is "gpu", `device` is torch's
            current GPU if torch has started CUDA, and `name` is "torch". With `backend="mlock"` or `"heap"`, or while a pool with
            `on_full="pageable"` is full, memory is not pinned for the GPU. `wait` is 1 s if `on_full` and `preset` have their defaults,
            because Ctrl-C does not end a wait of torch for memory, and other Python threads may be blocked during it.

    Raises:
        ImportError: torch cannot be imported.
        BackendError: torch is older than 2.11, built for ROCm or without a CUDA allocator; no GPU backend works; or the allocator does
            not compile.
        AlreadyInstalledError: a pool is already installed, tensors still use the last pool, or another library's allocator has priority.
        TypeError, SettingError: both a pool and settings are given, or a setting is unknown or invalid.
    """
    global _installed, _library
    if pool is not None and settings:
        raise TypeError(f"install accepts a pool or settings of a new pool, not both: {', '.join(sorted(settings))}")
    with _lock:
        if _installed is not None:
            raise AlreadyInstalledError("a pool already serves torch's pinned memory: call pinpool.torch.uninstall() first")
        _library = library = _allocator.load()
        _call("torch's allocator was not replaced", library.pinpool_torch_check)  # Before a pool pins its reserve.
        if pool is None:
            pool = _new_pool(**settings)
        _warn_if_without_effect()
        functions = _pinpool._torch_functions(pool)
        try:
            _call("torch's allocator was not replaced", library.pinpool_torch_install, ctypes.c_void_p(functions))
        except PinpoolError:
            _pinpool._free_torch_functions(functions)
            raise
        _installed = pool
        return pool


def _call(failure: str, function: Any, *arguments: Any) -> None:
    error = ctypes.create_string_buffer(1024)
    status = function(*arguments, error, ctypes.c_size_t(len(error)))
    if status != 0:
        kind = AlreadyInstalledError if status == _STATUS_IN_USE else BackendError
        raise kind(f"{failure}: {error.value.decode(errors='replace')}")


def _disable() -> int:
    """Makes torch's own allocator serve later requests, and returns the number of blocks in use. The caller holds the lock."""
    num_blocks_in_use = ctypes.c_size_t()
    if _library is not None:
        _call("torch's allocator was not restored", _library.pinpool_torch_uninstall, ctypes.byref(num_blocks_in_use))
    return num_blocks_in_use.value


def uninstall(*, timeout: Time | None = 0) -> int:
    """Makes torch's own allocator serve later requests. Returns the number of blocks of the pool that are still in use.

    While there are such blocks, pinpool's allocator stays installed and forwards requests to torch's allocator, because it tracks
    the copies of the blocks. Call `uninstall` again to remove it before another `install`; at exit no call is needed. The result is 0
    once no block of a pool is left; the call waits for that for up to `timeout`: seconds, a timedelta, text such as "500ms", or None.
    The pool itself exists until the process ends. Its reserve stays pinned. With the backends "register" and "cuda", its idle memory
    also stays pinned until `pool.trim()` is called.

    Raises:
        RequestError, TypeError: `timeout` is invalid.
        BackendError: torch refuses its own allocator.
    """
    global _installed
    end = time.monotonic() + _pinpool._seconds(timeout)
    with _lock:
        _installed = None
        num_blocks_in_use = _disable()
    while num_blocks_in_use and time.monotonic() < end:
        time.sleep(0.01)
        with _lock:
            if _installed is not None:  # Another thread could install a pool, so no block of this one was left.
                return 0
            num_blocks_in_use = _disable()
    return num_blocks_in_use


def installed_pool() -> Pool | None:
    """Returns the pool that serves torch's pinned memory, or None."""
    return _installed


def to_device(batch: Any, device: int | str | torch.device | None = None, *, stream: torch.cuda.Stream | None = None) -> Any:
    """Copies the tensors and numeric NumPy arrays of `batch`, a nesting of mappings and sequences, to a GPU.

    The default `device` is torch's current GPU, or the CPU if torch finds no GPU. On the CPU, the result uses the memory of `batch`, without
    a copy. A copy from pinned memory does not block; a copy from other memory may.

    Arrays become tensors. A `Batch` of `pinpool_loader` becomes a dict of its decoded fields by their first name, with its labels as "labels"
    if all are numbers. Other values stay as they are, but an object with a method `to`, and a dataclass with a tensor or array, are refused.

        inputs, targets = pinpool.torch.to_device(batch)
        copied = pinpool.torch.to_device(loader_batch)  # copied["jpg"], copied["labels"]

    The copies run on `stream`, by default the current stream of `device`. Other streams must wait for it (`wait_stream`). Pool memory
    is not reused before its copy has completed, so `batch` may be dropped immediately.

    Raises:
        TypeError, ValueError: `batch` has neither a tensor nor a numeric array, or has an object that is refused; torch cannot represent
            an array (another byte order, negative strides, long double); a field of a `Batch`, other than the `label_field`, is not
            decoded, or is named "labels"; `device` is neither a GPU nor the CPU, or not the GPU of `stream`.
        BackendError, DeviceError: `device` is a GPU, but torch finds none; or as for `pinpool.record_stream`.
    """
    return _copy_batch(batch, device, stream)[0]


def prefetch(batches: Iterable[Any], device: int | str | torch.device | None = None) -> Iterator[Any]:
    """Yields each batch of `batches` as `to_device` returns it, and copies the next batch while the caller uses the current one.

        for inputs, targets in pinpool.torch.prefetch(shared.batches(loader)):
            train(inputs, targets)

    The copies run on a separate stream. The stream that is current when a batch is requested waits for its copy; use the batch on that
    stream. Up to three batches are in the memory of the GPU: the last, the current and the next one. The batches of `batches` are dropped
    as soon as their copy is enqueued. On the CPU, nothing is copied or requested early.

    The next batch has already been requested while the caller uses the current one. So a state of `pinpool_loader.Loader` that is saved
    within the loop skips one batch, and an error of `batches` is raised instead of yielding the batch before it.

    Raises:
        TypeError, ValueError, BackendError, DeviceError: as for `to_device`.
    """
    import torch

    if _is_cpu(device):
        yield from map(functools.partial(to_device, device=device), batches)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied: deque[tuple[Any, list[Any], torch.cuda.Event]] = deque()

    def next_copied() -> Any:
        batch, tensors, event = copied.popleft()
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(event)
        for tensor in _arrays.values_in(tensors):
            if tensor.is_cuda:
                tensor.record_stream(current)  # torch allocated the tensor for the stream of the copies.
        return batch

    for batch in batches:
        copied.append((*_copy_batch(batch, device, stream), stream.record_event()))
        del batch
        if len(copied) > 1:
            yield next_copied()
    if copied:
        yield next_copied()


def _is_cpu(device: int | str | torch.device | None) -> bool:
    import torch

    if device is None:
        return not torch.cuda.is_available()
    # A torch without CUDA refuses `torch.device(0)`.
    return not isinstance(device, int) and torch.device(device).type == "cpu"


def _copy_batch(batch: Any, device: Any, stream: torch.cuda.Stream | None) -> tuple[Any, list[Any]]:
    """Copies `batch` as `to_device` does. Returns the copy and its tensors."""
    import torch

    copies: list[tuple[Any, Any]] = []
    if stream is None and _is_cpu(device):
        result = _copy(batch, torch.device("cpu"), copies)
    elif not torch.cuda.is_available():
        raise BackendError("the tensors cannot be copied to a GPU: torch finds none")
    else:
        result = _copy_on_stream(batch, device, stream, copies)
    if not copies:
        raise TypeError(f"neither a tensor nor a numeric array is in this {type(batch).__name__}: pass tensors or arrays")
    return result, [copy for _, copy in copies]


def _copy_on_stream(batch: Any, device: Any, stream: torch.cuda.Stream | None, copies: list[tuple[Any, Any]]) -> Any:
    """Copies `batch` as `to_device` does, and records the stream."""
    import torch

    stream = torch.cuda.current_stream(device) if stream is None else stream
    if torch.device("cuda" if device is None else device) not in (torch.device("cuda"), stream.device):
        raise ValueError(f"the stream is on {stream.device}, and not on {device}: pass device=stream.device")
    try:
        with torch.cuda.stream(stream):
            return _copy(batch, stream.device, copies)
    finally:  # If a copy fails, the earlier ones still run.
        # The memory of a pool is always strided. After `install`, torch has recorded the copies too, but reports no error.
        sources = [value for value, _ in copies if not value.is_cuda and getattr(value, "layout", torch.strided) == torch.strided]
        _arrays.record_stream(sources, stream, missing_ok=True)


def _copy(value: Any, device: torch.device, copies: list[tuple[Any, Any]]) -> Any:
    """Copies `value`, and appends each tensor with its copy to `copies`."""
    import torch

    if _arrays.is_loader_batch(value):
        fields = {names: _copy(array, device, copies) for names, array in value._pinpool_arrays().items()}
        return {names[0]: field for names, field in fields.items()}
    if _arrays.is_numeric(value) or isinstance(value, (torch.Tensor, torch.nn.utils.rnn.PackedSequence)):
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        # A copy from a GPU blocks, because its result is read by the CPU.
        copy = tensor.to(device, non_blocking=device.type == "cuda")
        copies.append((tensor, copy))
        return copy
    if not isinstance(value, (Mapping, Sequence)):
        _arrays.refuse_hidden_arrays(value, "copied")
    return map_items(value, lambda items: [_copy(item, device, copies) for item in items])


def _new_pool(**settings: Any) -> Pool:
    environ = os.environ if settings.get("env", True) else {}
    if settings.get("device") is None and not environ.get("PINPOOL_DEVICE"):
        settings["device"] = _device.torch_device()
    if settings.get("backend") is None and environ.get("PINPOOL_BACKEND", "").strip().lower() in ("", "auto"):
        settings["backend"] = "gpu"
    if _limit.are_defaults(settings, os.environ, _WAIT_NEUTRAL_VALUES):
        settings["wait"] = _WAIT_SECONDS
    if (default := _limit.default_limit(settings, os.environ, _pinpool._host_memory())) is not None:
        settings["max_bytes"], line = default
        level = logging.WARNING if _limit.has_unknown_local_ranks(os.environ) else logging.INFO
        logger.log(level, "%s", line)
    return Pool(**{"name": "torch", **settings})


def _warn_if_without_effect() -> None:
    """Warns about torch settings that are ignored, and if torch cannot pin memory."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        logger.warning("torch no_gpu: torch finds no GPU, so torch cannot pin memory and DataLoader(pin_memory=True) has no effect")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        pinned = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip().startswith("pinned_")]
        if pinned:
            logger.warning(
                "torch setting: %s=%s has no effect while a pool serves torch's pinned memory; set PINPOOL_MAX_BYTES, "
                "PINPOOL_MAX_IDLE_BYTES or PINPOOL_RESERVE instead",
                name,
                ",".join(pinned),
            )
