"""CuPy and JAX with buffers of a pool."""

import gc
import importlib
import sys
import threading
import types

import numpy as np
import pytest

import pinpool
from helpers import in_use


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


def test_install_for_cupy_makes_a_pool_from_settings(pool, monkeypatch):
    allocators = []
    fake = types.SimpleNamespace(set_pinned_memory_allocator=allocators.append, PinnedMemoryPointer=lambda memory, offset: memory)
    cupy = types.SimpleNamespace(cuda=fake, get_default_pinned_memory_pool=lambda: types.SimpleNamespace(malloc="default"))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "pinpool.cupy", raising=False)
    vars(pinpool).pop("cupy", None)
    module = pinpool.cupy  # Imported at its first use.
    made = module.install(backend="heap", max_bytes="1MiB", env=False)
    assert made.name == "cupy" and module.installed_pool() is made
    memory = allocators[-1](1000)
    assert (memory.size, in_use(made)) == (1000, 1)
    with pytest.raises(pinpool.AlreadyInstalledError, match="uninstall"):
        module.install(pool)
    module.uninstall()
    assert allocators[-1] == "default" and module.installed_pool() is None
    refused = []

    def install_at_once(_allocator):
        """Installs another pool in another thread while this thread installs its own."""
        fake.set_pinned_memory_allocator = allocators.append

        def install():
            with pytest.raises(pinpool.AlreadyInstalledError):
                module.install(pool)
            refused.append(pool)

        threads.append(threading.Thread(target=install))
        threads[0].start()
        threads[0].join(0.2)

    threads, fake.set_pinned_memory_allocator = [], install_at_once
    assert module.install(made) is made
    threads[0].join(300)
    assert refused == [pool] and module.installed_pool() is made
    module.uninstall()
    with pytest.raises(TypeError, match="not both: max_bytes"):
        module.install(pool, max_bytes="1MiB")
    assert module.install(pool) is pool is module.installed_pool()
    module.uninstall()
    monkeypatch.setitem(sys.modules, "cupy", None)
    # Removed before monkeypatch's undo, which restores only what existed before.
    del sys.modules["pinpool.cupy"], pinpool.cupy
    assert not hasattr(pinpool, "cupy")
    with pytest.raises(ImportError):
        importlib.import_module("pinpool.cupy")


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
