"""Batches as nested containers of arrays and tensors in one buffer."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ._arrays import is_tensor

if TYPE_CHECKING:
    import torch

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Copies an array or tensor to a view of the buffer.
_CopyTo: TypeAlias = Callable[[Any], object]

#: Alignment of each array in bytes: a cache line.
_ALIGN = 64


class ArrayPosition(NamedTuple):
    """An array within a buffer."""

    offset: int
    shape: tuple[int, ...]
    #: Name of the NumPy or torch dtype; a NumPy dtype with fields is stored itself, because its name is incomplete.
    dtype: Any
    is_torch: bool


class BatchLayout:
    """The positions of the arrays of a batch within a buffer."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._copies: list[tuple[ArrayPosition, _CopyTo]] = []

    def _add(self, shape: Sequence[int], itemsize: int, dtype: Any, is_torch: bool, copy_to: _CopyTo) -> ArrayPosition:
        position = ArrayPosition(-(-self.nbytes // _ALIGN) * _ALIGN, tuple(shape), dtype, is_torch)
        self.nbytes = position.offset + math.prod(shape) * itemsize
        self._copies.append((position, copy_to))
        return position

    def _array(self, shape: Sequence[int], dtype: np.dtype[Any], copy_to: _CopyTo) -> ArrayPosition:
        _check_no_objects(dtype)
        return self._add(shape, dtype.itemsize, dtype.str if np.dtype(dtype.str) == dtype else dtype, False, copy_to)

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype, copy_to: _CopyTo) -> ArrayPosition:
        return self._add(shape, dtype.itemsize, str(dtype).removeprefix("torch."), True, copy_to)

    def place(self, value: Any) -> Any:
        """Returns `value` with its arrays and tensors replaced by their positions; everything else is unchanged."""
        if isinstance(value, ArrayPosition):
            return value
        if is_tensor(value):
            if not _is_plain(value):
                kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
                remedy = {"quantized": "dequantize()", "nested": "to_padded_tensor(0)"}.get(kind, "to_dense()")
                raise TypeError(f"a {kind} tensor is not stored as one dense array: convert it with {remedy}")
            return self._tensor(value.shape, value.dtype, lambda target: target.copy_(value.detach()))
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            return self._array(value.shape, value.dtype, lambda target: np.copyto(target, value))
        return map_items(value, lambda items: [self.place(item) for item in items])

    def collate(self, samples: list[Any], library: Literal["numpy", "torch"]) -> Any:
        """Returns `samples` as one batch of tensors ("torch") or arrays ("numpy"), with positions for stacked values."""
        return self._collate_as_torch(samples) if library == "torch" else self._stack(samples)

    def _collate_as_torch(self, samples: list[Any]) -> Any:
        """Returns the result of torch's `default_collate`, with positions instead of the tensors that it would stack."""
        import torch

        try:  # Private names, tested with torch 2.11 and 2.15.
            from torch.utils.data._utils.collate import collate, default_collate_fn_map
        except ImportError:  # The same batch, copied once more.
            return torch.utils.data.default_collate(samples)

        collate_tensors = default_collate_fn_map[torch.Tensor]

        def stack(tensors: list[torch.Tensor], *, collate_fn_map: Any) -> Any:
            first = tensors[0]
            are_alike = all(
                _is_plain(tensor) and tensor.shape == first.shape and tensor.dtype == first.dtype and tensor.device.type == "cpu"
                for tensor in tensors
            )
            if not are_alike:
                # torch raises an error, or returns a tensor that is copied to its position.
                return collate_tensors(tensors, collate_fn_map=collate_fn_map)
            tensors = [tensor.detach() for tensor in tensors]
            return self._tensor((len(tensors), *first.shape), first.dtype, lambda target: torch.stack(tensors, out=target))

        return self.place(collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack}))

    def _stack(self, samples: list[Any]) -> Any:
        """Returns `samples` as NumPy arrays, each with a position, in the containers of the first sample."""
        if not samples:
            raise ValueError("no samples to stack: a batch has one or more")
        first = samples[0]
        array = _as_array(first)
        if array is not None:
            arrays: list[Any] = [_as_array(sample) for sample in samples]
            shapes = {None if array is None else array.shape for array in arrays}
            if len(shapes) > 1:
                raise ValueError(f"samples of shapes {sorted(map(str, shapes))} cannot be stacked: make them equal, or use `pack`")
            shape = (len(samples), *array.shape)
            return self._array(shape, _common_dtype(arrays), lambda target: np.stack(arrays, out=target, casting="safe"))
        if isinstance(first, (bool, int, float)):
            return self.place(_numbers(samples))
        if isinstance(first, dict):
            return _with_items(first, list(first), [self._stack([sample[key] for sample in samples]) for key in first])
        if isinstance(first, (list, tuple)):
            if len({len(sample) for sample in samples}) > 1:
                raise ValueError("samples of different numbers of elements cannot be stacked: make them equal, or use `pack`")
            return _with_elements(first, [self._stack(list(column)) for column in zip(*samples, strict=True)])
        return list(samples)

    def fill(self, memory: Any) -> None:
        """Copies the arrays and tensors to their positions in `memory`."""
        views = Views(memory)
        for position, copy_to in self._copies:
            if math.prod(position.shape):
                copy_to(views.restore(position))
        self._copies.clear()


