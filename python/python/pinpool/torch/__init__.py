"""Serves torch's pinned memory from a pool (`install`), and copies batches to a GPU without blocking (`to_device`).

    import pinpool.torch
    pinpool.torch.install(max_bytes="8GiB")

From then on `pin_memory=True`, `Tensor.pin_memory()` and every library that requests pinned memory from torch use the pool. torch
records each non-blocking copy, and the pool reuses a block only after these copies. `torch.cuda.host_memory_stats()` shows the pool, and
from torch 2.15 on memory snapshots show its blocks in use and their history.

The C++ interface of torch's host allocator differs between versions of torch; `host_allocator.cpp` implements it. Wheels contain
this file compiled for the versions known when `build_wheels.sh` built them. For other versions, and after an installation from a
clone, the first call compiles the file (about 10 s) and keeps the result in torch's extension cache (`TORCH_EXTENSIONS_DIR`).
This needs a C++ compiler and `pip install ninja setuptools` (the extra `torch`), but no CUDA toolkit. If a compilation is killed,
torch waits for its lock file to disappear: delete the file `lock` in that extension's folder of the cache.

The pool does not serve memory requested while a CUDA graph is captured (torch keeps it with the graph), memory pinned before `install`,
and memory that other libraries register with `cudaHostRegister`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from .. import _arrays, _device, _pinpool
from .._errors import BackendError, InstalledError, PinpoolError
from .._layout import map_items
from .._pool import Pool
from . import _limit

if TYPE_CHECKING:
    import torch

    from .._pinpool import _PoolSettings, _Time

__all__ = ["install", "installed_pool", "to_device", "uninstall"]

#: `PINPOOL_TORCH_IN_USE` in host_allocator.cpp.
_STATUS_IN_USE = 4
#: The oldest version of torch with the interface that host_allocator.cpp implements.
_OLDEST_TORCH = (2, 11)

_logger = logging.getLogger("pinpool")
_SOURCE = Path(__file__).with_name("host_allocator.cpp")
#: Allocators compiled for the versions of torch known when the wheel was built.
_PREBUILT = Path(__file__).with_name("prebuilt")
_lock = threading.Lock()
_allocator: ctypes.CDLL | None = None
_installed: Pool | None = None
#: Number of failed compilations in this process.
_failures = 0


def install(pool: Pool | None = None, /, **settings: Unpack[_PoolSettings]) -> Pool:
    """Serves torch's pinned memory from a pool, and returns the pool.

    Call it once at startup, before any thread requests pinned memory. Memory pinned earlier stays with torch.

    Args:
        pool: a `pinpool.Pool`; by default a new one.
        settings: settings of a new `pinpool.Pool`, with other defaults. `max_bytes` is three quarters of the memory of the cgroup
            or machine, divided by `LOCAL_WORLD_SIZE`; a log line states it. If a launcher starts several processes without this
            variable, set `max_bytes`. With a `ledger` or the preset `tensorflow`, `max_bytes` has the default of `Pool`. `backend`
            is "gpu"; memory is not pinned for the GPU if you name mlock or heap, or if a pool with `on_full="pageable"` is full.
            `device` is torch's current GPU if torch has started CUDA, and `name` is "torch".

    Raises:
        ImportError: torch cannot be imported.
        BackendError: torch is older than 2.11, built for ROCm or without a CUDA allocator; no GPU backend works; or the allocator does
            not compile.
        InstalledError: a pool is already installed, tensors still use the last pool, or another library's allocator has priority.
        TypeError, SettingError: both a pool and settings are given, or a setting is unknown or invalid.
    """
    global _installed
    if pool is not None and settings:
        raise TypeError(f"install accepts a pool or settings of a new pool, not both: {', '.join(sorted(settings))}")
    with _lock:
        if _installed is not None:
            raise InstalledError("a pool already serves torch's pinned memory: call pinpool.torch.uninstall() first")
        allocator = _load()
        _checked(allocator.pinpool_torch_check)  # Before a pool pins its reserve.
        if pool is None:
            pool = _new_pool(**settings)
        _warn_of_ignored_settings()
        functions = _pinpool._torch_functions(pool)
        try:
            _checked(allocator.pinpool_torch_install, ctypes.c_void_p(functions))
        except PinpoolError:
            _pinpool._free_torch_functions(functions)
            raise
        _installed = pool
        return pool


def _checked(function: Any, *arguments: Any) -> None:
    error = ctypes.create_string_buffer(1024)
    status = function(*arguments, error, ctypes.c_size_t(len(error)))
    if status != 0:
        kind = InstalledError if status == _STATUS_IN_USE else BackendError
        raise kind(f"torch's allocator was not replaced: {error.value.decode(errors='replace')}")


def uninstall(*, timeout: _Time = 0) -> int:
    """Makes torch's own allocator serve later requests. Returns the number of blocks of the pool that are still in use.

    While there are such blocks, pinpool's allocator stays installed and forwards requests to torch's allocator, because it tracks
    the copies of the blocks. Call `uninstall` again to remove it before another `install`; at exit no call is needed. The result is 0
    once no block of a pool is left; the call waits for that for up to `timeout`: seconds, a timedelta, or text such as "500ms".
    The pool itself exists until the process ends. Its reserve stays pinned. On register and cuda, its idle memory stays pinned, too,
    until a call of `pool.trim()`.

    Raises:
        RequestError, TypeError: `timeout` is invalid.
    """
    global _installed
    end = time.monotonic() + _pinpool._seconds(timeout)
    with _lock:
        _installed = None
        left: int = 0 if _allocator is None else _allocator.pinpool_torch_uninstall()
    while left and _allocator is not None and time.monotonic() < end:
        time.sleep(0.01)
        with _lock:
            if _installed is not None:  # Another thread could install a pool, so no block of this one was left.
                return 0
            left = _allocator.pinpool_torch_uninstall()
    return left


def installed_pool() -> Pool | None:
    """Returns the pool that serves torch's pinned memory, or None."""
    return _installed


