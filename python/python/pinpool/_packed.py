"""Batches that workers send to the trainer in shared buffers."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from ._errors import PinpoolError

if TYPE_CHECKING:
    from ._shared import SharedPool

__all__ = ["Batches", "Packed"]

#: The shared pools created in this process or in its parent before a fork.
trainers: weakref.WeakSet[SharedPool] = weakref.WeakSet()


class Packed:
    """A batch that `SharedPool.collate` or `SharedPool.pack` has sent: the ticket of its buffer and the positions of its arrays.

    `shared.unpack(packed)` returns the batch, and `shared.batches(loader)` unpacks all batches of a loader. Its buffer becomes free if the
    object is dropped in the trainer without being unpacked.
    """

    __slots__ = ("is_received", "oversized", "ticket", "tree")

    def __init__(self, ticket: bytes, tree: Any, oversized: bytes | None = None) -> None:
        self.ticket, self.tree = ticket, tree
        #: The bytes of a batch that is longer than a buffer and has no ticket.
        self.oversized = oversized
        self.is_received = oversized is not None

    def __reduce__(self) -> Any:
        return Packed, (self.ticket, self.tree, self.oversized)

    def __del__(self) -> None:
        if self.is_received:
            return
        # In a worker the ticket has been sent.
        for shared in [shared for shared in trainers if shared._process == os.getpid()]:
            try:
                shared.receive(self).release()
            except PinpoolError:
                pass  # Its ticket was received otherwise, or belongs to another shared pool.

    def __repr__(self) -> str:
        return "<pinpool.Packed, a batch in a shared buffer: iterate over shared.batches(loader), or call shared.unpack(...) on it>"


class Batches:
    """The unpacked batches of a DataLoader, from `SharedPool.batches`. Each `for` is an epoch."""

    def __init__(self, shared: SharedPool, loader: Iterable[Packed]) -> None:
        self._shared, self._loader = shared, loader

    def __len__(self) -> int:
        """Number of batches of an epoch. Raises TypeError if the loader has no length, as with an `IterableDataset`."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)

    @property
    def sampler(self) -> Any:
        """The loader's sampler, or None. Lightning calls its `set_epoch`."""
        return getattr(self._loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler, or None."""
        return getattr(self._loader, "batch_sampler", None)

    def __iter__(self) -> Iterator[Any]:
        try:
            length: float = len(self)
        except TypeError:
            length = math.inf
        # Number of batches that the workers prepare before torch's loader returns the next one.
        ahead = getattr(self._loader, "num_workers", 0) * (getattr(self._loader, "prefetch_factor", None) or 0)
        iterator = iter(self._loader)
        try:
            for number in itertools.count():
                self._shared._refuse_too_many_held(min(max(ahead, 1), length - number))
                packed = next(iterator, None)
                if packed is None:
                    return
                yield self._shared.unpack(packed)
        finally:
            # Ends the workers now, because the traceback of an exception may keep torch's iterator.
            if not getattr(iterator, "_persistent_workers", False):
                # torch joins each worker for up to 5 s, so workers must not wait for buffers meanwhile.
                with self._shared._refusing_waits():
                    getattr(iterator, "_shutdown_workers", lambda: None)()
                    # torch does not join the workers that it kills; their buffers become free when they have ended.
                    for worker in getattr(iterator, "_workers", ()):
                        worker.join()
            del iterator
            self._shared._reclaim()
