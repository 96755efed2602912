"""The class `Batch`."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeAlias, overload

import numpy as np

from pinpool import Buffer, PinpoolError, _pinpool

if TYPE_CHECKING:
    import torch

__all__ = ["Batch"]

#: Marks a missing default of `Batch.field`; None is a valid default.
_MISSING = object()

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Name of an undecoded field, its start in the sample's part of the batch, and its end.
_Field: TypeAlias = tuple[str, int, int]


class Part(NamedTuple):
    """The bytes of one sample in a batch."""

    #: Index in the order of the files.
    sample: int
    #: Offset in the buffer.
    start: int
    length: int
    #: Offset in the sample.
    sample_offset: int


class RawBatch(NamedTuple):
    """A batch as `_pinpool.Reader` returns it."""

    index_overall: int
    epoch: int
    index_in_epoch: int
    buffer: Buffer | bytearray
    #: As in `Part`.
    parts: Sequence[tuple[int, int, int, int]]
    #: Offset of each decoded field in the buffer; empty if there are no samples.
    field_offsets: list[int]
    labels: list[Any] | None
    #: The text of each failure, and the exception if the pool had no memory.
    failures: list[tuple[str, PinpoolError | None]]


class LoaderInfo(NamedTuple):
    """Data shared by all batches of a loader."""

    catalog: _pinpool.SampleCatalog | _PickledCatalog
    #: Shape and dtype of each decoded field, by its names.
    decoded: dict[tuple[str, ...], tuple[tuple[int, ...], str]]
    seed: int
    rank: int
    label_field: str | None


def _are_numbers(labels: list[Any]) -> bool:
    return all(isinstance(label, (int, float, np.integer, np.floating)) for label in labels)


class Batch:
    """Samples in one pinned buffer, from a `Loader`.

    With `decode=`, `batch["jpg"]` is one array of all samples, and `batch[i]` is a dict of the fields of sample `i`, as in
    `samples`. Without it, `batch[i]` is the stored bytes of sample `i` as a uint8 array, or with `batch_bytes=` perhaps only a part of
    them (see `is_whole`). `batch["jpg"]` is `batch.field("jpg")`, and `batch["labels"]` is `batch.labels`, as in the result of
    `pinpool.torch.to_device`.

    Arrays are views of the buffer, without a copy. The memory returns to the pool when the batch and all views are gone; after an
    asynchronous copy of a view, call `pinpool.record_stream(view, stream)`. Unpickling creates a copy in pageable memory.

    Attributes:
        buffer: the memory, a `pinpool.Buffer`; a bytearray after unpickling.
        epoch: number of the epoch, from 0.
        index_in_epoch: index of the batch in the epoch, from 0.
        index_overall: index of the batch, counted from the loader's first batch, from 0.
        failures: descriptions of the samples that were left out, with `on_error="skip"`.
    """

    __slots__ = ("__weakref__", "_info", "_labels", "_offsets", "_parts", "_rng", "buffer", "epoch", "failures", "index_in_epoch", "index_overall")

    buffer: Buffer | bytearray
    epoch: int
    index_in_epoch: int
    index_overall: int
    failures: list[str]
    _rng: np.random.Generator | None

    def __init__(self, raw: RawBatch, labels: list[Any] | None, failures: list[str], info: LoaderInfo) -> None:
        self.index_overall = raw.index_overall
        self.epoch = raw.epoch
        self.index_in_epoch = raw.index_in_epoch
        self.buffer = raw.buffer
        self.failures = failures
        self._parts = [Part._make(part) for part in raw.parts]
        self._labels = labels
        self._info = info
        self._rng = None
        self._offsets = dict(zip(info.decoded, raw.field_offsets or [0] * len(info.decoded), strict=True))

    @property
    def _is_decoded(self) -> bool:
        return bool(self._info.decoded)

    def rng(self) -> np.random.Generator:
        """Returns the batch's random number generator, seeded by the loader's seed, the epoch, the index of the batch and the rank.

        Its numbers are the same in every run and with any number of threads. Each call returns the same generator. After unpickling, the
        numbers begin again.
        """
        self._rng = self._rng or np.random.default_rng((self._info.seed, self.epoch, self.index_in_epoch, self._info.rank))
        return self._rng

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: SupportsIndex | str) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: SupportsIndex | str | slice) -> Any:
        if isinstance(index, str):
            return self.labels if index == "labels" else self.field(index)
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        part = self._part(index)
        if self._is_decoded:
            return self._fields_of(range(len(self))[index], self._info.catalog.fields([part.sample])[0], self._decoded())
        return self._view(part.start, part.length)

    def _part(self, index: SupportsIndex) -> Part:
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} is out of range: the batch has {len(self)}")
        return self._parts[position]

    def _view(self, begin: int, length: int) -> _Array:
        # A memoryview counts as a view of the buffer, and NumPy's stubs accept it.
        return np.frombuffer(memoryview(self.buffer), np.uint8, length, begin) if length else np.empty(0, np.uint8)

    def _array(self, names: tuple[str, ...]) -> _Array:
        """Returns the decoded field as one array with a row for each sample."""
        shape, dtype = self._info.decoded[names]
        shape = (len(self), *shape)
        count = math.prod(shape)
        whole = np.frombuffer(memoryview(self.buffer), dtype, count, self._offsets[names]) if count else np.empty(0, dtype)
        return whole.reshape(shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples) if self._is_decoded else map(self.__getitem__, range(len(self)))

    def tensors(self) -> list[torch.Tensor]:
        """Returns the stored bytes of the samples as uint8 tensors, views of the buffer. Raises TypeError with `decode=`."""
        if self._is_decoded:
            raise TypeError("the samples are decoded, and each field is one array: use torch.from_numpy(batch.field('jpg'))")
        try:
            import torch
        except ImportError as error:
            raise ImportError("batch.tensors() needs PyTorch, which cannot be imported here: pip install torch") from error
        if not self.nbytes:
            return [torch.empty(0, dtype=torch.uint8) for _ in self._parts]
        whole = torch.frombuffer(memoryview(self.buffer), dtype=torch.uint8)
        return [whole[part.start : part.start + part.length] for part in self._parts]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Fields of each sample in a tar archive by name, as views of the buffer: `{"jpg": ..., "cls": ...}`.

        The name of a field is the part of the member's base name after the first dot, in lower case. A plain file has only decoded
        fields. A field that is decoded under several names ("jpg;png") has an entry for each name. Raises ValueError if a sample is in
        several batches, or has two members of the same name.
        """
        arrays, fields = self._decoded(), self._info.catalog.fields(self.sample_indices)
        return [self._fields_of(index, fields[index], arrays) for index in range(len(self))]

    def _decoded(self) -> dict[tuple[str, ...], _Array]:
        """Returns the decoded fields by their names, as new views of the buffer."""
        return {names: self._array(names) for names in self._offsets}

    def to(self, device: int | str | torch.device, *, non_blocking: bool = True) -> dict[str, torch.Tensor]:
        """Returns `pinpool.torch.to_device(batch, device)`: a dict of tensors. Lightning, Accelerate and other trainers call this method.

        With `non_blocking=False`, waits for the copies. In both cases the batch may be dropped immediately.
        """
        import torch

        import pinpool.torch

        copied: dict[str, torch.Tensor] = pinpool.torch.to_device(self, device)
        if not non_blocking and torch.device(device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _pinpool_arrays(self) -> dict[tuple[str, ...], _Array]:
        """Returns what `pinpool.torch.to_device` copies: the decoded fields by their names, and labels that are numbers."""
        names = {name for fields in self._info.catalog.fields(self.sample_indices) for name, *_ in fields}
        undecoded = sorted(names - {self._info.label_field})
        if undecoded or not self._is_decoded:
            subject = f"the field {undecoded[0]!r} of this Batch is not" if self._is_decoded else "no field of this Batch is"
            raise TypeError(f"{subject} decoded: pass arrays, such as batch.field('jpg'), or convert the fields in map=")
        values = self._decoded()
        if self._labels is not None and _are_numbers(self._labels):
            if any(field_names[0] == "labels" for field_names in values):
                raise ValueError("the decoded field 'labels' of this Batch is named like its labels: pass arrays, such as batch.field('labels')")
            values[("labels",)] = self.label_array
        return values

    def _fields_of(self, index: int, fields: list[_Field], arrays: dict[tuple[str, ...], _Array]) -> dict[str, Any]:
        self._check_fields(index, fields)
        offset = self._parts[index].start
        views: dict[str, Any] = {name: self._view(offset + begin, end - begin) for name, begin, end in fields}
        for names, array in arrays.items():
            views |= dict.fromkeys(names, array[index])
        return views

    def _check_fields(self, index: int, fields: list[_Field]) -> None:
        if fields and not self.is_whole(index):
            raise ValueError(
                f"{self.names[index]} is longer than batch_bytes, so its fields are in several batches: raise batch_bytes, or pass only batch_size"
            )
        names = [name for name, *_ in fields]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{self.names[index]} has two members named {repeated!r}: use batch[{index}]")

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
        values, name = [], name.removeprefix(".").lower()
        for names in self._offsets:
            if name in names or name == ";".join(names):
                return self._array(names)
        for index, fields in enumerate(self._info.catalog.fields(self.sample_indices)):
            self._check_fields(index, fields)
            spans = {field_name: (begin, end) for field_name, begin, end in fields}
            if name in spans:
                begin, end = spans[name]
                values.append(self._view(self._parts[index].start + begin, end - begin))
            elif default is _MISSING:
                available = ", ".join([*spans, *itertools.chain(*self._offsets)]) or "no fields"
                raise KeyError(f"{self.names[index]} has no field {name!r}: it has {available}")
            else:
                values.append(default)
        return values

    @property
    def labels(self) -> list[Any]:
        """Label of each sample: the text of the field `label_field`, converted by `label_function`.

        Without `label_field`: for plain files the index of the directory in `Loader.classes`, or its name converted by
        `label_function`; for members of archives the name (tar: up to the first dot). Raises ValueError if the loader has both.
        """
        if self._labels is None:
            raise ValueError("there is no label for both archives and plain files: pass label_field=, or load them separately")
        return self._labels

    @property
    def label_array(self) -> _Array:
        """The labels as one array, int64 or float64 as with torch's `default_collate`. Raises TypeError if a label is not a number."""
        labels = self.labels
        if not _are_numbers(labels):
            other = next(label for label in labels if not _are_numbers([label]))
            raise TypeError(f"the label {other!r} is not a number: use batch.labels, or pass label_function=")
        return np.array(labels, np.int64 if all(isinstance(label, (int, np.integer)) for label in labels) else np.float64)

    @property
    def nbytes(self) -> int:
        """Size of all samples in bytes."""
        decoded = sum(array.nbytes for array in self._decoded().values())
        return decoded + sum(part.length for part in self._parts)

    @property
    def names(self) -> list[str]:
        """Name of each sample: its path, or `path!member` in an archive."""
        return self._info.catalog.names(self.sample_indices)

    @property
    def sample_indices(self) -> list[int]:
        """Index of each sample in the order of the files, from 0. It is the same in each epoch."""
        return [part.sample for part in self._parts]

    @property
    def buffer_offsets(self) -> list[int]:
        """Offset of each sample in the buffer, in bytes."""
        return [part.start for part in self._parts]

    @property
    def sample_offsets(self) -> list[int]:
        """Offset in each sample at which this batch begins, in bytes: 0, unless the sample is longer than `batch_bytes`."""
        return [part.sample_offset for part in self._parts]

    def is_whole(self, index: SupportsIndex) -> bool:
        """Returns whether all bytes of sample `index` are in this batch."""
        part = self._part(index)
        return self._is_decoded or (part.sample_offset == 0 and part.length == self._info.catalog.sample_bytes(part.sample))

    def __reduce__(self) -> Any:
        copied = bytearray(memoryview(self.buffer))
        raw = RawBatch(self.index_overall, self.epoch, self.index_in_epoch, copied, self._parts, list(self._offsets.values()), None, [])
        info = self._info._replace(catalog=_PickledCatalog.of(self._info.catalog, self.sample_indices))
        return Batch, (raw, self._labels, self.failures, info)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return f"<pinpool_loader.Batch {self.index_in_epoch} of epoch {self.epoch}: {len(self)} samples, {self.nbytes} bytes{failed}>"


class _PickledCatalog(NamedTuple):
    """Names, fields and lengths of the samples of a pickled batch, by number."""

    of_samples: dict[int, tuple[str, list[_Field], int | None]]

    @classmethod
    def of(cls, other: _pinpool.SampleCatalog | _PickledCatalog, indices: list[int]) -> _PickledCatalog:
        return cls(dict(zip(indices, zip(other.names(indices), other.fields(indices), map(other.sample_bytes, indices), strict=True), strict=True)))

    def names(self, indices: list[int]) -> list[str]:
        return [self.of_samples[sample][0] for sample in indices]

    def fields(self, indices: list[int]) -> list[list[_Field]]:
        return [self.of_samples[sample][1] for sample in indices]

    def sample_bytes(self, sample: int) -> int | None:
        return self.of_samples[sample][2]
