"""Streams without a driver."""

import collections
import ctypes.util
import dataclasses
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

import pinpool
import pinpool_loader
from helpers import in_use


class OtherBatch:
    @property
    def buffer(self):
        raise RuntimeError("properties of unknown objects are not read")


has_driver = ctypes.util.find_library("cuda") is not None


STREAMS = {
    "default": 0,
    "handle": 0x7000,
    "torch": SimpleNamespace(cuda_stream=0x7000, device_index=0),
    "torch.accelerator": SimpleNamespace(native_handle=0x7000, device_index=0),
    "cupy": SimpleNamespace(ptr=0x7000, device_id=0, synchronize=None),
    "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, 0x7000)),
    "numba": SimpleNamespace(handle=ctypes.c_void_p(0x7000)),
}


@pytest.mark.skipif(has_driver, reason="there is a CUDA driver")
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_without_a_driver_a_stream_is_an_error_and_the_buffer_stays(pool, stream):
    buf = pool.get(100)
    for call in (lambda: buf.release(stream=stream), lambda: buf.record_stream(stream)):
        with pytest.raises(pinpool.BackendError, match="no libcuda.so.1.*release the buffer without one"):
            call()
    assert in_use(pool) == 1 and not buf.is_released
    buf.release()


@pytest.mark.parametrize("stream", ["0", 1.5, True, object()])
def test_an_object_that_is_not_a_stream_is_refused(pool, stream):
    buf = pool.get(100)
    with pytest.raises(TypeError, match="is not a stream: pass a CUDA stream handle .* torch, CuPy or Numba"):
        buf.release(stream=stream)
    with pytest.raises(TypeError, match="is not a stream"):
        buf.release(stream=pool.get(10))
    assert in_use(pool) == 1


def test_record_stream_finds_the_buffer_of_an_array(pool, tmp_path):
    array = pool.empty((4, 5))
    with pytest.raises(pinpool.BackendError if not has_driver else Exception):
        pinpool.record_stream(array[1:].reshape(-1)[2:], 0)
    for nothing in ([np.empty(0), {"name": ("a", 1.5, None)}], pool.empty(0)):
        assert pinpool.record_stream(nothing, 0) == 0
    for nothing in ([], {}, (1, 2), {"name": "text", "more": [None]}):
        assert pinpool.record_stream(nothing, 0, missing_ok=True) == 0
        with pytest.raises(TypeError, match=f"no array is in this {type(nothing).__name__}, so no memory is protected"):
            pinpool.record_stream(nothing, 0)
    for other in (np.zeros(3), memoryview(b"abc"), None, 7, [np.zeros(3), {"name": ("a", 1.5, None)}]):
        assert pinpool.record_stream(other, 0, missing_ok=True) == 0
    (tmp_path / "sample").write_bytes(b"x")
    [batch] = pinpool_loader.Loader(tmp_path, pool=pool)
    for taken in (batch, batch.buffer, [batch]):
        with pytest.raises(pinpool.BackendError if not has_driver else Exception):
            pinpool.record_stream(taken, 0)
    for other in (np.zeros(3), np.zeros(3)[1:], memoryview(b"abc"), None, 7, [np.zeros(3)], (array.copy(), [1, 2])):
        with pytest.raises(TypeError, match="is not in a pool buffer: pass an array from pool.empty"):
            pinpool.record_stream(other, 0)
    for unknown in ([np.zeros(3), object()], {"path": pathlib.Path("a")}, object(), OtherBatch()):
        for missing_ok in (False, True):
            with pytest.raises(TypeError, match="is not in a pool buffer"):
                pinpool.record_stream(unknown, 0, missing_ok=missing_ok)
    box = dataclasses.make_dataclass("Box", ["items"])
    for hidden in (box([np.ones(2)]), box((1, batch.buffer)), collections.deque([np.ones(2)]), type("Graph", (), {"to": None})()):
        for missing_ok in (False, True):
            with pytest.raises(TypeError, match=f"the tensors of a {type(hidden).__name__} would not be recorded: pass them in a dict"):
                pinpool.record_stream([np.ones(2), hidden], 0, missing_ok=missing_ok)
