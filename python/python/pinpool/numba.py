"""Numba's pinned memory from a pool.

    numba.cuda.set_memory_manager(pinpool.numba.memory_manager(pool))   # before the first use of the GPU

`numba.cuda.pinned_array` then takes its memory from the pool. Numba drops pinned memory while its copies may
run, and relies on a driver that waits for them. So the memory goes back behind the default stream, which is behind all streams of
`cuda.stream()`. Work on other streams, such as those that do not synchronize with the default stream, is not covered: keep the
array until it is over.
"""

import ctypes
import functools
import weakref

from numba.cuda.cudadrv import driver

from . import Pool

#: Of the default stream of CUDA.
_DEFAULT_STREAM = 0

# Whose work cannot be known to be over.
_lost = []


def _give_back(buf):
    try:
        buf.record_stream(_DEFAULT_STREAM)
    except Exception:
        _lost.append(buf)
    else:
        buf.release()


def memory_manager(pool: Pool):
    """A class for `numba.cuda.set_memory_manager`: Numba's own, with pinned memory from `pool`."""

    class PinnedFromPool(driver.NumbaCUDAMemoryManager):
        def memhostalloc(self, size, mapped=False, portable=False, wc=False):
            if mapped or wc:
                return super().memhostalloc(size, mapped, portable, wc)
            buf = pool.get(size)
            # Later versions have the bindings of NVIDIA alone, and no such name.
            address = buf.ptr if getattr(driver, "USE_NV_BINDING", True) else ctypes.c_void_p(buf.ptr)
            context = weakref.proxy(self.context)
            return driver.PinnedMemory(context, address, size, finalizer=functools.partial(_give_back, buf))

    return PinnedFromPool
