"""The class `Loader`."""

from __future__ import annotations

import difflib
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, SupportsIndex, TypeAlias, TypedDict, TypeVar, Unpack, overload

from pinpool import LimitError, LoadError, PinpoolError, Pool, Size, _device, _pinpool
from pinpool._arguments import checked_bool, checked_int, hide_unknown_parameter

from . import _decode, _paths
from ._batch import Batch, LoaderInfo, RawBatch
from ._decode import ImageDecoder
from ._map import TIMED_OUT, MapRunner
from ._progress import POSITION_KEYS, Position, Progress

__all__ = ["Loader", "LoaderSettings"]

T = TypeVar("T")
_Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_ORDER_HINT = "shuffle=, seed=, rank= and world_size= choose the order"
_MAP_HINT = "map= takes a function of a batch"
_WORLD_HINT = "world_size= is the number of processes, and rank= the index of this one"
_THREADS_HINT = "the loader has threads and no worker processes; map= applies a function to each batch, with random numbers from batch.rng()"
#: Arguments of other loaders, and what to use instead.
_HINTS = {
    "dataset": "the first argument names files: Loader('photos', batch_size=64)",
    "root": "the first argument names files: Loader('photos', batch_size=64)",
    "num_workers": "num_threads= is the number of threads that read",
    "prefetch_factor": "read_ahead= is the number of batches that are read ahead",
    "collate_fn": _MAP_HINT,
    "transform": _MAP_HINT + "; batch.rng() draws the random numbers of an augmentation",
    "target_transform": "label_function= takes a function of a label's text",
    "loader": "decode= decodes images, and map= takes a function of a batch for other formats",
    "is_valid_file": "name the files by a pattern: Loader('photos/**/*.jpg')",
    "pin_memory": "batches are in memory of pool=, which is pinned if the pool's backend can pin (pool.pinned_by)",
    "pin_memory_device": "pool= takes the pool of the batches, and Pool(device=) the GPU",
    "sampler": _ORDER_HINT,
    "batch_sampler": _ORDER_HINT,
    "generator": "seed= seeds the order of each epoch, and batch.rng() the random numbers of a batch",
    "worker_init_fn": _THREADS_HINT,
    "persistent_workers": _THREADS_HINT,
    "multiprocessing_context": _THREADS_HINT,
    "num_replicas": _WORLD_HINT,
    "world": _WORLD_HINT,
    "timeout": "pool= takes the pool of the batches, and Pool(wait=) bounds the wait for memory",
    "in_order": "batches always come in order",
    "device": "pinpool.torch.to_device(tensors, device) copies without blocking",
    "progress": "for batch in tqdm.tqdm(loader)",
    "epochs": "epochs_per_loop= is the number of epochs of one loop",
}


