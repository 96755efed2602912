"""Arrays and tensors over buffers of a pool."""

import math
import operator


def empty(pool, shape, dtype, order, library, timeout):
    if library == "numpy":
        return _numpy(pool, shape, dtype, order, timeout)
    if library == "torch":
        return _torch(pool, shape, dtype, order, timeout)
    raise ValueError(f"library={library!r}: arrays can be of 'numpy' or 'torch'")


def _lengths(shape):
    try:
        lengths = (operator.index(shape),)
    except TypeError:
        lengths = tuple(operator.index(length) for length in shape)
    for length in lengths:
        if length < 0:
            raise ValueError(f"shape {lengths}: a length is 0 or more")
    return lengths


def _numpy(pool, shape, dtype, order, timeout):
    import numpy as np

    lengths, dtype = _lengths(shape), np.dtype(float if dtype is None else dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype}: Python objects cannot lie in pinned memory; use a dtype of plain bytes")
    if order not in ("C", "F"):
        raise ValueError(f"order={order!r}: 'C' or 'F'")
    nbytes = math.prod(lengths) * dtype.itemsize
    # NumPy itself refuses what it cannot index; the pool names what does not fit.
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return np.empty(lengths, dtype, order)
    # A view keeps the memory, where `np.ndarray(buffer=buf)` would keep the object only.
    return np.ndarray(lengths, dtype, np.frombuffer(buf, np.uint8), order=order)


def _torch(pool, shape, dtype, order, timeout):
    try:
        import torch
    except ImportError as error:
        raise ImportError("library='torch' needs PyTorch, which cannot be imported here: pip install torch") from error
    if order != "C":
        raise ValueError(f"order={order!r}: a tensor is made in 'C' order; permute it")
    if dtype is None:
        dtype = torch.get_default_dtype()
    elif isinstance(dtype, str):
        name, dtype = dtype, getattr(torch, dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype {name!r} is none of torch: use torch.float32, 'float32', ...")
    lengths = _lengths(shape)
    nbytes = math.prod(lengths) * dtype.itemsize
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return torch.empty(lengths, dtype=dtype)
    # torch keeps the object it is given and gives the view back: so it is given a view.
    return torch.frombuffer(memoryview(buf), dtype=dtype).reshape(lengths)
