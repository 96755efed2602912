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
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Unpack

from .. import _device, _pinpool
from .._errors import AlreadyInstalledError, BackendError, PinpoolError
from .._log import logger
from .._pool import Pool
from . import _allocator, _limit
from ._copies import Prefetcher, prefetch, to_device

if TYPE_CHECKING:
    from .._settings import PoolSettings, Time

__all__ = ["Prefetcher", "install", "installed_pool", "prefetch", "to_device", "uninstall"]

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