def _default_num_threads() -> int:
    """Returns this rank's share of the cores if several ranks share all cores of the host, else 0 (the default of the Rust loader)."""
    ranks, has_all_cores = os.environ.get("LOCAL_WORLD_SIZE", ""), len(os.sched_getaffinity(0)) == os.cpu_count()
    return max(_pinpool._default_threads() // int(ranks), 1) if ranks.isdecimal() and int(ranks) > 1 and has_all_cores else 0


def _default_world_size() -> int:
    """Returns the default of `world_size`, or raises TypeError if there are several ranks."""
    if (ranks := _device.num_ranks(os.environ)) > 1:
        raise TypeError(
            f"world_size= is missing although WORLD_SIZE or torch.distributed shows {ranks} ranks: pass rank= and world_size=, or world_size=1 "
            "to load all samples"
        )
    return 1


class LoaderSettings(TypedDict, total=False):
    """The keyword arguments of `Loader` without `map`.

    Annotates a function that passes them on: `**settings: Unpack[LoaderSettings]`.
    """

    batch_size: int | None
    batch_bytes: Size | None
    num_threads: int | None
    read_ahead: int | None
    shuffle: bool
    seed: int
    rank: int | None
    world_size: int | None
    drop_last: bool
    even: bool
    epochs_per_loop: int
    state: Mapping[str, Any] | None
    pool: Pool | None
    open_archives: bool | None
    decode: Mapping[str, ImageDecoder] | None
    label_field: str | None
    label_function: Callable[[str], Any] | None
    num_map_threads: int
    on_error: Literal["raise", "skip"]


class Loader(Generic[T]):
    """Batches of files in pinned memory, read ahead by Rust threads.

        loader = pinpool_loader.Loader("photos", batch_size=64, shuffle=True, decode={"jpg": pinpool_loader.ImageDecoder(224, 224)})
        for batch in loader:
            train(batch["jpg"], batch.labels)

    Each file is a sample. In a `.tar` file, consecutive members with the same path up to the first dot of the file name are one
    sample (WebDataset). Each loop begins at a new epoch, even after a `break`, and covers `epochs_per_loop` epochs. Only one loop may run
    at a time: the first loop raises RuntimeError once a second one, even a nested one, has begun.

    Args:
        paths: a file or directory, or several, which may contain patterns and braces: "shards/*.tar", "train-{000..146}.tar". A `.tar` or
            `.safetensors` file is opened if it is named or in a directory of only such files; for a directory that also has other
            files, pass `open_archives`. The constructor reads the headers of all members, in each rank. Compressed files that are
            named or would be opened are refused.
        batch_size: maximum number of samples per batch.
        batch_bytes: maximum number of bytes per batch, or text such as "16MiB" (the default if `batch_size` is not given either).
            A longer sample comes in parts.
        num_threads: number of threads that read and decode (default: one per core, within the cgroup's CPU quota; if the process may
            use all cores, divided by `LOCAL_WORLD_SIZE`).
        read_ahead: batches read ahead (default: two per thread, so 128 with 64 threads). The loader holds up to this many batches, and `map`
            up to `num_map_threads + 1` more.
        shuffle: whether each epoch has a new random order of all samples, determined by `seed`. Archives are then read at random
            offsets, so on network storage shuffle the samples when you write the archives, and leave this False.
        seed: seed of the order and of `Batch.rng`.
        rank, world_size: the index of this process, from 0, and how many processes there are (data-parallel ranks). Process
            `rank` gets the samples `rank`, `rank + world_size`, ... in the order of the epoch. By default a process gets all samples.
            If `WORLD_SIZE` or `torch.distributed` shows several ranks, pass `world_size`, which may be 1.
        drop_last: whether to leave out incomplete batches, so that all ranks have the same number of batches.
        even: whether to repeat a few samples, as DistributedSampler does, so that all ranks have the same number of batches. In validation,
            repeated samples count twice in metrics. With neither `drop_last` nor `even`, ranks may have different numbers of
            batches, which makes DDP hang.
        epochs_per_loop: number of epochs of one loop (default 1).
        state: a result of `state_dict()`, as for `load_state_dict`. The first loop continues after that position.
        pool: pool of the batches, by default a new `pinpool.Pool(name="loader")`.
        open_archives: for directories with other files: True opens the archives in them, False loads each archive as one sample of
            raw bytes. By default, the loader refuses such a directory with ValueError.
        decode: decoders by field name (the suffix of a plain file): `{"jpg;png": pinpool_loader.ImageDecoder(224, 224)}` makes
            `batch["jpg"]` one uint8 array of shape (n, 224, 224, 3). Needs `batch_size`.
        label_field: field with the label, such as "cls". By default the label of a plain file is the index of its directory in `classes`,
            the label of a member of an archive is its name, and with samples of both kinds there are no labels.
        label_function: function from the text of the field, or the name of the directory, to the label (default for `label_field`: int).
            If a sample is in an archive, it needs `label_field`.
        map: function that takes a batch. The loop yields its results, in order, instead of batches. The function should take
            random numbers from `batch.rng()`.
        num_map_threads: number of threads that run `map` ahead of the loop. With a GIL, they run one at a time, except in calls that
            release it, as many NumPy and torch calls do.
        on_error: "raise", or "skip" to leave out samples that cannot be read and list them in `failures`.

    Raises:
        TypeError, ValueError: an argument is invalid or missing, or `paths` has no samples.
        LoadError: a file cannot be listed, or, during iteration, cannot be read or decoded.
        RuntimeError: during iteration, if another loop over the loader has begun.
        TimeoutError, LimitError, BackendError, ForkError, ClosedError: during iteration, as for `Pool.get`.
    """

    @overload
    def __init__(self: Loader[Batch], paths: _Paths, *, map: None = None, **settings: Unpack[LoaderSettings]) -> None: ...
    @overload
    def __init__(self, paths: _Paths, *, map: Callable[[Batch], T], **settings: Unpack[LoaderSettings]) -> None: ...
    @hide_unknown_parameter
    def __init__(
        self, paths: _Paths, *, batch_size: int | None = None, batch_bytes: Size | None = None, num_threads: int | None = None,
        read_ahead: int | None = None, shuffle: bool = False, seed: int = 0, rank: int | None = None, world_size: int | None = None,
        drop_last: bool = False, even: bool = False, epochs_per_loop: int = 1, state: Mapping[str, Any] | None = None,
        pool: Pool | None = None, open_archives: bool | None = None, decode: Mapping[str, ImageDecoder] | None = None,
        label_field: str | None = None, label_function: Callable[[str], Any] | None = None, map: Callable[[Batch], Any] | None = None,
        num_map_threads: int = 2, on_error: Literal["raise", "skip"] = "raise", **unknown: Any,
    ) -> None:  # fmt: skip
        if unknown:
            name = next(iter(unknown))
            similar = difflib.get_close_matches(name, [*LoaderSettings.__annotations__, "map"], 1)
            hint = _HINTS.get(name) or (f"did you mean {similar[0]}?" if similar else "")
            raise TypeError(f"Loader has no argument {name!r}" + (f"; {hint}" if hint else ""))
        _check_objects(on_error, label_field, label_function, map, pool)
        label_field = label_field and label_field.removeprefix(".").lower()
        self._map = map
        self._num_map_threads = checked_int("num_map_threads", num_map_threads, 1, 1024)
        decoded = _decode.decoder_specs(decode)
        drop_last, even = checked_bool("drop_last", drop_last), checked_bool("even", even)
        for name, is_given in (("decode", bool(decoded)), ("drop_last", drop_last), ("even", even)):
            if is_given and (batch_size is None or batch_bytes is not None):
                raise ValueError(f"{name}= needs batch_size=, without batch_bytes=")
        if batch_size is None and batch_bytes is None:
            batch_bytes = 16 << 20
        batch_size = 0 if batch_size is None else checked_int("batch_size", batch_size, 1)
        if isinstance(batch_bytes, str):
            batch_bytes = _pinpool._size("batch_bytes", batch_bytes)
        batch_bytes = 0 if batch_bytes is None else checked_int("batch_bytes", batch_bytes, 1)
        if open_archives is not None:
            checked_bool("open_archives", open_archives)
        shuffle, seed = checked_bool("shuffle", shuffle), checked_int("seed", seed, 0)
        world_size = _default_world_size() if world_size is None else checked_int("world_size", world_size, 1)
        if rank is None and world_size > 1:
            raise TypeError(f"rank= is missing: with world_size={world_size}, each process loads the part of its rank")
        rank = 0 if rank is None else checked_int("rank", rank, 0)
        self._progress = Progress(checked_int("epochs_per_loop", epochs_per_loop, 1))
        self._skips_errors = on_error == "skip"
        path_list = _paths.expand(paths)
        _check_not_compressed(_paths.find_compressed(path_list))
        self._pool = Pool(name="loader") if pool is None else pool
        self._catalog = _pinpool.SampleCatalog(
            self._pool, path_list, bool(open_archives), batch_size=batch_size, batch_bytes=batch_bytes,
            num_threads=_default_num_threads() if num_threads is None else checked_int("num_threads", num_threads, 1, 1024),
            read_ahead=0 if read_ahead is None else checked_int("read_ahead", read_ahead, 1, 65536),
            seed=seed if shuffle else None,
            rank=rank, world_size=world_size, even=even, drop_last=drop_last,
            labels=None if label_field is None else (label_field, label_function or int),
            decode=[(list(names), spec.decoder) for names, spec in decoded.items()],
        )  # fmt: skip
        # All arguments that determine the batches.
        self._batch_arguments = {
            "samples": len(self._catalog), "batch_size": batch_size, "batch_bytes": batch_bytes, "shuffle": shuffle,
            "seed": seed, "world_size": world_size, "rank": rank, "drop_last": drop_last, "even": even,
        }  # fmt: skip
        self._info = LoaderInfo(self._catalog, {names: (spec.shape, spec.dtype) for names, spec in decoded.items()}, seed, rank, label_field)
        # A dict serves as an ordered set of the texts.
        self._failures = dict.fromkeys(self._catalog.failures())
        self._check_loadable(path_list)
        self._warn_of_uneven_ranks()
        if open_archives is None:
            _check_archives_opened(self._catalog.unopened())
        self._has_labels = True
        self._label_of_directory: dict[str, Any] | None = None
        if label_field is None:
            self._set_directory_labels(label_function)
        self._reader: _pinpool.Reader | None = None
        self._last_loop_number = 0
        self._interrupted_loops: set[int] = set()  # Numbers of loops that another loop has cut short.
        # The number of batches of each counted epoch.
        self._batch_counts: dict[int, int] = {}
        if state is not None:
            self.load_state_dict(state)

    def _set_directory_labels(self, label_function: Callable[[str], Any] | None) -> None:
        """Determines the labels of samples without a field for them."""
        classes, has_archives = self._catalog.classes()
        if label_function is not None and has_archives:
            raise ValueError("label_function= needs label_field=, because samples in archives have no directory as a label")
        self._has_labels = not (classes and has_archives)
        if not has_archives:
            self._label_of_directory = {name: _label(label_function, name, index) for index, name in enumerate(classes)}

    def _check_loadable(self, path_list: list[str]) -> None:
        """Raises an error for files that cannot be loaded as requested."""
        _check_not_compressed(self._catalog.first_compressed())
        if not self._skips_errors and (undecodable := self._catalog.undecodable()) is not None:
            self._failures[f"{undecodable}; leave such files out by a pattern, as in 'photos/**/*.jpg'"] = None
        if self._failures and not self._skips_errors:
            raise LoadError(_failure_text(list(self._failures)))
        if not len(self._catalog):
            shown_paths = ", ".join(repr(path) for path in path_list[:3]) + (", ..." if len(path_list) > 3 else "")
            reason = "contain no regular file; name files, or directories of files"
            if self._failures:
                reason = f"contain nothing that can be read: {next(iter(self._failures))}"
            elif self._catalog.num_files():
                reason = "contain only empty archives"
            raise ValueError(f"cannot load anything: paths [{shown_paths}] {reason}")
        if not self._catalog.num_batches(0):
            text = "rank={rank} has no batch of {samples} samples of world_size={world_size}, batch_size={batch_size}, drop_last={drop_last}"
            raise ValueError(f"{text.format_map(self._batch_arguments)}; use a smaller batch_size or world_size")

    def _warn_of_uneven_ranks(self) -> None:
        """Warns if ranks get different numbers of batches."""
        arguments = self._batch_arguments
        samples, world_size, batch_size = arguments["samples"], arguments["world_size"], arguments["batch_size"]
        if world_size == 1 or arguments["drop_last"] or arguments["even"]:
            return
        most, fewest = -(-samples // world_size), samples // world_size
        batches = [-(-count // batch_size) if batch_size else 0 for count in (most, fewest)]
        if arguments["batch_bytes"] or batches[0] != batches[1]:
            counts = f"{batches[0]} and {batches[1]}" if not arguments["batch_bytes"] else "different numbers of"
            warnings.warn(
                f"the ranks get {counts} batches an epoch ({samples} samples, world_size={world_size}), and training that synchronizes ranks "
                "(DDP) hangs at the end of an epoch: pass batch_size and even=True (repeats samples) or drop_last=True (leaves some out)",
                stacklevel=3,
            )

    @property
    def pool(self) -> Pool:
        """The pool of all buffers."""
        return self._pool

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return len(self._catalog)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all samples of an epoch, over all ranks."""
        return self._catalog.nbytes()

    @property
    def classes(self) -> list[str]:
        """Sorted names of the directories; without `label_function`, label `i` means `classes[i]`. The list is empty with
        `label_field`, or if a sample is in an archive."""
        return list(self._label_of_directory or ())

    @property
    def failures(self) -> list[str]:
        """Descriptions of the samples that were left out so far, with `on_error="skip"`."""
        return list(self._failures)

    def __len__(self) -> int:
        """Number of batches of the current or next loop. After a resume, this includes the batches before the loaded position."""
        return sum(self._num_batches(epoch) for epoch in self._progress.epochs_of_loop())

    def __iter__(self) -> Iterator[T]:
        if self._reader is not None and self._progress.first_epoch is not None:
            self._interrupted_loops.add(self._last_loop_number)
        self.close()
        epochs = self._progress.begin_loop()
        self._last_loop_number = loop_number = self._last_loop_number + 1
        self._reader = reader = self._catalog.begin(epochs.stop, self._progress.position)
        batches: Iterator[tuple[Any, Position]] = iter(lambda: self._next_batch(reader), None)
        runner = None
        if (function := self._map) is not None:
            # The position travels with each result, because `state_dict()` must not count results ahead of the loop.
            batches = runner = MapRunner(
                lambda batch_and_position: (function(batch_and_position[0]), batch_and_position[1]),
                lambda timeout: self._next_batch(reader, timeout),
                self._num_map_threads,
            )

        def advance(result_and_position: tuple[Any, Position]) -> Any:
            result, position = result_and_position
            self._progress.advance(position, epochs)
            return result

        try:
            # The builtin `map` keeps no reference to a batch, so its memory returns when the user drops it. The loop ends after
            # `load_state_dict` or `close`.
            yield from map(advance, takewhile(lambda _: self._reader is reader, batches))
            if loop_number in self._interrupted_loops:
                raise RuntimeError("another loop over this Loader has begun: create one Loader for each loop")
        finally:
            # This also runs after `break`, an exception or Ctrl-C. The reader is stopped first, because the batches that it has read ahead
            # occupy memory for which the function `map=` may wait.
            self._interrupted_loops.discard(loop_number)
            reader.stop()
            if runner is not None:
                runner.close()
            if self._reader is reader:
                self._reader = self._progress.first_epoch = None

    def _next_batch(self, reader: _pinpool.Reader, timeout: float | None = None) -> tuple[Batch, Position] | None:
        if not (loaded := reader.next(timeout)):  # None at the end, False after the timeout.
            return None if loaded is None else TIMED_OUT
        raw = RawBatch._make(loaded)
        failures = [text for text, _ in raw.failures]
        pool_errors = [error for _, error in raw.failures if error is not None]
        if pool_errors or (failures and not self._skips_errors):
            del loaded, raw  # Otherwise the traceback would keep the buffer.
            if pool_errors:
                raise _with_remedy(pool_errors.pop(0))  # No variable may keep it, because its traceback refers to this frame.
            raise LoadError(_failure_text(failures))
        self._failures.update(dict.fromkeys(failures))
        labels = raw.labels
        if labels is None and self._has_labels:
            labels = self._catalog.labels([sample for sample, *_ in raw.parts])
            if self._label_of_directory is not None:
                labels = [self._label_of_directory[name] for name in labels]
        is_last = raw.index_in_epoch + 1 == self._num_batches(raw.epoch)
        next_position = (raw.epoch + 1, 0) if is_last else (raw.epoch, raw.index_in_epoch + 1)
        return Batch(raw, labels, failures, self._info), (*next_position, raw.index_overall + 1)

    def _num_batches(self, epoch: int) -> int:
        """Returns the number of batches of `epoch`, cached."""
        if epoch not in self._batch_counts:
            self._batch_counts[epoch] = self._catalog.num_batches(epoch)
        return self._batch_counts[epoch]

    @functools.cached_property
    def _fingerprint(self) -> str:
        return self._catalog.fingerprint()  # Hashes the names and lengths of all samples.

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch of the loop, as numbers and text, for a checkpoint.

        After the last batch of an epoch, it is the start of the next epoch.
        """
        return {**dict(zip(POSITION_KEYS, self._progress.position, strict=True)), "files": self._fingerprint, **self._batch_arguments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next loop continue after the batch at which `state` was taken, and ends a running loop.

        The rank may differ if all ranks have the same number of batches.

        Raises:
            ValueError: the state belongs to a loader with different batches; the text names the differences.
            TypeError: `state` is not a result of `state_dict()`.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or own.keys() - state.keys():
            raise TypeError(f"state must be a result of Loader.state_dict(), not {state!r}")
        ignored = set(POSITION_KEYS)
        ranks_are_equal = own["samples"] % own["world_size"] == 0 and own["batch_size"] and not own["batch_bytes"]
        if own["drop_last"] or own["even"] or ranks_are_equal:
            ignored.add("rank")
        differ = [f"{name}={state[name]!r} in the state, {own[name]!r} here" for name in own if name not in ignored and state[name] != own[name]]
        if differ:
            raise ValueError(f"state belongs to a loader with different batches: {'; '.join(differ)}")
        epoch, index_in_epoch, index_overall = (checked_int(f"state[{name!r}]", state[name], 0) for name in POSITION_KEYS)
        if index_in_epoch >= (batches := self._num_batches(epoch)):
            raise ValueError(f"state is at batch {index_in_epoch} of epoch {epoch}, which has {batches}")
        self.close()
        self._progress.resume((epoch, index_in_epoch, index_overall))

    def close(self) -> None:
        """Ends a running loop and its reading threads. Batches stay valid. The next loop begins at a new epoch, or at a loaded state."""
        reader, self._reader, self._progress.first_epoch = self._reader, None, None
        if reader is not None:
            reader.stop()

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        raise TypeError(
            "a pinpool_loader.Loader cannot be pickled, since its threads and memory belong to this process: create one in the "
            "process that uses it, with rank= and world_size=, and pass the result of state_dict()"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            other_epoch = "another `for` loop, which begins at the next epoch, or load_state_dict()"
            instead = {"state": "state_dict()", "load_state": "load_state_dict()", "set_epoch": other_epoch}.get(name)
            raise AttributeError(f"a Loader has no attribute {name!r}" + (f": use {instead}" if instead else ""))

    def __repr__(self) -> str:
        return f"<pinpool_loader.Loader of {self.num_samples} samples, {self.nbytes} bytes, in epoch {self._progress.position[0]}>"


def _check_objects(on_error: Any, label_field: Any, label_function: Any, map: Any, pool: Any) -> None:
    """Checks the arguments that are neither numbers nor bools."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if label_field is not None and not (isinstance(label_field, str) and label_field):
        raise TypeError(f"label_field must be the name of a field, such as 'cls', not {label_field!r}")
    if label_function is not None and not callable(label_function):
        raise TypeError(f"label_function must be a function of a label's text, such as int, float, str or json.loads, not {label_function!r}")
    if map is not None and not callable(map):
        raise TypeError(f"map must be a function of a batch, not {map!r}")
    if pool is not None and not isinstance(pool, Pool):
        raise TypeError(f"pool must be a pinpool.Pool, not {pool!r}")


def _check_not_compressed(compressed: str | None) -> None:
    if compressed is not None:
        raise ValueError(
            f"{compressed}: compressed files are not supported, because their samples cannot be split among ranks: decompress them first, "
            "for example with zstd -d or gunzip"
        )


def _check_archives_opened(unopened: list[str]) -> None:
    archives = [path for path in unopened if re.search(r"\.(tar(\.gz|\.zst)?|tgz|tzst|safetensors)$", path, re.IGNORECASE)]
    _check_not_compressed(next((path for path in archives if not path.lower().endswith((".tar", ".safetensors"))), None))
    if archives:
        more = f" (and {len(archives) - 1} more)" if len(archives) > 1 else ""
        directory, name = os.path.split(archives[0])
        raise ValueError(
            f"{archives[0]}{more} is in a directory with other files: name the archives, as in '{directory}/*{os.path.splitext(name)[1]}', pass "
            "open_archives=True to open the archives in directories, or open_archives=False to load each as one sample of raw bytes"
        )


def _failure_text(failures: list[str]) -> str:
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{failures[0]}{more}; on_error='skip' skips such files"


def _with_remedy(error: PinpoolError) -> PinpoolError:
    if not isinstance(error, LimitError):
        return error
    remedy = "the batches that the program still holds use this memory too: drop each before the next, or use smaller batches"
    return type(error)(f"{error}; {remedy}", error.report())


def _label(label_function: Callable[[str], Any] | None, name: str, index: int) -> Any:
    """Returns the label of files in the directory `name`."""
    if label_function is None:
        return index
    try:
        return label_function(name)
    except Exception as error:
        raise ValueError(f"label_function: the directory name {name!r} is not a label: {error}") from error
