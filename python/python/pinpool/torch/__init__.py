"""pinpool as torch's pinned memory, in one line.

    import pinpool.torch
    pinpool.torch.install(max_bytes="8GiB")

From then on ``pin_memory=True``, ``Tensor.pin_memory()``, the pin thread of a ``DataLoader`` and every library that requests pinned
memory from torch use a pinpool pool. torch marks each non-blocking copy, and the pool reuses a block only after the marked copies
have completed. ``torch.cuda.host_memory_stats()`` and memory snapshots show the pool.

torch's host allocator is a C++ interface that belongs to one version of torch. Wheels contain the part that implements it (one file,
``host_allocator.cpp``) compiled for the versions known when they were built. For another version it is compiled once, in about ten
seconds, and kept in torch's extension cache (``TORCH_EXTENSIONS_DIR``). Compiling needs a C++ compiler and ninja, but no CUDA toolkit.

Not served by the pool: memory requested while a CUDA graph is captured (torch's own allocator keeps it with the graph), memory
pinned before ``install``, and memory that other libraries register with ``cudaHostRegister``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import Any

from .. import _pinpool
from .._errors import BackendError, PinpoolError
from .._pool import Pool
from . import _limit

__all__ = ["install", "is_installed", "pool", "uninstall"]

#: The oldest torch whose interface host_allocator.cpp implements.
OLDEST = (2, 11)

_log = logging.getLogger("pinpool")
_SOURCE = Path(__file__).with_name("host_allocator.cpp")
#: Compiled for the versions of torch that were known when the wheel was built.
_SHIMS = Path(__file__).with_name("shims")
_lock = threading.Lock()
_shim: ctypes.CDLL | None = None
_installed: Pool | None = None
#: Number of failed compilations in this process.
_failures = 0


def install(pool: Pool | None = None, /, **settings: Any) -> Pool:
    """Serves torch's pinned memory from a pool, and returns the pool.

    Call it before another thread requests pinned memory from torch, because replacing torch's allocator is not thread-safe.

    Args:
        pool: a :class:`pinpool.Pool`; by default a new one.
        settings: the settings of a new :class:`pinpool.Pool`. The default ``max_bytes`` is three quarters of the memory of the
            cgroup, or else of the machine, divided by ``LOCAL_WORLD_SIZE``; a log line states it. The default ``backend`` is
            ``gpu``, so memory that CUDA does not pin is an error. The default ``device`` is torch's current GPU if torch has
            started CUDA, or else the GPU of ``LOCAL_RANK``, or else the first, so that no rank creates a context on the GPU of
            another rank.

    Raises:
        PinpoolError: torch is missing, too old, or built for ROCm or without CUDA; the compiler failed; no GPU backend works; or an
            earlier pool is still installed.
        TypeError: both a pool and settings are given.
    """
    global _installed
    if pool is not None and settings:
        raise TypeError(f"install accepts a pool or settings of a new pool, not both: {', '.join(sorted(settings))}")
    with _lock:
        if _installed is not None:
            raise PinpoolError("a pool serves torch's pinned memory already: call pinpool.torch.uninstall() first")
        shim = _load()
        if pool is None:
            pool = _pinpool_pool(**settings)
        _warn_of_ignored_settings()
        error = ctypes.create_string_buffer(1024)
        functions = ctypes.c_void_p(_pinpool._torch_functions(pool))
        if shim.pinpool_torch_install(functions, error, ctypes.c_size_t(len(error))) != 0:
            raise PinpoolError(f"torch's allocator was not replaced: {error.value.decode(errors='replace')}")
        _installed = pool
        return pool


def uninstall() -> int:
    """Returns later requests to torch's own allocator. Returns the number of pool blocks still in use.

    While blocks are in use, pinpool's allocator remains installed and forwards requests, because only it knows which copies use
    the blocks. Call it again later to restore torch's allocator. Without an installed pool it does nothing and returns 0.
    """
    global _installed
    with _lock:
        if _shim is None:
            return 0
        left: int = _shim.pinpool_torch_uninstall()
        _installed = None
        return left


def is_installed() -> bool:
    """Whether a pool serves torch's pinned memory."""
    return _installed is not None


def pool() -> Pool | None:
    """The pool that serves torch's pinned memory, or ``None``."""
    return _installed


