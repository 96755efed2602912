"""Arrays and tensors over pool buffers."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeGuard

import numpy as np

from . import _pinpool

if TYPE_CHECKING:
    import torch

    from ._pinpool import _Stream
    from ._settings import Time

    _Shape = SupportsIndex | Sequence[SupportsIndex]
    _Order = Literal["C", "F"]
    _Array = np.ndarray[Any, np.dtype[Any]]

#: Types of values that contain no arrays. A batch may have many of them, so they are checked first.
_ATOMS = (str, bytes, int, float, complex, np.generic, type(None))


def record_stream(arrays: Any, stream: _Stream, *, missing_ok: bool = False) -> int:
    """Delays the reuse of the memory of `arrays` until all work enqueued on `stream` so far has completed.

    Call it after each asynchronous copy and before the arrays are dropped, with the stream of the copy. Unlike torch's
    `Tensor.record_stream`, it covers only the work that is already enqueued, so a call before the copy does not protect the
    memory. `pinpool.torch.to_device` copies and records tensors in one call. After `pinpool.torch.install`, torch reports its
    non-blocking copies to the pool, so they need no call.

        inputs = images.to("cuda", non_blocking=True)
        pinpool.record_stream(images, torch.cuda.current_stream())

    Args:
        arrays: an array or tensor over a buffer of a pool (from `pool.empty`, a batch, `torch.from_dlpack(buf)` or
            `np.asarray(buf)`), or a view of such an array. One call covers all arrays of the same buffer. Empty arrays have no
            memory and need no call. `arrays` may also be a `Batch` of `pinpool_loader.Loader`, or a dict, list or tuple with at
            least one array in a pool. Other arrays, numbers, text and other objects in it are ignored. Objects that may hide
            tensors are refused: objects with a method `to`, and dataclasses and other containers with a tensor or array.
        stream: as for `Buffer.record_stream`.
        missing_ok: whether arrays outside pools are accepted even if none is in a pool.

    Returns:
        The number of buffers that the stream was recorded on.

    Raises:
        TypeError: no array is in a pool buffer, or a container has no arrays (with `missing_ok` only if an object is not an array);
            an object is refused, or a tensor is on a GPU (other arrays are still recorded); or `stream` is not a stream.
        BackendError, DeviceError, RequestError: as for `Buffer.record_stream`. The other arrays are still recorded.
    """
    is_single = not isinstance(arrays, (Mapping, list, tuple))
    values = list(values_in(arrays))
    missing = [arrays] if not values and not missing_ok else []
    # The address of the buffer that contains each address, or None outside pools. An empty array has the address 0.
    buffers: dict[int, int | None] = {}
    failures: list[Exception] = []
    for value in values:
        is_array = is_tensor(value) or isinstance(value, (np.ndarray, memoryview, _pinpool.Buffer))
        try:
            if not is_array and not is_single and not is_loader_batch(value):
                refuse_hidden_arrays(value, "recorded")
            # A single object of another kind, such as a JAX array, is converted to find its address.
            address = _address(value) if is_array or is_single else None
            if address and address not in buffers:
                buffers[address] = _pinpool._record_stream(address, stream)
            if address is None or (address and buffers[address] is None and not (is_array and missing_ok)):
                missing.append(value)
        except Exception as error:
            # Raised after the loop, because the other buffers still need their fences.
            failures = failures or [error]
    if failures:
        raise failures.pop(0)  # No variable may keep it: its traceback refers to this frame, and so to the arrays.
    recorded = set(buffers.values()) - {None}
    if missing and not recorded:
        raise _not_in_a_pool(missing[0])
    return len(recorded)


def _not_in_a_pool(value: Any) -> TypeError:
    if isinstance(value, (Mapping, list, tuple)):
        return TypeError(f"no array is in this {type(value).__name__}, so no memory is protected: pass the arrays, or missing_ok=True")
    return TypeError(
        f"the memory of this {type(value).__name__} is not in a pool buffer: pass an array from pool.empty, a shared batch, or a field "
        "or `buffer` of a Loader's batch"
    )


def values_in(value: Any) -> Iterator[Any]:
    """Yields the values of a nested container, except values that cannot contain arrays: numbers, text and None."""
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from values_in(item)
    elif not isinstance(value, _ATOMS):
        yield value.buffer if is_loader_batch(value) and isinstance(value.buffer, _pinpool.Buffer) else value


def refuse_hidden_arrays(value: Any, omitted: str) -> None:
    """Raises TypeError if `value`, an object of another kind, has arrays that would not be copied or recorded."""
    if _has_arrays(value):
        raise TypeError(f"the tensors of a {type(value).__name__} would not be {omitted}: pass them in a dict, list or tuple")


def _has_arrays(value: Any) -> bool:
    """Returns whether `value` is a tensor, a numeric array, a buffer or another object with `to`, or a nesting of dicts, sequences
    and dataclasses with one."""
    if isinstance(value, _ATOMS):
        return False
    is_container = isinstance(value, (Mapping, Sequence))
    if is_tensor(value) or is_numeric(value) or is_loader_batch(value) or (hasattr(type(value), "to") and not is_container):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_arrays(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    if not is_container or isinstance(value, (bytearray, memoryview, range)):
        return isinstance(value, _pinpool.Buffer)
    return any(map(_has_arrays, value.values() if isinstance(value, Mapping) else value))


def is_numeric(value: Any) -> bool:
    """Returns whether `value` is an array of numbers or bools."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def is_loader_batch(value: Any) -> bool:
    """Returns whether `value` is a `Batch` of `pinpool_loader`."""
    return hasattr(type(value), "_pinpool_arrays")


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _address(array: Any) -> int:
    """Returns the address of the memory of an array, or 0 if the array is empty."""
    if is_tensor(array):
        if array.device.type != "cpu":
            raise TypeError(f"this tensor is on {array.device}: pass the tensor from which it was copied")
        return array.untyped_storage().data_ptr()
    array = np.asarray(array)
    return array.ctypes.data if array.size else 0