def to_device(batch: Any, device: Any = "cuda", *, stream: torch.cuda.Stream | None = None) -> Any:
    """Copies the tensors and numeric NumPy arrays of `batch`, a nesting of dicts, lists and tuples, to a GPU without blocking.

    Arrays become tensors, and a `Batch` of `pinpool_loader` becomes a dict of its decoded fields by name, without labels. Other values
    stay as they are.

        inputs, targets = pinpool.torch.to_device(batch)
        images = pinpool.torch.to_device(loader_batch)["jpg"]

    The copies run on `stream`, by default the current stream of `device`. Other streams must wait for it (`wait_stream`). Pool memory
    is not reused before its copy has completed, so `batch` may be dropped immediately.

    Raises:
        TypeError, ValueError: `batch` has neither a tensor, a numeric array nor a decoded field; `device` is not a GPU, or not the GPU of `stream`.
        BackendError, DeviceError: torch finds no GPU, or as for `pinpool.record_stream`.
    """
    import torch

    if not torch.cuda.is_available():
        raise BackendError("the tensors cannot be copied to a GPU: torch finds none")
    stream = torch.cuda.current_stream(device) if stream is None else stream
    if torch.device(device) not in (torch.device("cuda"), stream.device):
        raise ValueError(f"the stream is on {stream.device}, and not on {device}: pass device=stream.device")
    copied: list[Any] = []
    try:
        with torch.cuda.stream(stream):
            result = _copy(batch, stream.device, copied)
    finally:  # If a copy fails, the earlier ones still run.
        # The memory of a pool is always strided.
        sources = [value for value in copied if not value.is_cuda and getattr(value, "layout", torch.strided) == torch.strided]
        _arrays.record_stream(sources, stream, missing_ok=True)
    if not copied:
        if _is_loader_batch(batch):
            raise TypeError("no field of this Batch is decoded: pass its arrays, such as batch.field('npy'), or pass decode= to the Loader")
        raise TypeError(f"neither a tensor nor a numeric array is in this {type(batch).__name__}: pass tensors or arrays")
    return result


def _is_loader_batch(value: Any) -> bool:
    return isinstance(value, getattr(sys.modules.get("pinpool_loader"), "Batch", ()))


def _copy(value: Any, device: torch.device, copied: list[Any]) -> Any:
    import torch

    if _is_loader_batch(value):
        fields = {names: _copy(array, device, copied) for names, array in value._decoded().items()}
        return {name: field for names, field in fields.items() for name in names}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if not isinstance(value, (torch.Tensor, torch.nn.utils.rnn.PackedSequence)):
        return map_items(value, lambda items: [_copy(item, device, copied) for item in items])
    copied.append(value)
    return value.to(device, non_blocking=True)


