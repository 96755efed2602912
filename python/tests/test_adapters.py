"""CuPy and JAX with buffers of a pool."""

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


def test_jax_imports_a_buffer_without_a_copy(pool):
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    buf = pool.get(4096)
    np.frombuffer(buf, np.uint8)[:] = 5
    array = jnp.from_dlpack(buf)
    assert array.unsafe_buffer_pointer() == buf.ptr and int(array.sum()) == 5 * 4096
    with pytest.raises(BufferError):
        buf.release()
    del array
    gc.collect()
    buf.release()
