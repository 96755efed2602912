"""Libraries that take their pinned memory from a pool."""

import gc

import numpy as np
import pytest

from conftest import in_use


def test_cupy_takes_its_pinned_memory_from_a_pool(pool):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    import pinpool.cupy

    pinpool.cupy.install(pool)
    try:
        memory = cupy.cuda.alloc_pinned_memory(1000)
        array = np.frombuffer(memory, np.uint8, 1000)
        array[:] = 3
        assert array.ctypes.data == memory.ptr and memory.size() == 1000 and in_use(pool) == 1
        del memory
        assert in_use(pool) == 1
        del array
        gc.collect()
        assert in_use(pool) == 0
    finally:
        pinpool.cupy.uninstall()
