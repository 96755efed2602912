"""The class `Batch`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeAlias, overload

import numpy as np

from pinpool import Buffer, PinpoolError, _pinpool

if TYPE_CHECKING:
    import torch

__all__ = ["Batch"]

#: Value that means that `Batch.field` has no default, because None is a possible default.
_MISSING = object()

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class RawBatch(NamedTuple):
    """A batch as `_pinpool.Reader` returns it."""

    number: int
    epoch: int
    index: int
    buffer: Any
    parts: list[tuple[int, int, int, int]]
    #: Offset of each decoded field in the buffer; empty if there are no samples.
    field_offsets: list[int]
    labels: list[Any] | None
    #: The text of each failure, and the exception if the pool had no memory.
    failures: list[tuple[str, PinpoolError | None]]


class BatchSource(NamedTuple):
    """Data shared by all batches of a loader."""

    files: _pinpool.Files | _FileList
    #: Shape and dtype of each decoded field, by its names.
    decoded: dict[tuple[str, ...], tuple[tuple[int, ...], str]]
    seed: int
    rank: int


class Batch:
    """Samples in one pinned buffer, from a `Loader`.

    With `decode=`, `batch.field("jpg")` is one array of all samples, and `batch[i]` is a dict of the fields of sample `i`, as in
    `samples`. Without it, `batch[i]` is the stored bytes of sample `i` as a uint8 array.

    Arrays are views of the buffer, without a copy. The memory returns to the pool when the batch and all views are gone; after an
    asynchronous copy of a view, call `pinpool.record_stream(view, stream)`. Unpickling creates a copy in pageable memory.

    Attributes:
        buffer: the memory, a `pinpool.Buffer`.
        epoch: number of the epoch, from 0.
        index: index of the batch in the epoch, from 0.
        number: index of the batch since the first one of the loader, from 0.
        labels: label of each sample: the text of the field `label_field`, converted by `label_function`. Without `label_field`, the
            index of the directory in `Loader.classes`, or its name converted by `label_function`. If any sample is in an archive,
            the unconverted name of the directory or member instead (tar: up to the first dot).
        failures: descriptions of the samples that were left out, with `on_error="skip"`.
    """

    __slots__ = ("__weakref__", "_arrays", "_source", "_parts", "buffer", "epoch", "failures", "index", "labels", "number")

    buffer: Buffer
    epoch: int
    index: int
    number: int
    labels: list[Any]
    failures: list[str]

    def __init__(self, raw: RawBatch, labels: list[Any], failures: list[str], source: BatchSource) -> None:
        self.number, self.epoch, self.index, self.buffer, self._parts = raw.number, raw.epoch, raw.index, raw.buffer, raw.parts
        self._source, self.labels, self.failures = source, labels, failures
        self._arrays = dict(zip(source.decoded, raw.field_offsets or [0] * len(source.decoded)))

    def rng(self) -> np.random.Generator:
        """Returns a random number generator seeded by the loader's seed, the epoch, the index of the batch and the rank.

        Its numbers are the same in every run and with any number of threads.
        """
        return np.random.default_rng((self._source.seed, self.epoch, self.index, self._source.rank))

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, str):
            raise TypeError(f"samples are indexed by position: use batch.field({index!r}) for that field of each sample")
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        sample, begin, length, _ = self._part(index)
        if self._arrays:
            return self._fields_of(range(len(self))[index], self._source.files.fields([sample])[0])
        return self._view(begin, length)

    def _part(self, index: SupportsIndex) -> tuple[int, int, int, int]:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"sample {at} is out of range: the batch has {len(self)}")
        return self._parts[at]

    def _view(self, begin: int, length: int) -> _Array:
        # A memoryview counts as a view of the buffer, and NumPy's stubs accept it.
        return np.frombuffer(memoryview(self.buffer), np.uint8, length, begin) if length else np.empty(0, np.uint8)

    def _array(self, names: tuple[str, ...]) -> _Array:
        """Returns the decoded field as one array with a row for each sample."""
        shape, dtype = self._source.decoded[names]
        shape = (len(self), *shape)
        count = math.prod(shape)
        whole = np.frombuffer(memoryview(self.buffer), dtype, count, self._arrays[names]) if count else np.empty(0, dtype)
        return whole.reshape(shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples) if self._arrays else map(self.__getitem__, range(len(self)))

    def tensors(self) -> list[torch.Tensor]:
        """Returns the stored bytes of the samples as uint8 tensors, views of the buffer. Raises TypeError with `decode=`."""
        if self._arrays:
            raise TypeError("the samples are decoded, and each field is one array: use torch.from_numpy(batch.field('jpg'))")
        try:
            import torch
        except ImportError as error:
            raise ImportError("batch.tensors() needs PyTorch, which cannot be imported here: pip install torch") from error
        if not self.nbytes:
            return [torch.empty(0, dtype=torch.uint8) for _ in self._parts]
        whole = torch.frombuffer(memoryview(self.buffer), dtype=torch.uint8)
        return [whole[begin : begin + length] for _, begin, length, _ in self._parts]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Fields of each sample in a tar archive by name, as views of the buffer: `{"jpg": ..., "cls": ...}`.

        The name of a field is the part of the member's base name after the first dot, in lower case. A plain file has only decoded
        fields. A field that is decoded under several names ("jpg;png") has an entry for each name. Raises ValueError if a sample is in
        several batches, or has two members of the same name.
        """
        fields = self._source.files.fields([part[0] for part in self._parts])
        return [self._fields_of(index, fields[index]) for index in range(len(self))]

    def _fields_of(self, index: int, fields: list[tuple[str, int, int]]) -> dict[str, Any]:
        begin = self._parts[index][1]
        if fields and not self.is_whole(index):
            raise ValueError(
                f"{self.names[index]} is longer than batch_bytes, so its fields are in several batches: raise batch_bytes, "
                "or give batch_size alone"
            )
        views = {name: self._view(begin + first, end - first) for name, first, end in fields}
        if len(views) < len(fields):
            names = [name for name, *_ in fields]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{self.names[index]} has two members named {twice!r}: use batch[{index}]")
        for names in self._arrays:
            views |= dict.fromkeys(names, self._array(names)[index])
        return views

    def field(self, name: str, default: Any = _MISSING) -> Any:
        """Returns the field `name` of all samples.

        Args:
            name: such as "jpg".
            default: value for a sample without the field; without a default, KeyError names the first such sample.

        Returns:
            An array with a row for each sample if the field is decoded, otherwise a list of uint8 arrays.
        """
        if not isinstance(name, str):
            raise TypeError(f"a field name must be a str, such as 'jpg', not {name!r}")
        found, name = [], name.removeprefix(".").lower()
        for names in self._arrays:
            if name in names or name == ";".join(names):
                return self._array(names)
        for index, fields in enumerate(self.samples):
            if name not in fields and default is _MISSING:
                has = ", ".join(fields) or "no fields"
                raise KeyError(f"{self.names[index]} has no field {name!r}: it has {has}")
            found.append(fields.get(name, default))
        return found

    @property
    def nbytes(self) -> int:
        """Size of all samples in bytes."""
        decoded = sum(self._array(names).nbytes for names in self._arrays)
        return decoded + sum(length for _, _, length, _ in self._parts)

    @property
    def names(self) -> list[str]:
        """Name of each sample: its path, or `path!member` in an archive."""
        return self._source.files.names([sample for sample, *_ in self._parts])

    @property
    def indices(self) -> list[int]:
        """Number of each sample in the order of the files. It is the same in each epoch."""
        return [sample for sample, *_ in self._parts]

    @property
    def offsets(self) -> list[int]:
        """Offset of each sample in the buffer, in bytes."""
        return [begin for _, begin, _, _ in self._parts]

    @property
    def starts(self) -> list[int]:
        """Bytes of each sample that were in earlier batches: 0, unless the sample is longer than `batch_bytes`."""
        return [start for *_, start in self._parts]

    def is_whole(self, index: SupportsIndex) -> bool:
        """Returns whether all bytes of sample `index` are in this batch."""
        sample, _, length, start = self._part(index)
        return bool(self._arrays) or start == 0 and length == self._source.files.sample_bytes(sample)

    def __reduce__(self) -> Any:
        copied = bytearray(memoryview(self.buffer))
        raw = RawBatch(self.number, self.epoch, self.index, copied, self._parts, list(self._arrays.values()), None, [])
        source = self._source._replace(files=_FileList.of(self._source.files, self.indices))
        return Batch, (raw, self.labels, self.failures, source)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return f"<pinpool_loader.Batch {self.index} of epoch {self.epoch}: {len(self)} samples, {self.nbytes} bytes{failed}>"


class _FileList(NamedTuple):
    """Names, fields and lengths of the samples of a pickled batch, by number."""

    of_samples: dict[int, tuple[str, list[tuple[str, int, int]], int | None]]

    @classmethod
    def of(cls, files: _pinpool.Files | _FileList, samples: list[int]) -> _FileList:
        return cls(dict(zip(samples, zip(files.names(samples), files.fields(samples), map(files.sample_bytes, samples)))))

    def names(self, samples: list[int]) -> list[str]:
        return [self.of_samples[sample][0] for sample in samples]

    def fields(self, samples: list[int]) -> list[list[tuple[str, int, int]]]:
        return [self.of_samples[sample][1] for sample in samples]

    def sample_bytes(self, sample: int) -> int | None:
        return self.of_samples[sample][2]
