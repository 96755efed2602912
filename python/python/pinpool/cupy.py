"""Serves CuPy's pinned memory from a pool.

    pinpool.cupy.install(pool)      # for cupy.asarray(..., blocking=False), cupyx.empty_pinned and CuPy's own copies
    pinpool.cupy.uninstall()        # restores CuPy's own pool

CuPy keeps the memory of its own copies until they have completed. For other copies, keep the array until then, as with CuPy's own pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import cupy

from ._errors import AlreadyInstalledError
from ._pinpool import Buffer
from ._pool import Pool

if TYPE_CHECKING:
    from ._settings import PoolSettings

__all__ = ["install", "installed_pool", "uninstall"]

_lock = threading.Lock()
_installed: Pool | None = None


class _Memory:
    """Memory as CuPy expects it. The buffer is released when CuPy drops this object."""

    def __init__(self, buf: Buffer) -> None:
        self.buf, self.ptr, self.size = buf, buf.ptr, len(buf)


def _allocator(pool: Pool) -> Callable[[int], cupy.cuda.PinnedMemoryPointer]:
    """Returns an allocator for `cupy.cuda.set_pinned_memory_allocator`."""

    def allocate(size: int) -> cupy.cuda.PinnedMemoryPointer:
        return cupy.cuda.PinnedMemoryPointer(_Memory(pool.get(size)), 0)

    return allocate


def install(pool: Pool | None = None, /, **settings: Unpack[PoolSettings]) -> Pool:
    """Makes CuPy allocate pinned memory from `pool`, by default a new `Pool` with these settings, and returns the pool.

    Existing memory stays valid. Raises AlreadyInstalledError if a pool is installed, and TypeError if both a pool and settings are given.
    """
    global _installed
    if pool is not None and settings:
        raise TypeError(f"install accepts a pool or settings of a new pool, not both: {', '.join(sorted(settings))}")
    with _lock:
        if _installed is not None:
            raise AlreadyInstalledError("a pool already serves CuPy's pinned memory: call pinpool.cupy.uninstall() first")
        settings.setdefault("name", "cupy")
        pool = Pool(**settings) if pool is None else pool
        cupy.cuda.set_pinned_memory_allocator(_allocator(pool))
        _installed = pool
        return pool


def installed_pool() -> Pool | None:
    """Returns the pool that serves CuPy's pinned memory, or None."""
    return _installed


def uninstall() -> None:
    """Makes CuPy allocate pinned memory from its default pool. Existing memory stays valid."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed = None
            cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
