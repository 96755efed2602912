"""Files into batches in pinned memory, by threads of the crate's loader."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never, SupportsIndex, overload

from . import _decode, _device, _paths, _pinpool
from ._arguments import count, switch
from ._decode import Array, Decoded, Image
from ._device import DeviceArray
from ._errors import LimitError, LoadError
from ._map import Mapped
from ._pool import Pool
from ._progress import Progress, progress_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["Batch", "Loader"]

_DEFAULT_BATCH_BYTES = 16 << 20

#: Arguments of torch's DataLoader, and what does the same here.
_OF_TORCH = {
    "num_workers": "workers= is the number of threads that read",
    "prefetch_factor": "prefetch= is the number of batches that are read ahead",
    "collate_fn": "map= takes a function of a batch",
    "drop_last": "the loop leaves out a batch with len(batch) < batch_size",
    "pin_memory": "batches are in pinned memory always",
    "sampler": "shuffle=, seed=, rank= and world= choose the order",
}
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
        _, begin, length, _ = self._part(index)
        return self.fields[index] if self._decoded else self._view(begin, length)

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
            raise TypeError("batch.tensors(): its samples are decoded; torch.from_numpy(batch.field('jpg')) is one tensor of all")
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
        found = []
        for index, (part, fields) in enumerate(zip(self._parts, self._files.fields([part[0] for part in self._parts]))):
            _, begin, length, _ = part
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
            found.append(views)
        for names in self._decoded:
            rows = self._array(names)
            for index, views in enumerate(found):
                views[";".join(names)] = self._row(names, rows, index)
        return found

    def _row(self, names: tuple[str, ...], rows: Any, index: int) -> Any:
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


class Loader:
    """Batches of files in pinned memory or on a GPU, read ahead by threads that need no lock of Python.

        for batch in pinpool.Loader("photos", batch_size=64, shuffle=True, epochs=3):
            for key, sample in zip(batch.keys, batch):  # sample: NumPy, uint8, a view of pinned memory
                ...

    `paths` is one path or several, files or directories, also with braces and patterns (`train-{000..146}.tar`, `shards/*.tar`);
    a `.tar` (WebDataset) or `.safetensors` file that is named, or lies in a directory of nothing else, or of anything with
    `containers=True`, is opened, and its members are the samples. So are `.tar.gz`, `.tgz`, `.tar.zst`
    and `.tzst`; any other `.gz` or `.zst` file is one sample, decompressed. Members of a tar that share a name up to the first
    dot are one sample, and `batch.fields` has them apart. `labels="cls"` takes the numbers in the field `cls` as labels, and
    `label_type=float`, `str`, `json.loads` or another function of the text what that makes. A batch has at most `batch_size` samples and `batch_bytes` bytes (16 MiB if neither is given); a sample that is longer than `batch_bytes`
    comes in parts. `workers` threads read (one for each core), at most `prefetch` batches ahead (two for each worker).

    `decode={"jpg;png": pinpool.Image(224, 224)}` decodes that field of each sample, of a file its ending, by the threads that read,
    into one array of the batch: `batch.field("jpg")`. So does `pinpool.Array(shape, dtype)` with `.npy`. Give `batch_size` then.

    `map=fn` gives `fn(batch)` in place of each batch, by `map_workers` threads ahead of the loop, in the order of the batches: for
    formats and transforms in Python. Each of these threads may hold a batch, and one more is held for the loop.

    `device="cuda:0"` copies each batch to that GPU, by a stream of the loader's own and one batch ahead; see `DeviceArray` for
    the order between streams. `progress=True` shows a bar on stderr if that is a terminal ("always": anywhere).

    `shuffle=True` gives each epoch an order of its own, from `seed`. Of `world` processes that load the same paths with the
    same arguments, each takes every `world`-th sample of an epoch from number `rank` on. The samples of a compressed archive
    can be read in their order only: a shuffle mixes those of eight archives, and a rank takes every `world`-th archive.

    Each `for` goes over the next `epochs` epochs; after `break` the next one goes on behind the last batch. `state()` says
    where the loader is, in text; `load_state(text)`, or `state=text`, goes on from there, in another process too.

    A file that cannot be read raises `LoadError`, or with `on_error="skip"` is left out and named in `batch.failures` and
    `loader.failures`.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        batch_size: int | None = None,
        batch_bytes: int | str | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        epochs: int = 1,
        state: str | None = None,
        pool: Pool | None = None,
        containers: bool = False,
        decode: Mapping[str, Image | Array] | None = None,
        labels: str | None = None,
        label_type: Callable[[str], Any] = int,
        map: Callable[[Batch], Any] | None = None,
        map_workers: int = 2,
        device: Any = None,
        progress: bool | Literal["always"] = False,
        on_error: Literal["raise", "skip"] = "raise",
        **others: Never,
    ) -> None:
        for name in others:
            raise TypeError(f"a Loader has no argument {name}=" + (f": {_OF_TORCH[name]}" if name in _OF_TORCH else ""))
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: 'raise' or 'skip'")
        if progress not in (True, False, "always"):
            raise ValueError(f"progress={progress!r}: True, False or 'always'")
        if labels is not None and not (isinstance(labels, str) and labels):
            raise TypeError(f"labels={labels!r}: the name of a field of each sample, such as 'cls'")
        if not callable(label_type):
            raise TypeError(f"label_type={label_type!r}: a function of the field's text, such as int, float, str or json.loads")
        if isinstance(paths, bytes) or not isinstance(paths, (str, os.PathLike, Iterable)):
            raise TypeError(f"paths={paths!r}: a path, or several, as str or os.PathLike")
        listed = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        named = next((path for path in listed if not isinstance(path, str)), None)
        if named is not None:
            raise TypeError(f"paths=[{named!r}, ...]: each path as str or os.PathLike, such as os.fsdecode({named!r})")
        if map is not None and not callable(map):
            raise TypeError(f"map={map!r}: a function of a batch")
        self._map, self._map_workers = map, count("map_workers", map_workers, 1, 1024)
        self._decoded = _decode.decoders(decode)
        if self._decoded and (batch_size is None or batch_bytes is not None):
            raise ValueError("decode=: give batch_size alone; the size of its arrays says how many bytes a batch has")
        listed = _paths.expanded(listed)
        if batch_size is None and batch_bytes is None:
            batch_bytes = _DEFAULT_BATCH_BYTES
        self._reader: _pinpool.Reader | None = None
        self._epochs = count("epochs", epochs, 1)
        self._skips = on_error == "skip"
        self._progress = progress
        self._device = _device.opened(device)
        if pool is None:
            pool = Pool(name="loader", device=None if self._device is None else self._device.ordinal)
        self._pool = pool
        if not isinstance(self._pool, Pool):
            raise TypeError(f"pool={pool!r}: a pinpool.Pool")
        self._files = _pinpool.Files(
            self._pool,
            listed,
            switch("containers", containers),
            batch_size=0 if batch_size is None else count("batch_size", batch_size, 1),
            batch_bytes=0 if batch_bytes is None else _bytes("batch_bytes", batch_bytes),
            workers=0 if workers is None else count("workers", workers, 1, 1024),
            prefetch=0 if prefetch is None else count("prefetch", prefetch, 1, 65536),
            seed=count("seed", seed, 0) if switch("shuffle", shuffle) else None,
            rank=count("rank", rank, 0),
            world=count("world", world, 1),
            labels=None if labels is None else (labels.removeprefix(".").lower(), label_type),
            decode=_decode.handed(self._decoded),
        )
        # A dict for its order, and so that what fails in each epoch is named once.
        self._failed = dict.fromkeys(text for text, _ in self._files.failures())
        if self._failed and not self._skips:
            raise LoadError(_told(list(self._failed)))
        if not len(self._files):
            named = ", ".join(repr(path) for path in listed[:3]) + (", ..." if len(listed) > 3 else "")
            why = "have no regular file; name files, or directories of files"
            if self._failed:
                why = f"have nothing that can be read: {next(iter(self._failed))}"
            elif self._files.files():
                why = "have only archives without a member"
            raise ValueError(f"nothing to load: paths [{named}] {why}")
        if world > 1 and self._files.has_compressed() and not self._files.batches(0):
            raise ValueError(
                f"rank={rank} of world={world} has nothing to load: a compressed archive goes to one rank whole; give {world} "
                "archives or a multiple, or decompress them"
            )
        # Where the loader is, and the epoch of it. None is the start.
        self._state: str | None = None
        self._epoch = 0
        if state is not None:
            self.load_state(state)

    @property
    def pool(self) -> Pool:
        """The pool that all buffers come from."""
        return self._pool

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, those of all ranks."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of these samples."""
        return self._files.nbytes()

    @property
    def failures(self) -> list[str]:
        """What could not be listed or read so far, with `on_error="skip"`; each once."""
        return list(self._failed)

    def __len__(self) -> int:
        """Number of batches of the `epochs` epochs that the loader is in, those handed out included."""
        first = self._epoch // self._epochs * self._epochs
        return sum(self._files.batches(epoch) for epoch in range(first, first + self._epochs))

    def __iter__(self) -> Iterator[Any]:
        self.close()
        end = (self._epoch // self._epochs + 1) * self._epochs
        self._reader = reader = self._files.begin(end, self._state, self._device)
        shown = self._shown(end)

        def take() -> Batch | None:
            batch = self._take(reader)
            if batch is not None and shown is not None:
                shown.add(len(batch), batch.nbytes)
            return batch

        try:
            # Keeps no reference to a batch, so that its memory goes back as soon as the user's is gone.
            yield from iter(take, None) if self._map is None else self._mapped(self._map, take)
            if reader.is_complete():
                self._state, self._epoch = reader.end_state(end), end
        finally:
            # After `break`, an exception and Ctrl-C as well.
            reader.stop()
            if shown is not None:
                shown.close()

    def _mapped(self, function: Callable[[Batch], Any], take: Callable[[], Batch | None]) -> Iterator[Any]:
        """What `function` makes of the batches. What is ahead of the loop does not count for `state()`."""
        handed_out = self._state, self._epoch

        def take_with_state() -> tuple[Batch, str | None, int] | None:
            batch = take()
            return None if batch is None else (batch, self._state, self._epoch)

        def with_state(taken: tuple[Batch, str | None, int]) -> tuple[Any, str | None, int]:
            batch, *behind = taken
            return function(batch), *behind

        def hand_out(result: tuple[Any, str | None, int]) -> Any:
            nonlocal handed_out
            handed_out = self._state, self._epoch = result[1:]
            return result[0]

        results = Mapped(with_state, iter(take_with_state, None), self._map_workers)
        try:
            yield from map(hand_out, results)
        finally:
            self._state, self._epoch = handed_out
            results.close()

    def _shown(self, end: int) -> Progress | None:
        if not self._progress:
            return None
        done = 0
        if self._state is not None:
            # The batches of the epochs of this `for` before the state.
            epoch, batch = (int(part.partition("=")[2]) for part in self._state.partition(":")[2].split(",")[:2])
            done = batch + sum(self._files.batches(earlier) for earlier in range(end - self._epochs, epoch))
        return progress_of(self._progress, len(self), done)

    def _take(self, reader: _pinpool.Reader) -> Batch | None:
        handed = reader.next()
        if handed is None:
            return None
        failures = [text for text, _ in handed[-1]]
        for_pool = [text for text, is_pool in handed[-1] if is_pool]
        if for_pool or failures and not self._skips:
            del handed  # The traceback would keep its buffer.
            if for_pool:
                self._pool.try_get(0)  # ForkError, where the pool is a parent's.
                raise LimitError(
                    f"{for_pool[0]}; batches that are held count: let one go before the next, or use smaller ones"
                )
            raise LoadError(_told(failures))
        self._failed.update(dict.fromkeys(failures))
        batch = Batch(self._files, handed, failures, self._decoded)
        self._state, self._epoch = reader.state(), batch.epoch
        return batch

    def state(self) -> str:
        """Where the loader is: behind the last batch that it handed out. A line of text, to be stored with the model."""
        if self._state is None:
            self._state = self._files.start()
        return self._state

    def load_state(self, state: str) -> None:
        """Goes on behind the batch at which `state` was taken, in the next `for`; one that is running ends.

        ValueError if the files, the limits of a batch, `shuffle`, `seed`, `rank` or `world` are not those of that load.
        """
        if not isinstance(state, str):
            raise TypeError(f"state={state!r}: the text that loader.state() returned")
        epoch = self._files.check(state)
        self.close()
        self._state, self._epoch = state, epoch

    def close(self) -> None:
        """Ends the threads and puts back what was read ahead. Batches stay as they are, and the next `for` goes on."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        raise TypeError(
            "a pinpool.Loader cannot be pickled, since its threads and its memory belong to this process: make one in the "
            "process that uses it, with rank= and world=, and pass the text of state()"
        )

    def __repr__(self) -> str:
        return f"<pinpool.Loader of {self.samples} samples, {self.nbytes} B, in epoch {self._epoch}>"


def _told(failures: list[str]) -> str:
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{failures[0]}{more}; on_error='skip' goes on without what cannot be read"


def _bytes(name: str, value: SupportsIndex | str) -> int:
    if isinstance(value, str):
        value = _pinpool._parse_bytes(value)
    return count(name, value, 1)
