"""Files into batches in pinned memory, by threads of the crate's loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, Literal, Never, SupportsIndex, TypeAlias

from . import _decode, _device, _paths, _pinpool
from ._arguments import count, switch
from ._batch import Batch
from ._decode import Array, Image
from ._errors import LimitError, LoadError
from ._map import Mapped
from ._pool import Pool
from ._progress import Progress, progress_of

__all__ = ["Loader"]

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

#: A batch, and the state and the epoch behind it.
_Taken: TypeAlias = tuple[Batch, "str | None", int]


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

        def take() -> _Taken | None:
            taken = self._take(reader)
            if taken is not None and shown is not None:
                shown.add(len(taken[0]), taken[0].nbytes)
            return taken

        def hand_out(taken: tuple[Any, str | None, int]) -> Any:
            made, *behind = taken
            self._state, self._epoch = behind
            return made

        batches: Iterator[tuple[Any, str | None, int]] = iter(take, None)
        mapped = None
        if (function := self._map) is not None:
            # What is ahead of the loop does not count for `state()`.
            batches = mapped = Mapped(lambda taken: (function(taken[0]), *taken[1:]), batches, self._map_workers)
        try:
            # Keeps no reference to a batch, so that its memory goes back as soon as the user's is gone. After `load_state` or
            # `close`, and once another `for` has begun, it ends, also with results of `map` ahead.
            yield from map(hand_out, takewhile(lambda _: self._reader is reader, batches))
            if self._reader is reader and reader.is_complete():
                self._state, self._epoch = reader.end_state(end), end
        finally:
            # After `break`, an exception and Ctrl-C as well.
            if mapped is not None:
                mapped.close()
            reader.stop()
            if shown is not None:
                shown.close()

    def _shown(self, end: int) -> Progress | None:
        if not self._progress:
            return None
        done = 0
        if self._state is not None:
            # The batches of the epochs of this `for` before the state.
            epoch, batch = (int(part.partition("=")[2]) for part in self._state.partition(":")[2].split(",")[:2])
            done = batch + sum(self._files.batches(earlier) for earlier in range(end - self._epochs, epoch))
        return progress_of(self._progress, len(self), done)

    def _take(self, reader: _pinpool.Reader) -> _Taken | None:
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
        return batch, reader.state(), batch.epoch

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
