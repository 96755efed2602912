"""`Pool.empty`: arrays and tensors in pinned memory."""

import sys

import numpy as np
import pytest

import pinpool.torch
import pinpool_loader
from helpers import in_use


def test_an_array_has_shape_dtype_and_order(pool):
    array = pool.empty((3, 4), np.float32)
    assert (array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable) == ((3, 4), np.float32, True, True)
    assert pool.empty((3, 4), order="F").flags.f_contiguous
    assert pool.empty(5).dtype == np.float64 and pool.empty([2, 2], "i2").dtype == np.int16
    assert pool.empty((), np.int64).shape == ()
    record = pool.empty(4, [("x", "f4"), ("n", "i8")])
    record["n"] = 7
    assert record["n"].sum() == 28


def test_memory_returns_when_the_array_and_its_views_are_gone(pool):
    array = pool.empty((100, 100))
    array[:] = 1
    part = array[3:5].T
    del array
    assert in_use(pool) == 1 and part.sum() == 200
    del part
    assert in_use(pool) == 0 and pool.stats()["requests"]["returned"] == 1


def test_an_empty_array_uses_no_buffer(pool):
    assert pool.empty((0, 3)).shape == (0, 3) and pool.empty(3, "V0").itemsize == 0
    assert pool.stats()["requests"]["served"] == 0


@pytest.mark.parametrize(
    "shape, dtype, error, text",
    [
        (-1, "f4", ValueError, r"shape must have lengths of 0 or more, not \(-1,\)"),
        ((3, -2), "f4", ValueError, r"lengths of 0 or more, not \(3, -2\)"),
        ((2**40, 2**40), "f8", pinpool.RequestError, "must be at most"),
        (2**62, "f8", pinpool.RequestError, "invalid size nbytes=36893488147419103232"),
        (3, object, TypeError, "Python objects, which cannot be in pinned memory"),
        (3, "no such type", TypeError, "no such type"),
        ("ab", "f4", TypeError, "integer"),
        ((1.5,), "f4", TypeError, "integer"),
        ("64MiB", "f4", TypeError, "integer"),
        (2**40, "u1", pinpool.LimitError, "exceeds the pool limit of 64.0MiB"),
    ],
)
def test_invalid_shapes_and_dtypes_are_named(pool, shape, dtype, error, text):
    with pytest.raises(error, match=text):
        pool.empty(shape, dtype)
    assert in_use(pool) == 0


def test_without_torch_each_call_that_needs_it_raises_import_error(tmp_path, pool, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(pinpool.torch._allocator, "load", pinpool.torch._allocator.load.__wrapped__)
    (tmp_path / "a").write_bytes(b"a")
    (batch,) = pinpool_loader.Loader(tmp_path, pool=pool)
    for call in (lambda: pool.empty(3, library="torch"), batch.tensors):
        with pytest.raises(ImportError, match="needs PyTorch.*pip install torch"):
            call()
    with pytest.raises(ImportError, match="torch cannot be imported.*pip install 'torch>=2.11'"):
        pinpool.torch.install()


def test_torch_tensors(pool):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = pool.empty((3, 4), torch.float16, library="torch")
    assert tensor.shape == (3, 4) and tensor.dtype == torch.float16
    tensor.fill_(2)
    part = tensor[1]
    del tensor
    assert in_use(pool) == 1 and part.sum() == 8
    del part
    assert in_use(pool) == 0
    for dtype in (np.float32, np.dtype("f4"), "float32", torch.float32):
        assert pool.empty(3, dtype, library="torch").dtype == torch.float32
    with pytest.raises(TypeError, match="dtype torch.float32 belongs to torch: pass library='torch'"):
        pool.empty((3, 4), torch.float32, library="numpy")
    assert pool.empty((3, 4), torch.bfloat16).dtype == torch.bfloat16
    for unknown in ("f4", np.dtype("<U3")):
        with pytest.raises(TypeError, match="is unknown to torch"):
            pool.empty(3, unknown, library="torch")
    buf = pool.get(64)
    tensor = torch.from_dlpack(buf)
    with pytest.raises(BufferError):
        buf.release()
    del tensor
    buf.release()
