"""The loop over the batches of a DataLoader that come in shared buffers."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ._log import logger

if TYPE_CHECKING:
    from ._packed import PackedBatch
    from ._shared import SharedPool

__all__ = ["SharedBatches"]

#: When a loop ends, it waits this long for each worker that torch has told to end. Then it kills the worker and waits once more.
_JOIN_SECONDS = 5


class SharedBatches:
    """The unpacked batches of a DataLoader, from `SharedPool.batches`. Each loop is an epoch. Attributes of the loader can be read from it."""

    def __init__(self, shared: SharedPool, loader: Iterable[PackedBatch]) -> None:
        self._shared, self._loader = shared, loader

    def __len__(self) -> int:
        """Number of batches of an epoch. Raises TypeError if the loader has no length, as with an `IterableDataset`."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"set {name!r} of the DataLoader: its attributes can only be read from the batches")
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[Any]:
        shared, loop = self._shared, self._unpacked()
        shared._trainer_core()  # Raises ForkError in a forked child, which must not end the workers of its parent's loop.
        # An earlier loop is ended, because this one would wait for the buffers of its batches.
        if shared._loop is not None:
            if inspect.getgeneratorstate(shared._loop) == inspect.GEN_RUNNING:
                raise RuntimeError("another thread or the loader runs a loop over this SharedPool: create one SharedPool for each loop")
            shared._loop.close()
        shared._loop = loop
        yield from loop
        if shared._loop is not loop:
            raise RuntimeError("another loop over this SharedPool has begun: create one SharedPool for each loop")

    def _unpacked(self) -> Generator[Any, None, None]:
        try:
            length: float = len(self)
        except TypeError:
            length = math.inf
        # Number of batches that the workers prepare before torch's loader returns the next one.
        ahead = getattr(self._loader, "num_workers", 0) * (getattr(self._loader, "prefetch_factor", None) or 0)
        # Checked before torch tells persistent workers about the epoch, because torch then waits for each worker, and a
        # worker may wait for a buffer.
        self._shared._refuse_too_many_kept(min(max(ahead, 1), length))
        iterator = iter(self._loader)
        try:
            for number in itertools.count():
                self._shared._refuse_too_many_kept(min(max(ahead, 1), length - number))
                try:
                    packed = next(iterator)
                except StopIteration:
                    return
                yield self._shared.unpack(packed)
        finally:
            # The workers are ended here, because the traceback of an exception may keep torch's iterator.
            _end_workers(self._shared, iterator, getattr(self._loader, "num_workers", 0))
            del iterator
            self._shared._free_unreceived()


def _end_workers(shared: SharedPool, iterator: Any, num_workers: int) -> None:
    """Ends the workers of a DataLoader, unless they are persistent. Uses private names of torch, tested with 2.11 and 2.15."""
    # Other iterators, such as a generator over a DataLoader, end their workers when they are dropped.
    if num_workers and type(iterator).__module__.startswith("torch."):
        missing = [name for name in ("_persistent_workers", "_shutdown_workers", "_workers") if not hasattr(iterator, name)]
        if missing:
            logger.warning("torch workers: this torch has no %s, so workers may still run after the loop", " and no ".join(missing))
    if getattr(iterator, "_persistent_workers", False):
        return
    # torch joins each worker for up to 5 s, so workers must not wait for buffers meanwhile.
    with shared._refuse_workers():
        getattr(iterator, "_shutdown_workers", lambda: None)()
        # torch does not join the workers to which it sends SIGTERM; their buffers become free when they have ended.
        for worker in getattr(iterator, "_workers", ()):
            worker.join(_JOIN_SECONDS)
            if worker.is_alive():  # It ignores SIGTERM, or waits in the kernel.
                worker.kill()
                worker.join(_JOIN_SECONDS)
