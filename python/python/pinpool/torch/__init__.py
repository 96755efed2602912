"""Serves torch's pinned memory from a pool.

    import pinpool.torch
    pinpool.torch.install(max_bytes="8GiB")

From then on `pin_memory=True`, `Tensor.pin_memory()` and every library that requests pinned memory from torch use the pool. torch
records each non-blocking copy, and the pool reuses a block only after these copies. `torch.cuda.host_memory_stats()` shows the pool, and
from torch 2.15 on memory snapshots show its blocks in use and their history.

The C++ interface of torch's host allocator differs between versions of torch; `host_allocator.cpp` implements it. Wheels contain
this file compiled for the versions known when `build_wheels.sh` built them. For other versions, and after an installation from a
clone, the first call compiles the file (about 10 s) and keeps the result in torch's extension cache (`TORCH_EXTENSIONS_DIR`).
This needs a C++ compiler and `pip install ninja setuptools` (the extra `torch`), but no CUDA toolkit. If a compilation was
killed, delete the file `lock` in its folder of the cache, because torch waits for that file to disappear.

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
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .. import _device, _pinpool
from .._errors import BackendError, PinpoolError
from .._pool import Pool
from . import _limit

if TYPE_CHECKING:
    from .._pinpool import _PoolSettings

__all__ = ["install", "is_installed", "pool", "uninstall"]

#: The oldest version of torch with the interface that host_allocator.cpp implements.
OLDEST = (2, 11)

_logger = logging.getLogger("pinpool")
_SOURCE = Path(__file__).with_name("host_allocator.cpp")
#: Allocators compiled for the versions of torch known when the wheel was built.
_PREBUILT = Path(__file__).with_name("shims")
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
            `device` is torch's current GPU if torch has started CUDA.

    Raises:
        ImportError: torch cannot be imported.
        PinpoolError: torch is older than 2.11, built for ROCm or without a CUDA allocator; a pool is already installed; or
            tensors still use the last pool.
        BackendError: no GPU backend works, or the allocator does not compile.
        TypeError, SettingError: both a pool and settings are given, or a setting is unknown or invalid.
    """
    global _installed
    if pool is not None and settings:
        raise TypeError(f"install accepts a pool or settings of a new pool, not both: {', '.join(sorted(settings))}")
    with _lock:
        if _installed is not None:
            raise PinpoolError("a pool serves torch's pinned memory already: call pinpool.torch.uninstall() first")
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
    if function(*arguments, error, ctypes.c_size_t(len(error))) != 0:
        raise PinpoolError(f"torch's allocator was not replaced: {error.value.decode(errors='replace')}")


def uninstall() -> int:
    """Makes torch's own allocator serve later requests. Returns the number of blocks of the pool that are still in use.

    While there are such blocks, pinpool's allocator stays installed and forwards requests to torch's allocator, because it tracks
    the copies of the blocks. Call `uninstall` again later to remove it. The result is 0 once no block of a pool is left.
    The pool itself exists until the process ends. Its reserve stays pinned. On register and cuda, its idle memory stays pinned, too,
    until a call of `pool.trim()`.
    """
    global _installed
    with _lock:
        if _allocator is None:
            return 0
        left: int = _allocator.pinpool_torch_uninstall()
        _installed = None
        return left


def is_installed() -> bool:
    """Returns whether a pool serves torch's pinned memory."""
    return _installed is not None


def pool() -> Pool | None:
    """Returns the pool that serves torch's pinned memory, or None."""
    return _installed


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
        raise ImportError(f"torch cannot be imported ({error}): pip install 'torch>={_dotted(OLDEST)}'") from error
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < OLDEST:
        raise PinpoolError(
            f"torch {torch.__version__} is too old to use a pool for its pinned memory: {_dotted(OLDEST)} or newer is needed. "
            "pinpool.Pool, pool.empty(library='torch') and SharedPool work with it"
        )
    if torch.version.hip is not None:
        raise PinpoolError(f"torch {torch.__version__} is built for ROCm, and pinpool pins memory with CUDA: install a CUDA build of torch")
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
    again = f"_{_failures}" if _failures else ""
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    search = os.environ.get("PATH")
    _logger.info("torch compiling: compiling the allocator for torch %s once, which takes about ten seconds", version)
    try:
        from torch.utils import cpp_extension

        if shutil.which("ninja") is None:
            # pip installs ninja in this folder, whether or not the environment of this interpreter is activated. Other threads see
            # this variable until the compilation ends.
            os.environ["PATH"] = os.pathsep.join([search or os.defpath, sysconfig.get_path("scripts")])
        library: str = cpp_extension.load(
            name=f"pinpool_torch_{re.sub(r'[^0-9A-Za-z_]', '_', version)}_{source}{again}",
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
        if search is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = search


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def __getattr__(name: str) -> Any:
    if name == "snapshot":
        raise AttributeError("pinpool.torch.snapshot was removed: PINPOOL_TRACE=FILE records the pool, and `pinpool advise FILE` reads that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
