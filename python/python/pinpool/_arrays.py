"""Arrays and tensors over pool buffers."""

import math
import operator
import sys
from typing import Any

from . import _pinpool


def record_stream(array: Any, stream: Any) -> None:
    """Delays the reuse of the memory of `array` until all work enqueued on `stream` so far has completed.

    Call it after each asynchronous copy and before the array is dropped. Unlike torch's `Tensor.record_stream`, it covers only the work
    that is already enqueued: a call before the copy does not protect the memory.

        inputs = images.to("cuda", non_blocking=True)
        pinpool.record_stream(images, torch.cuda.current_stream())

    Args:
        array: an array or tensor over a buffer of a pool: from `pool.empty`, a batch, `torch.from_dlpack(buf)` or `np.asarray(buf)`,
            or a view of one. One call covers all arrays of a batch, which share a buffer.
        stream: as for `Buffer.record_stream`.

    Raises:
        TypeError: `array` is not over a buffer of a pool, or `stream` is not a stream.
        BackendError, DeviceError, RequestError: as for `Buffer.record_stream`.
    """
    if not _pinpool._record_stream(_address(array), stream):
        raise TypeError(
            f"the memory of this {type(array).__name__} is not in a pool buffer: pass an array from pool.empty or a batch, or a view of one"
        )


def _address(array):
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.untyped_storage().data_ptr()
    import numpy as np

    return np.asarray(array).ctypes.data


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
        raise TypeError(f"dtype {dtype} has Python objects, which cannot be in pinned memory: use another dtype")
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    nbytes = math.prod(lengths) * dtype.itemsize
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return np.empty(lengths, dtype, order)
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
    return torch.frombuffer(memoryview(buf), dtype=dtype).reshape(lengths)
