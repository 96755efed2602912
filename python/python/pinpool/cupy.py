"""Serves CuPy's pinned memory from a pool.

    pinpool.cupy.install(pool)      # for cupy.asarray(..., blocking=False), cupyx.empty_pinned and CuPy's own copies
    pinpool.cupy.uninstall()        # restores CuPy's own pool

CuPy keeps the memory of its own copies until they have completed. For other copies, keep the array until then, as with CuPy's own pool.
"""

import cupy

from . import Pool


class _Memory:
    """Memory as CuPy expects it. The buffer is released when CuPy drops this object."""

    def __init__(self, buf):
        self.buf, self.ptr, self.size = buf, buf.ptr, len(buf)


def allocator(pool: Pool):
    """Returns an allocator for `cupy.cuda.set_pinned_memory_allocator`."""

    def allocate(size):
        return cupy.cuda.PinnedMemoryPointer(_Memory(pool.get(size)), 0)

    return allocate


def install(pool: Pool) -> None:
    """Makes CuPy allocate pinned memory from `pool`. Existing memory stays valid."""
    cupy.cuda.set_pinned_memory_allocator(allocator(pool))


def uninstall() -> None:
    """Makes CuPy allocate pinned memory from its default pool. Existing memory stays valid."""
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
