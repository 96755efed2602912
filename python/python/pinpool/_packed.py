"""Batches that workers send to the trainer in shared buffers."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ._errors import PinpoolError

if TYPE_CHECKING:
    from ._shared import SharedPool

__all__ = ["PackedBatch", "SharedBatches"]

#: How long a loop that ends waits for each worker that torch has ended, and again after it has killed the worker.
_JOIN_SECONDS = 5

#: The shared pools created in this process or in its parent before a fork, by inode and device of the memory file.
live_pools: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()


class PackedBatch:
    """A batch that `SharedPool.collate` or `SharedPool.pack` has sent: the ticket of its buffer and the positions of its arrays.

    `shared.unpack(packed)` returns the batch, and `shared.batches(loader)` unpacks all batches of a loader. If the object is
    dropped in the trainer without being unpacked, its buffer becomes free.
    """

    __slots__ = ("_identity", "_is_received", "_oversized", "_tree", "ticket")

    def __init__(self, ticket: bytes, tree: Any, oversized: bytes | bytearray | None = None, identity: Any = None) -> None:
        self.ticket, self._tree, self._identity = ticket, tree, identity
        #: The bytes of a batch that is larger than a buffer and has no ticket.
        self._oversized = oversized
        self._is_received = oversized is not None

    def __reduce__(self) -> Any:
        return PackedBatch, (self.ticket, self._tree, self._oversized, self._identity)

    def __del__(self) -> None:
        if self._is_received:
            return
        # A worker, which has sent the ticket, did not create the pool.
        if (shared := live_pools.get(self._identity)) is not None and shared._owner_pid == os.getpid():
            with contextlib.suppress(PinpoolError):  # Fails if the ticket was received in another way.
                shared.receive(self).release()

    def __repr__(self) -> str:
        return "<pinpool.PackedBatch, a batch in a shared buffer: iterate over shared.batches(loader), or call shared.unpack(...) on it>"


class SharedBatches:
    """The unpacked batches of a DataLoader, from `SharedPool.batches`. Each loop is an epoch. Other attributes are the loader's."""

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
        try:
            length: float = len(self)
        except TypeError:
            length = math.inf
        # Number of batches that the workers prepare before torch's loader returns the next one.
        ahead = getattr(self._loader, "num_workers", 0) * (getattr(self._loader, "prefetch_factor", None) or 0)
        # Checked before persistent workers are told of the epoch, because torch then waits for each worker, and a worker may wait for a
        # buffer.
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
            _end_workers(self._shared, iterator)
            del iterator
            self._shared._reclaim()


def _end_workers(shared: SharedPool, iterator: Any) -> None:
    """Ends the workers of a DataLoader, unless they are persistent. Uses private names of torch, tested with 2.11 and 2.15."""
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