def empty(pool: _pinpool.PoolCore, shape: _Shape, dtype: Any, order: _Order, library: str | None, timeout: Time | None) -> Any:
    if library is None:
        library = "torch" if type(dtype).__module__ == "torch" else "numpy"
    if library not in ("numpy", "torch"):
        raise ValueError(f"library must be 'numpy' or 'torch', not {library!r}")
    return (_empty_array if library == "numpy" else _empty_tensor)(pool, shape, dtype, order, timeout)


def _lengths(shape: Any) -> tuple[int, ...]:
    lengths: tuple[int, ...]
    try:
        lengths = (operator.index(shape),)
    except TypeError:
        lengths = tuple(operator.index(length) for length in shape)
    if min(lengths, default=0) < 0:
        raise ValueError(f"shape must have lengths of 0 or more, not {lengths}")
    return lengths


def _empty_array(pool: _pinpool.PoolCore, shape: _Shape, dtype: Any, order: _Order, timeout: Time | None) -> _Array:
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
    # A memoryview keeps the memory in use. `np.ndarray(buffer=buf)` would keep only the object `buf`.
    return np.ndarray(lengths, dtype, np.frombuffer(memoryview(buf), np.uint8), order=order)


def _empty_tensor(pool: _pinpool.PoolCore, shape: _Shape, dtype: Any, order: _Order, timeout: Time | None) -> torch.Tensor:
    try:
        import torch
    except ImportError as error:
        raise ImportError("library='torch' needs PyTorch, which cannot be imported here: pip install torch") from error
    if order != "C":
        raise ValueError(f"order of a tensor must be 'C', not {order!r}: permute the tensor")
    if dtype is None:
        dtype = torch.get_default_dtype()
    elif not isinstance(dtype, torch.dtype):
        dtype_name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype {dtype_name!r} is unknown to torch: use torch.float32, 'float32', np.float32, ...")
    lengths = _lengths(shape)
    nbytes = math.prod(lengths) * dtype.itemsize
    buf = pool.get(nbytes, timeout=timeout)
    if nbytes == 0:
        return torch.empty(lengths, dtype=dtype)
    # torch keeps a reference to the object that it receives, but no view of it, so it receives a view.
    return torch.frombuffer(memoryview(buf), dtype=dtype).reshape(lengths)
