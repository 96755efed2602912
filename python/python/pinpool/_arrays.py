"""Arrays and tensors over pool buffers."""

import math
import operator
import sys
import weakref
from typing import Any

from ._pinpool import Buffer

# Buffers by address, for tensors, which do not expose the object that owns their memory.
_buffers = weakref.WeakValueDictionary()


def register(buf):
    """Lets `record_stream` find `buf` from a tensor over its memory."""
    _buffers[buf.ptr] = buf


def record_stream(array: Any, stream: Any) -> None:
    """Prevents reuse of the memory of `array` until all work enqueued on `stream` so far has completed.

    `array` is an array or tensor from `pool.empty`, a view of one, or any NumPy view of a buffer. It stays in use; its memory
    returns to the pool when nothing refers to it and the work has completed, as with torch's `Tensor.record_stream`.
    """
    buf = _buffer_of(array)
    if buf is None:
        raise TypeError(
            f"the memory of this {type(array).__name__} is not in a pool buffer: pass an array from pool.empty or a batch, a view of one, "
            "or call record_stream of the buffer"
        )
    buf.record_stream(stream)


def _buffer_of(array):
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        address = array.untyped_storage().data_ptr()
        if (buf := _buffers.get(address)) is not None:
            return buf
        # A tensor made from an array may begin within its buffer.
        buffers = [buf for ref in _buffers.valuerefs() if (buf := ref()) is not None and not buf.released]
        return next((buf for buf in buffers if 0 <= address - buf.ptr < buf.nbytes), None)
    while array is not None and not isinstance(array, Buffer):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array


def empty(pool, shape, dtype, order, library, timeout):
    if library == "numpy":
        return _numpy(pool, shape, dtype, order, timeout)
    if library == "torch":
        return _torch(pool, shape, dtype, order, timeout)
    raise ValueError(f"library must be 'numpy' or 'torch', not {library!r}")


def _lengths(shape):
    try:
        lengths = (operator.index(shape),)
    except TypeError:
        lengths = tuple(operator.index(length) for length in shape)
    for length in lengths:
        if length < 0:
            raise ValueError(f"shape must have lengths of 0 or more, not {lengths}")
    return lengths


def _numpy(pool, shape, dtype, order, timeout):
    import numpy as np

    if type(dtype).__module__ == "torch":
        raise TypeError(f"dtype {dtype} belongs to torch: pass library='torch' for a tensor, or a NumPy dtype")
    lengths, dtype = _lengths(shape), np.dtype(float if dtype is None else dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype}: Python objects cannot lie in pinned memory; use a dtype of plain bytes")
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    nbytes = math.prod(lengths) * dtype.itemsize
    # NumPy refuses what it cannot index, the pool what does not fit.
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return np.empty(lengths, dtype, order)
    register(buf)
    # The view keeps the memory in use; `np.ndarray(buffer=buf)` would keep only the object.
    return np.ndarray(lengths, dtype, np.frombuffer(buf, np.uint8), order=order)


def _torch(pool, shape, dtype, order, timeout):
    try:
        import torch
    except ImportError as error:
        raise ImportError("library='torch' needs PyTorch, which cannot be imported here: pip install torch") from error
    if order != "C":
        raise ValueError(f"order of a tensor must be 'C', not {order!r}: permute the tensor")
    if dtype is None:
        dtype = torch.get_default_dtype()
    elif not isinstance(dtype, torch.dtype):
        named = dtype
        if not isinstance(named, str):
            import numpy as np

            named = np.dtype(named).name
        dtype = getattr(torch, named, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype {named!r} is unknown to torch: use torch.float32, 'float32', np.float32, ...")
    lengths = _lengths(shape)
    nbytes = math.prod(lengths) * dtype.itemsize
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return torch.empty(lengths, dtype=dtype)
    # torch keeps the object that it receives and releases it at the end, so it receives a view.
    register(buf)
    return torch.frombuffer(memoryview(buf), dtype=dtype).reshape(lengths)
