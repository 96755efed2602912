"""Copies batches to a GPU (`prefetch`, `to_device`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _arrays
from .._errors import BackendError
from .._layout import map_items

if TYPE_CHECKING:
    import torch


def to_device(batch: Any, device: int | str | torch.device | None = None, *, stream: torch.cuda.Stream | None = None) -> Any:
    """Copies the tensors and numeric NumPy arrays of `batch`, a nesting of mappings and sequences, to a GPU.

    The default `device` is torch's current GPU, or the CPU if torch finds no GPU. On the CPU, the result uses the memory of `batch`, without
    a copy. A copy from pinned memory does not block; a copy from other memory may.

    Arrays become tensors. A `Batch` of `pinpool_loader` becomes a dict of its decoded fields by their first name, with its labels as "labels"
    if all are numbers. Other values stay as they are, but an object with a method `to`, and a dataclass with a tensor or array, are refused.

        inputs, targets = pinpool.torch.to_device(batch)
        copied = pinpool.torch.to_device(loader_batch)  # copied["jpg"], copied["labels"]

    The copies run on `stream`, by default the current stream of `device`. Other streams must wait for it (`wait_stream`). Pool memory
    is not reused before its copy has completed, so `batch` may be dropped immediately.

    Raises:
        TypeError, ValueError: `batch` has neither a tensor nor a numeric array, or has an object that is refused; torch cannot represent
            an array (another byte order, negative strides, long double); a field of a `Batch`, other than the `label_field`, is not
            decoded, or is named "labels"; `device` is neither a GPU nor the CPU, or not the GPU of `stream`.
        BackendError, DeviceError: `device` is a GPU, but torch finds none; or as for `pinpool.record_stream`.
    """
    return _copy_batch(batch, device, stream)[0]


def prefetch(batches: Iterable[Any], device: int | str | torch.device | None = None) -> Prefetcher:
    """Returns an iterator over copies of `batches` on a GPU, which copies the next batch while the caller uses the current one.

        for inputs, targets in pinpool.torch.prefetch(shared.batches(loader)):
            train(inputs, targets)

    Each batch is as `to_device` returns it. The copies run on a separate stream. The stream that is current when a batch is requested
    waits for its copy; use the batch on that stream. Up to three batches are in the memory of the GPU: the last, the current and the
    next one. The batches of `batches` are dropped as soon as their copy is enqueued. If `batches` or a copy raises an error, the
    iterator first yields the batch before it. On the CPU, nothing is copied or requested early.

    `batches` may be one batch ahead of the caller, so save the state of a `pinpool_loader.Loader` with `Prefetcher.state_dict`.

    Raises:
        TypeError, ValueError, BackendError, DeviceError: as for `to_device`, also during iteration.
    """
    return Prefetcher(batches, device)


class _Copied(NamedTuple):
    batch: Any
    tensors: list[Any]
    event: torch.cuda.Event | None
    state: Any


class Prefetcher(Iterator[Any]):
    """The iterator that `prefetch` returns."""

    def __init__(self, batches: Iterable[Any], device: int | str | torch.device | None) -> None:
        import torch

        self._batches, self._iterator, self._device = batches, iter(batches), device
        self._stream: torch.cuda.Stream | None = None
        if not _is_cpu(device):
            _check_gpu()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: The batch that is copied ahead, or the error to raise instead.
        self._next: _Copied | Exception | None = None
        self._state = self._state_of_batches()

    def __next__(self) -> Any:
        import torch

        copied, self._next = self._next or self._copy_next(), None
        if isinstance(copied, Exception):
            raise copied
        if self._stream is not None and copied.event is not None:
            self._next = self._copy_next()
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(copied.event)
            for tensor in _arrays.values_in(copied.tensors):
                if tensor.is_cuda:
                    tensor.record_stream(current)  # torch allocated the tensor for the stream of the copies.
        self._state = copied.state
        return copied.batch

    def _copy_next(self) -> _Copied | Exception:
        try:
            batch, tensors = _copy_batch(next(self._iterator), self._device, self._stream)
        except StopIteration:
            return StopIteration()  # Without a traceback, which would refer to this object.
        except Exception as error:
            return error
        event = None if self._stream is None else self._stream.record_event()
        return _Copied(batch, tensors, event, self._state_of_batches())

    def _state_of_batches(self) -> Any:
        return self._batches.state_dict() if hasattr(self._batches, "state_dict") else None

    def state_dict(self) -> Any:
        """Returns the `state_dict()` that `batches` had after the batch that this iterator yielded last.

        Raises:
            TypeError: `batches` has no method `state_dict`.
        """
        if self._state is None:
            raise TypeError(f"a {type(self._batches).__name__} has no state_dict(): pass a pinpool_loader.Loader")
        return self._state


def _is_cpu(device: int | str | torch.device | None) -> bool:
    import torch

    if device is None:
        return not torch.cuda.is_available()
    # A torch without CUDA refuses `torch.device(0)`.
    return not isinstance(device, int) and torch.device(device).type == "cpu"


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise BackendError("the tensors cannot be copied to a GPU: torch finds none")


def _copy_batch(batch: Any, device: Any, stream: torch.cuda.Stream | None) -> tuple[Any, list[Any]]:
    """Copies `batch` as `to_device` does. Returns the copy and its tensors."""
    import torch

    copies: list[tuple[Any, Any]] = []
    if stream is None and _is_cpu(device):
        result = _copy(batch, torch.device("cpu"), copies)
    else:
        _check_gpu()
        result = _copy_on_stream(batch, device, stream, copies)
    if not copies:
        raise TypeError(f"neither a tensor nor a numeric array is in this {type(batch).__name__}: pass tensors or arrays")
    return result, [copy for _, copy in copies]


def _copy_on_stream(batch: Any, device: Any, stream: torch.cuda.Stream | None, copies: list[tuple[Any, Any]]) -> Any:
    """Copies `batch` as `to_device` does, and records the stream."""
    import torch

    stream = torch.cuda.current_stream(device) if stream is None else stream
    if torch.device("cuda" if device is None else device) not in (torch.device("cuda"), stream.device):
        raise ValueError(f"the stream is on {stream.device}, and not on {device}: pass device=stream.device")
    try:
        with torch.cuda.stream(stream):
            return _copy(batch, stream.device, copies)
    finally:  # If a copy fails, the earlier ones still run.
        # The memory of a pool is always strided. After `install`, torch has recorded the copies too, but reports no error.
        sources = [value for value, _ in copies if not value.is_cuda and getattr(value, "layout", torch.strided) == torch.strided]
        _arrays.record_stream(sources, stream, missing_ok=True)


def _copy(value: Any, device: torch.device, copies: list[tuple[Any, Any]]) -> Any:
    """Copies `value`, and appends each tensor with its copy to `copies`."""
    import torch

    if _arrays.is_loader_batch(value):
        fields = {names: _copy(array, device, copies) for names, array in value._pinpool_arrays().items()}
        return {names[0]: field for names, field in fields.items()}
    if _arrays.is_numeric(value) or isinstance(value, (torch.Tensor, torch.nn.utils.rnn.PackedSequence)):
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        # A copy from a GPU blocks, because its result is read by the CPU.
        copy = tensor.to(device, non_blocking=device.type == "cuda")
        copies.append((tensor, copy))
        return copy
    if not isinstance(value, (Mapping, Sequence)):
        _arrays.refuse_hidden_arrays(value, "copied")
    return map_items(value, lambda items: [_copy(item, device, copies) for item in items])
