"""Loads the allocator for the installed torch, and compiles it if the wheel does not contain it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from .._errors import BackendError
from .._log import logger

#: The oldest version of torch with the interface that host_allocator.cpp implements.
_OLDEST_TORCH = (2, 11)
_SOURCE = Path(__file__).with_name("host_allocator.cpp")
#: Allocators compiled for the versions of torch known when the wheel was built.
_PREBUILT = Path(__file__).with_name("prebuilt")

#: Longest compilation, which includes torch's wait for another process that compiles the same allocator.
_COMPILE_SECONDS = 600
#: Compiles in a separate process, because a call in this process could only find ninja through this process's PATH, and torch does
#: not repeat a failed build in the same process.
_COMPILE = """
import sys
from torch.utils import cpp_extension
try:
    path = cpp_extension.load(name=sys.argv[1], sources=[sys.argv[2]], extra_cflags=["-O2"], is_python_module=False)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(path)
"""


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the allocator for the installed torch: from the wheel, or else compiled."""
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
    return _load_prebuilt(torch.__version__) or ctypes.CDLL(_compile(torch.__version__))


def _load_prebuilt(version: str) -> ctypes.CDLL | None:
    """Returns the allocator that the wheel contains for this version of torch, or None."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\+.*)?", version)
    path = _PREBUILT / f"torch_{release[1]}_{release[2]}.so" if release else None
    if path is None or not path.is_file():
        return None
    try:
        # RTLD_NOW resolves all symbols now, so that an incompatible version of torch fails here and not in a later call.
        return ctypes.CDLL(os.fspath(path), os.RTLD_NOW)
    except OSError as error:
        logger.info("torch incompatible: the allocator in this wheel cannot be loaded by torch %s (%s), so it is compiled", version, error)
        return None


def _compile(version: str) -> str:
    """Compiles the allocator for this version of torch, and returns its path."""
    logger.info("torch compiling: compiling the allocator for torch %s once, which takes about ten seconds", version)
    # torch keeps one library per name, so another version of pinpool needs another name.
    source_digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    name = f"pinpool_torch_{re.sub(r'[^0-9A-Za-z_]', '_', version)}_{source_digest}"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    if shutil.which("ninja") is None:
        # pip installs ninja in this folder, whether or not the environment of this interpreter is activated.
        environ["PATH"] = os.pathsep.join([os.environ.get("PATH") or os.defpath, sysconfig.get_path("scripts")])
    command = [sys.executable or "python3", "-P", "-c", _COMPILE, name, os.fspath(_SOURCE)]
    try:
        compilation = subprocess.run(
            command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True, timeout=_COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"the allocator was not compiled within {_COMPILE_SECONDS} s, perhaps because a process that compiled it was killed: if no "
            f"process compiles it, delete the file `lock` of {name} in torch's extension cache (TORCH_EXTENSIONS_DIR, by default "
            "~/.cache/torch_extensions)"
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendError(
            f"the allocator does not compile for torch {version}: install a C++ compiler and ninja "
            f"(pip install ninja setuptools; CXX names the compiler), or a newer wheel of pinpool. {getattr(error, 'stderr', None) or error}"
        ) from error
    return compilation.stdout.splitlines()[-1]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