def _new_pool(**settings: Any) -> Pool:
    environ = os.environ if settings.get("env", True) else {}
    if settings.get("device") is None and not environ.get("PINPOOL_DEVICE"):
        settings["device"] = _device.torch_device()
    if settings.get("backend") is None and environ.get("PINPOOL_BACKEND", "").strip().lower() in ("", "auto"):
        settings["backend"] = "gpu"
    if (chosen := _limit.choose(settings, os.environ, _pinpool._host_memory())) is not None:
        settings["max_bytes"], line = chosen
        _logger.info("%s", line)
    return Pool(**{"name": "torch", **settings})


def _warn_of_ignored_settings() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        pinned = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip().startswith("pinned_")]
        if pinned:
            _logger.warning(
                "torch setting: %s=%s has no effect while a pool serves torch's pinned memory; set PINPOOL_MAX_BYTES, "
                "PINPOOL_MAX_IDLE_BYTES or PINPOOL_RESERVE instead", name, ",".join(pinned)
            )


def _load() -> ctypes.CDLL:
    """Returns the allocator for the installed torch: from the wheel, or else compiled."""
    global _allocator
    if _allocator is not None:
        return _allocator
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"torch cannot be imported ({error}): pip install 'torch>={_dotted(_OLDEST_TORCH)}'") from error
    torch_version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if torch_version < _OLDEST_TORCH:
        raise BackendError(
            f"torch {torch.__version__} is too old to use a pool for its pinned memory: {_dotted(_OLDEST_TORCH)} or newer is needed. "
            "pinpool.Pool, pool.empty(library='torch') and SharedPool work with it"
        )
    if torch.version.hip is not None:
        raise BackendError(f"torch {torch.__version__} is built for ROCm, and pinpool pins memory with CUDA: install a CUDA build of torch")
    _allocator = _prebuilt_allocator(torch.__version__) or ctypes.CDLL(_compile_allocator(torch.__version__))
    _allocator.pinpool_torch_uninstall.restype = ctypes.c_size_t
    if not torch.cuda.is_available():
        _logger.warning("torch no_gpu: torch finds no GPU, so torch cannot pin memory and DataLoader(pin_memory=True) has no effect")
    return _allocator


def _prebuilt_allocator(version: str) -> ctypes.CDLL | None:
    """Returns the allocator that the wheel contains for this version of torch, or None."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\+.*)?", version)
    path = _PREBUILT / f"torch_{release[1]}_{release[2]}.so" if release else None
    if path is None or not path.is_file():
        return None
    try:
        # RTLD_NOW resolves all symbols now, so that an incompatible version of torch fails here and not in a later call.
        return ctypes.CDLL(os.fspath(path), os.RTLD_NOW)
    except OSError as error:
        _logger.info("torch incompatible: the allocator in this wheel cannot be loaded by torch %s (%s), so it is compiled", version, error)
        return None


def _compile_allocator(version: str) -> str:
    """Compiles the allocator for this version of torch, and returns its path."""
    global _failures
    # torch keeps one library per name. With one name, it would not repeat a failed build, and two versions of pinpool would load the same
    # library.
    retry_suffix = f"_{_failures}" if _failures else ""
    source_digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    path_before = os.environ.get("PATH")
    _logger.info("torch compiling: compiling the allocator for torch %s once, which takes about ten seconds", version)
    try:
        from torch.utils import cpp_extension

        if shutil.which("ninja") is None:
            # pip installs ninja in this folder, whether or not the environment of this interpreter is activated. Other threads see
            # this variable until the compilation ends.
            os.environ["PATH"] = os.pathsep.join([path_before or os.defpath, sysconfig.get_path("scripts")])
        library: str = cpp_extension.load(
            name=f"pinpool_torch_{re.sub(r'[^0-9A-Za-z_]', '_', version)}_{source_digest}{retry_suffix}",
            sources=[os.fspath(_SOURCE)],
            extra_cflags=["-O2"],
            is_python_module=False,
        )
        return library
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        _failures += 1
        raise BackendError(
            f"the allocator does not compile for torch {version}: install a C++ compiler and ninja "
            f"(pip install ninja setuptools; CXX names the compiler), or a newer wheel of pinpool. {error}"
        ) from error
    finally:
        if path_before is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = path_before


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def __getattr__(name: str) -> Any:
    if name == "snapshot":
        raise AttributeError("pinpool.torch.snapshot was removed: PINPOOL_TRACE=FILE records the pool, and `pinpool advise FILE` reads that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
