"""Buffers: bytes, views, and when the memory returns to the pool."""

import gc
import io
import weakref

import numpy as np
import pytest

import pinpool
from helpers import heap, in_use

KIB = 1024


def test_a_buffer_is_writable_and_has_the_requested_length(pool):
    with pool.get(1000) as buf:
        assert len(buf) == buf.nbytes == 1000 and buf.ptr % 4096 == 0
        view = memoryview(buf)
        assert (view.nbytes, view.readonly, view.format, view.ndim) == (1000, False, "B", 1)
        view[:] = b"x" * 1000
        assert bytes(buf) == b"x" * 1000
        assert io.BytesIO(b"abc").readinto(buf) == 3
        assert bytes(view[:4]) == b"abcx"
        view.release()


def test_numpy_sees_the_same_memory(pool):
    buf = pool.get(64)
    for array in (np.frombuffer(buf, np.float32), np.asarray(buf).view(np.float32), np.from_dlpack(buf).view(np.float32)):
        assert array.ctypes.data == buf.ptr and array.size == 16 and array.flags.writeable
        array[:] = 2.5
    assert bytes(buf) == np.full(16, 2.5, np.float32).tobytes()
    interface = buf.__array_interface__
    assert interface["data"] == (buf.ptr, False) and interface["shape"] == (64,)


def test_a_view_that_outlives_its_buffer_keeps_the_memory(pool):
    buf = pool.get(64 * KIB)
    array = np.frombuffer(buf, np.uint8)
    part = array[10:20]
    array[:] = 3
    del buf, array
    others = [pool.get(64 * KIB) for _ in range(4)]
    for other in others:
        np.frombuffer(other, np.uint8)[:] = 9
    assert in_use(pool) == 5 and set(part) == {3}
    del part
    assert in_use(pool) == 4


def test_a_buffer_outlives_its_pool():
    pool = heap()
    buf, array, exported = pool.get(100), pool.empty(10), np.from_dlpack(pool.get(100))
    array[:], exported[:] = 4, 8
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    memoryview(buf)[:] = b"y" * 100
    assert bytes(buf) == b"y" * 100 and array.sum() == 40 and set(exported) == {8}
    buf.release()


def test_a_pool_that_ends_before_its_buffers_releases_idle_memory_silently(run_in_subprocess):
    out, err = run_in_subprocess("""
        import pinpool
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) >> 8  # MiB
        pool = pinpool.Pool(env=False, backend="heap")
        buf, other = pool.get(100), pool.get("64MiB")
        memoryview(other)[:] = bytes(64 << 20)
        other.release()
        before = resident()
        del pool
        print(before - resident() > 32)
        del buf
    """)
    assert out == "True\n" and err == ""


def test_release_returns_the_memory_and_ends_every_use(pool):
    buf = pool.get(100)
    address = buf.ptr
    buf.release()
    buf.release()
    assert in_use(pool) == 0 and pool.stats()["requests"]["returned"] == 1 and buf.is_released
    for use in (memoryview, np.frombuffer, np.from_dlpack, lambda b: b.ptr, lambda b: b.__enter__(), lambda b: b.__array_interface__):
        with pytest.raises(pinpool.ReleasedError, match="100 bytes was released") as caught:
            use(buf)
        assert not isinstance(caught.value, pinpool.ClosedError)
    assert not issubclass(pinpool.ClosedError, pinpool.ReleasedError)
    with pytest.raises(ValueError):
        buf.record_stream(0)
    assert pool.get(100).ptr == address, "the memory is reused"
    assert "released" in repr(buf)


def test_release_with_views_is_refused_without_effect(pool):
    buf = pool.get(100)
    views = [memoryview(buf), np.frombuffer(buf, np.uint8), np.from_dlpack(buf)]
    assert buf.num_views == 3
    with pytest.raises(BufferError, match="3 views of this buffer .* delete them first"):
        buf.release()
    views.pop()
    with pytest.raises(BufferError):
        buf.release(stream=0)
    views.pop()
    with pytest.raises(BufferError, match="a view of this buffer .* delete it first"):
        buf.release()
    assert in_use(pool) == 1 and not buf.is_released
    views.pop()
    buf.release()
    assert in_use(pool) == 0


def test_the_end_of_with_leaves_the_memory_to_its_views(pool):
    with pytest.raises(KeyError), pool.get(100) as buf:
        array = np.frombuffer(buf, np.uint8)
        array[:] = 1
        raise KeyError
    buf.release()
    assert buf.is_released and in_use(pool) == 1
    assert set(array) == {1}
    del array
    assert in_use(pool) == 0


def test_arrays_through_the_array_interface_keep_the_buffer_until_it_dies(pool):
    class Other:
        def __init__(self, buf):
            self.__array_interface__, self.buf = buf.__array_interface__, buf

    buf = pool.get(100)
    array = np.asarray(Other(buf))
    with pytest.raises(BufferError, match="__array_interface__ was read"):
        buf.release()
    buf.__exit__()
    array[:] = 5
    assert in_use(pool) == 1
    del buf, array
    assert in_use(pool) == 0


def test_dlpack_is_host_memory_with_and_without_a_version(pool):
    buf = pool.get(100)
    assert buf.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(buf.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(buf.__dlpack__())
    gc.collect()
    assert buf.num_views == 0, "a capsule that is never imported ends its view"
    array = np.from_dlpack(buf)
    assert array.ctypes.data == buf.ptr and buf.num_views == 1
    for ask in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            buf.__dlpack__(**ask)
    with pytest.raises(BufferError, match="CUDA has not pinned.*backend=.gpu."):
        buf.__dlpack__(dl_device=(3, 0))


def test_an_empty_buffer(pool):
    with pool.get(0) as buf:
        assert len(buf) == 0 and bytes(buf) == b"" and not buf.is_pinned
        assert np.from_dlpack(buf).size == 0 and np.asarray(buf).size == 0
    assert pool.stats()["requests"]["served"] == 0