class Views:
    """Arrays and tensors over one buffer."""

    # A recursive closure would be a reference cycle, which would keep the memory until the next garbage collection.

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._tensor: torch.Tensor | None = None
        self._array: _Array = np.frombuffer(memory, np.uint8) if len(memory) else np.empty(0, np.uint8)

    def restore(self, value: Any) -> Any:
        if not isinstance(value, ArrayPosition):
            return map_items(value, lambda items: [self.restore(item) for item in items])
        if value.is_torch:
            return self._tensor_of(value)
        dtype = np.dtype(value.dtype)
        _check_no_objects(dtype)
        return np.ndarray(value.shape, dtype, self._array, value.offset)

    def _tensor_of(self, position: ArrayPosition) -> torch.Tensor:
        import torch

        dtype, count = getattr(torch, position.dtype), math.prod(position.shape)
        if not count:
            return torch.empty(position.shape, dtype=dtype)
        if self._tensor is None:
            # torch keeps a reference to the object that it receives, but no view of it, so it receives a view.
            self._tensor = torch.frombuffer(memoryview(self._memory), dtype=torch.uint8)
        end = position.offset + count * dtype.itemsize
        return self._tensor[position.offset : end].view(dtype).reshape(position.shape)


def choose_library(library: Literal["numpy", "torch"] | None) -> Literal["numpy", "torch"]:
    """Returns the library of batches; by default torch if it is installed."""
    if library not in (None, "numpy", "torch"):
        raise ValueError(f"library must be 'numpy' or 'torch', not {library!r}")
    return library or ("torch" if _has_torch() else "numpy")


def _has_torch() -> bool:
    """Returns whether torch is imported or installed. A folder `torch` without `__init__.py` is not torch."""
    if "torch" in sys.modules:
        return sys.modules["torch"] is not None
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` is an ordinary dense tensor."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _check_no_objects(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} has Python objects, which cannot be in memory that processes share")


def _as_array(value: Any) -> _Array | None:
    """Returns `value` as a NumPy array, or None if it is neither an array nor a tensor."""
    if is_tensor(value):
        try:
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"a tensor of {value.dtype} and {value.layout} cannot be converted to a NumPy array: library='torch' keeps it. {error}"
            ) from None
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return np.asarray(value)
    return None


def _common_dtype(arrays: list[_Array]) -> np.dtype[Any]:
    """Returns the dtype that represents the elements of all `arrays` without loss."""
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    if len(dtypes) == 1:
        return dtypes[0]
    if len({dtype.kind for dtype in dtypes}) > 1 or dtypes[0].kind not in "iufcSU":
        dtype_names = ", ".join(map(str, dtypes))
        raise ValueError(f"samples of the dtypes {dtype_names} cannot be stacked without loss: convert them to one, or use `pack`")
    return np.result_type(*dtypes)


def _numbers(samples: list[Any]) -> _Array:
    """Returns Python numbers as an array. Raises TypeError or ValueError if an array cannot represent them exactly."""
    numbers = [sample.item() if isinstance(sample, (np.bool_, np.number)) else sample for sample in samples]
    for number in numbers:
        if not isinstance(number, (bool, int, float)):
            raise TypeError(f"{type(numbers[0]).__name__} and {type(number).__name__} cannot be stacked: make them equal, or use `pack`")
    try:
        array = np.array(numbers)
    except OverflowError:
        array = np.array(numbers, object)
    # NumPy uses floats for ints that fit into neither int64 nor uint64.
    is_exact = not array.dtype.hasobject and (array.dtype.kind != "f" or any(isinstance(number, float) for number in numbers))
    if is_exact and all(not isinstance(number, int) or number == stored for number, stored in zip(numbers, array.tolist(), strict=True)):
        return array
    raise ValueError(f"no 64-bit dtype represents all numbers from {min(numbers)} to {max(numbers)} exactly: pass them as str")


def map_items(value: Any, visit: Callable[[list[Any]], list[Any]]) -> Any:
    """Returns `value` with `visit` applied to its items, or `value` itself if that changes nothing."""
    keys: list[Any] | None
    if isinstance(value, Mapping):
        keys, items = list(value), list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview, range)):
        keys, items = None, list(value)
    else:
        return value
    changed = visit(items)
    if all(new is old for new, old in zip(changed, items, strict=True)):
        return value
    return _with_elements(value, changed) if keys is None else _with_items(value, keys, changed)


# The following functions create the same containers as torch's `default_collate`.


def _with_items(mapping: Any, keys: list[Any], items: list[Any]) -> Any:
    changed = dict(zip(keys, items, strict=True))
    try:
        if not isinstance(mapping, MutableMapping):
            return type(mapping)(changed)
        clone = copy.copy(mapping)
        clone.update(changed)
        return clone
    except TypeError:
        return changed


def _with_elements(sequence: Any, elements: list[Any]) -> Any:
    if isinstance(sequence, tuple):
        # The constructor is not called, because a PackedSequence's constructor expects tensors.
        return tuple.__new__(type(sequence), elements) if hasattr(sequence, "_fields") else tuple(elements)
    try:
        if not isinstance(sequence, MutableSequence):
            return type(sequence)(elements)
        clone = copy.copy(sequence)
        for index, element in enumerate(elements):
            clone[index] = element
        return clone
    except TypeError:
        return elements
