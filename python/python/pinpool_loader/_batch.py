"""A batch of samples, as a loader hands it out."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

from . import _device, _pinpool
from ._device import DeviceArray

if TYPE_CHECKING:
    import torch

__all__ = ["Batch"]

#: No default of `Batch.field`, as None may be one.
_NONE = object()


class Batch:
    """Samples in one buffer, back to back: of pinned memory, or in the memory of a GPU if the loader has a `device`.

    `batch[i]` is the view of sample `i` as an array of NumPy, or a `DeviceArray`, without a copy. Pinned memory goes back to
    the pool when the batch, its buffer and all views are gone; `batch.buffer.release(stream=...)` puts it back behind work of a
    device. Pickled, it arrives as a batch over a copy, in memory that is not pinned.

    Where fields are decoded, `batch.field("jpg")` is one array of all samples, and `batch[i]` is `batch.fields[i]`: a row of it,
    and the other fields of the sample.
    """

    __slots__ = ("__weakref__", "_decoded", "_files", "_labels", "_parts", "buffer", "epoch", "failures", "index", "number")

    #: The memory: a `pinpool.Buffer`, or a `pinpool.DeviceBuffer` where the loader has a device.
    buffer: Any
    #: Number of the epoch, from 0.
    epoch: int
    #: Place in the epoch, from 0.
    index: int
    #: Place since the start of the load, from 0.
    number: int
    #: What could not be read, with `on_error="skip"`.
    failures: list[str]

    def __init__(
        self,
        files: _pinpool.Files | _Listed,
        handed: _pinpool._Handed,
        failures: list[str],
        decoded: Mapping[tuple[str, ...], tuple[Any, tuple[int, ...], str]],
    ) -> None:
        self.number, self.epoch, self.index, self.buffer, self._parts, starts, self._labels, _ = handed
        self._files, self.failures = files, failures
        # A batch without a sample has no arrays.
        self._decoded = {names: (start, each) for start, (names, each) in zip(starts or [0] * len(decoded), decoded.items())}

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, str):
            raise TypeError(f"batch[{index!r}]: a batch has samples by number; batch.field({index!r}) is that field of each sample")
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        sample, begin, length, _ = self._part(index)
        if self._decoded:
            return self._fields_of(range(len(self))[index], self._files.fields([sample])[0])
        return self._view(begin, length)

    def _part(self, index: SupportsIndex) -> tuple[int, int, int, int]:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"sample {at} of a batch that has {len(self)}")
        return self._parts[at]

    def _view(self, begin: int, length: int) -> Any:
        if isinstance(self.buffer, _pinpool.DeviceBuffer):
            return DeviceArray(self.buffer, begin, (length,))
        import numpy as np

        # As a memoryview it has the same views, and the stubs of NumPy take it.
        return np.frombuffer(memoryview(self.buffer), np.uint8, length, begin) if length else np.empty(0, np.uint8)

    def _array(self, names: tuple[str, ...]) -> Any:
        """The decoded field as one array, a row for each sample."""
        start, (_, shape, dtype) = self._decoded[names]
        shape = (len(self), *shape)
        if isinstance(self.buffer, _pinpool.DeviceBuffer):
            return DeviceArray(self.buffer, start, shape, dtype)
        import numpy as np

        count = math.prod(shape)
        whole = np.frombuffer(memoryview(self.buffer), dtype, count, start) if count else np.empty(0, dtype)
        return whole.reshape(shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fields) if self._decoded else map(self.__getitem__, range(len(self)))

    def arrays(self) -> list[Any]:
        """The samples as arrays of NumPy, or as `DeviceArray`s on a GPU: views of the buffer."""
        return list(self)

    def tensors(self) -> list[torch.Tensor]:
        """The samples as tensors of torch, of dtype uint8: views of the buffer, on a GPU for torch's current stream."""
        if self._decoded:
            raise TypeError("batch.tensors(): its samples are decoded; batch.field('jpg') is one array of all: torch.from_dlpack(it)")
        torch = _device.imported_torch("batch.tensors()")
        if isinstance(self.buffer, _pinpool.DeviceBuffer):
            whole = DeviceArray(self.buffer, 0, (self.buffer.nbytes,)).tensor()
        elif not self.nbytes:
            return [torch.empty(0, dtype=torch.uint8) for _ in self._parts]
        else:
            whole = torch.frombuffer(memoryview(self.buffer), dtype=torch.uint8)
        return [whole[begin : begin + length] for _, begin, length, _ in self._parts]

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The members of each sample of a tar archive, by name: `{"jpg": ..., "cls": ...}`, as views like those of `batch[i]`.

        The name of a member is what follows the first dot of its base name, in lower case. A sample that is no member of an
        archive has none. ValueError for a sample that is not whole, or has two members of one name.
        """
        fields = self._files.fields([part[0] for part in self._parts])
        return [self._fields_of(index, fields[index]) for index in range(len(self))]

    def _fields_of(self, index: int, fields: list[tuple[str, int, int]]) -> dict[str, Any]:
        begin = self._parts[index][1]
        if fields and not self.is_whole(index):
            raise ValueError(
                f"{self.keys[index]}: its fields are not all in this batch, since it is longer than batch_bytes: raise "
                "batch_bytes, or give batch_size alone"
            )
        views = {name: self._view(begin + first, end - first) for name, first, end in fields}
        if len(views) < len(fields):
            names = [name for name, *_ in fields]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{self.keys[index]}: two members of the sample are named {twice!r}: use batch[{index}]")
        for names in self._decoded:
            views[";".join(names)] = self._row(names, index)
        return views

    def _row(self, names: tuple[str, ...], index: int) -> Any:
        rows = self._array(names)
        if not isinstance(rows, DeviceArray):
            return rows[index]
        start, (_, shape, dtype) = self._decoded[names]
        return DeviceArray(self.buffer, start + index * (rows.nbytes // len(self)), shape, dtype)

    def field(self, name: str, default: Any = _NONE) -> Any:
        """The member `name` of each sample: `batch.field("jpg")`, one array where it is decoded, a list of views where it is not.

        A sample that has none has `default`; without one, KeyError names the first such sample.
        """
        if not isinstance(name, str):
            raise TypeError(f"field({name!r}): the name of a field of each sample, such as 'jpg'")
        found, name = [], name.removeprefix(".").lower()
        for names in self._decoded:
            if name in names or name == ";".join(names):
                return self._array(names)
        for index, fields in enumerate(self.fields):
            if name not in fields and default is _NONE:
                has = ", ".join(fields) or "no fields"
                raise KeyError(f"{self.keys[index]} has no field {name!r}: it has {has}")
            found.append(fields.get(name, default))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        decoded = sum(self._array(names).nbytes for names in self._decoded)
        return decoded + sum(length for _, _, length, _ in self._parts)

    @property
    def keys(self) -> list[str]:
        """The name of each sample: its path, or `path!member` in a container."""
        return self._files.names([sample for sample, *_ in self._parts])

    @property
    def labels(self) -> list[Any]:
        """The label of each sample. With `labels="cls"`: the number in that field, or what `label_type` made of its text. Else the name
        of the directory that a file lies in, the member's name in a container."""
        if self._labels is not None:
            return self._labels
        return self._files.labels([sample for sample, *_ in self._parts])

    @property
    def indices(self) -> list[int]:
        """The number of each sample in the order of the files, the same in each epoch."""
        return [sample for sample, *_ in self._parts]

    @property
    def offsets(self) -> list[int]:
        """The first byte of each sample in the buffer."""
        return [begin for _, begin, _, _ in self._parts]

    @property
    def starts(self) -> list[int]:
        """For each sample the number of its bytes that were in earlier batches: 0, unless it is longer than a batch may be."""
        return [start for *_, start in self._parts]

    def is_whole(self, index: SupportsIndex) -> bool:
        """Whether sample `index` lies in this batch from its first byte to its last."""
        sample, _, length, start = self._part(index)
        return bool(self._decoded) or start == 0 and length == self._files.sample_bytes(sample)

    def __reduce__(self) -> Any:
        if isinstance(self.buffer, _pinpool.DeviceBuffer):
            raise TypeError("a batch on a GPU cannot be pickled: pickle copies, such as batch.tensors() on the CPU")
        copied = bytearray(memoryview(self.buffer))
        starts = [start for start, _ in self._decoded.values()]
        handed = (self.number, self.epoch, self.index, copied, self._parts, starts, self._labels, [])
        # Without the decoder, which is of this process.
        decoded = {names: (None, *each[1:]) for names, (_, each) in self._decoded.items()}
        return Batch, (_Listed.of(self._files, self.indices), handed, self.failures, decoded)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return f"<pinpool.Batch {self.index} of epoch {self.epoch}: {len(self)} samples, {self.nbytes} B{failed}>"


class _Listed(NamedTuple):
    """What a pickled batch knows of the files: names, labels, fields and lengths of its samples, by their numbers."""

    of_samples: dict[int, tuple[str, str, list[tuple[str, int, int]], int | None]]

    @classmethod
    def of(cls, files: _pinpool.Files | _Listed, samples: list[int]) -> _Listed:
        lengths = map(files.sample_bytes, samples)
        return cls(dict(zip(samples, zip(files.names(samples), files.labels(samples), files.fields(samples), lengths))))

    def names(self, samples: list[int]) -> list[str]:
        return [self.of_samples[sample][0] for sample in samples]

    def labels(self, samples: list[int]) -> list[str]:
        return [self.of_samples[sample][1] for sample in samples]

    def fields(self, samples: list[int]) -> list[list[tuple[str, int, int]]]:
        return [self.of_samples[sample][2] for sample in samples]

    def sample_bytes(self, sample: int) -> int | None:
        return self.of_samples[sample][3]
