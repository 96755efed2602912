"""CuPy's pinned memory from a pool.

    pinpool.cupy.install(pool)      # cupy.asarray(..., blocking=False), cupyx.empty_pinned and CuPy's own copies use it
    pinpool.cupy.uninstall()        # CuPy's own pool again

CuPy keeps memory of its own copies until their events are over, and then drops it. For other copies the rule is that of
CuPy's own pool: keep the array until the copy is over.
"""

import cupy

from . import Pool


class _Memory:
    """What CuPy asks of pinned memory; the buffer goes back when CuPy drops it."""

    def __init__(self, buf):
        self.buf, self.ptr, self.size = buf, buf.ptr, len(buf)


def allocator(pool: Pool):
    """A function for `cupy.cuda.set_pinned_memory_allocator`."""

    def allocate(size):
        return cupy.cuda.PinnedMemoryPointer(_Memory(pool.get(size)), 0)

    return allocate


def install(pool: Pool) -> None:
    """From now on CuPy takes its pinned memory from `pool`. What it has already stays valid."""
    cupy.cuda.set_pinned_memory_allocator(allocator(pool))


def uninstall() -> None:
    """From now on CuPy takes its pinned memory from its own default pool. What it has from a pinpool stays valid."""
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