def _pinpool_pool(**settings: Any) -> Pool:
    if "device" not in settings and not os.environ.get("PINPOOL_DEVICE"):
        settings["device"] = _device()
    if settings.get("backend") is None and os.environ.get("PINPOOL_BACKEND", "auto") in ("", "auto"):
        settings["backend"] = "gpu"
    chosen = _limit.choose(settings, os.environ, _pinpool._host_memory())
    if chosen is not None:
        settings["max_bytes"], line = chosen
        _log.info("%s", line)
    return Pool(**{"name": "torch", **settings})


def _device() -> int:
    """The GPU of this process: torch's current GPU, or else the GPU of its local rank. Does not start CUDA."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.current_device()
    rank = os.environ.get("LOCAL_RANK", "")
    # A launcher may make only one GPU visible to each rank.
    return int(rank) if rank.isdecimal() and int(rank) < torch.cuda.device_count() else 0


def _warn_of_ignored_settings() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        pinned = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip().startswith("pinned_")]
        if pinned:
            _log.warning(
                "torch setting: %s=%s has no effect while a pool serves torch's pinned memory; set PINPOOL_MAX_BYTES, "
                "PINPOOL_MAX_IDLE_BYTES or PINPOOL_RESERVE instead", name, ",".join(pinned)
            )


def _load() -> ctypes.CDLL:
    """The shim for the installed torch: from the wheel, or else compiled."""
    global _shim
    if _shim is not None:
        return _shim
    try:
        import torch
    except ImportError as why:
        raise PinpoolError(f"torch cannot be imported ({why}): pip install 'torch>={_dotted(OLDEST)}'") from why
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < OLDEST:
        raise PinpoolError(
            f"torch {torch.__version__} has an older host allocator interface than pinpool implements: "
            f"{_dotted(OLDEST)} or newer is needed. Pools and their buffers work with it (pinpool.Pool, pool.empty(library='torch'))"
        )
    if torch.version.hip is not None:
        raise PinpoolError(f"torch {torch.__version__} is built for ROCm, and pinpool pins memory with CUDA: install a CUDA build of torch")
    shim = _of_the_wheel(torch.__version__) or ctypes.CDLL(_compiled(torch.__version__))
    shim.pinpool_torch_install.restype = ctypes.c_int
    shim.pinpool_torch_uninstall.restype = ctypes.c_size_t
    _shim = shim
    if not torch.cuda.is_available():
        _log.warning("torch no_gpu: torch finds no GPU, so pin_memory() fails and pin_memory=True has no effect")
    return shim


def _of_the_wheel(version: str) -> ctypes.CDLL | None:
    """The shim that the wheel contains for this torch release."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\+.*)?", version)
    path = _SHIMS / f"torch_{release[1]}_{release[2]}.so" if release else None
    if path is None or not path.is_file():
        return None
    try:
        # Resolves all symbols now, so that a different interface fails here and not in a later call.
        return ctypes.CDLL(os.fspath(path), os.RTLD_NOW)
    except OSError as why:
        _log.info("torch incompatible: the allocator in this wheel cannot be loaded by torch %s (%s), so it is compiled", version, why)
        return None


def _compiled(version: str) -> str:
    """The path of the shim, compiled for this version of torch."""
    global _failures
    # torch considers a failed build complete when it is requested again, so each attempt has a new name.
    again = f"_{_failures}" if _failures else ""
    search = os.environ.get("PATH")
    _log.info("torch compiling: compiling the allocator for torch %s once, which takes about ten seconds", version)
    try:
        from torch.utils import cpp_extension

        # pip installs ninja there, whether or not the environment of this interpreter is activated.
        os.environ["PATH"] = os.pathsep.join([search or os.defpath, sysconfig.get_path("scripts")])
        library: str = cpp_extension.load(
            name=f"pinpool_torch_{re.sub(r'[^0-9A-Za-z_]', '_', version)}{again}",
            sources=[os.fspath(_SOURCE)],
            extra_cflags=["-O2"],
            is_python_module=False,
        )
        return library
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as why:
        _failures += 1
        raise BackendError(
            f"pinpool's allocator does not compile for torch {version}: a C++ compiler and ninja are needed "
            f"(pip install ninja setuptools; CXX names the compiler), or a wheel of pinpool that knows this version. {why}"
        ) from why
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
