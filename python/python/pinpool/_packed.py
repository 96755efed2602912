"""Batches in shared buffers, sent from a worker to the trainer."""

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
    """A batch that `collate` or `pack` has stored in one shared buffer: its ticket and the position of each array. Small to pickle.

    `shared.unpack` turns it into the batch, and `shared.batches(loader)` does so for all batches of a loader. If it is dropped in the
    trainer, its buffer becomes free.
    """

    __slots__ = ("is_received", "longer", "ticket", "tree")

    def __init__(self, ticket: bytes, tree: Any, longer: bytes | None = None) -> None:
        self.ticket, self.tree = ticket, tree
        #: The bytes of a batch that is too long for a buffer and has no ticket.
        self.longer = longer
        self.is_received = longer is not None

    def __reduce__(self) -> Any:
        return Packed, (self.ticket, self.tree, self.longer)

    def __del__(self) -> None:
        if self.is_received:
            return
        # In a worker the ticket has been sent.
        for shared in [shared for shared in trainers if shared._process == os.getpid()]:
            try:
                shared.receive(self).release()
            except PinpoolError:
                pass  # It was received as bytes, or belongs to another shared pool.

    def __repr__(self) -> str:
        return "<pinpool.Packed, a batch in a shared buffer: iterate over shared.batches(loader), or call shared.unpack(...) on it>"


class Batches:
    """The batches of a loader with `collate_fn=shared.collate`, unpacked; each `for` is an epoch. Created by `shared.batches`."""

    def __init__(self, shared: SharedPool, loader: Iterable[Packed]) -> None:
        self._shared, self._loader = shared, loader

    def __len__(self) -> int:
        """Number of batches of the loader; TypeError if it has none, as with an `IterableDataset`."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            length: float = len(self)
        except TypeError:
            length = math.inf
        # The workers may fill this many batches before the next one, and torch's loader keeps them until then.
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
            # Ends the workers of torch's loader, whose iterator an exception's traceback may keep.
            if not getattr(iterator, "_persistent_workers", False):
                # torch joins its workers, and a worker that waits for a buffer would delay that by seconds.
                with self._shared._refusing_waits():
                    getattr(iterator, "_shutdown_workers", lambda: None)()
                    # torch does not wait for workers that it kills, and the buffers of a worker become free once it is dead.
                    for worker in getattr(iterator, "_workers", ()):
                        worker.join()
            del iterator
            self._shared._reclaim()
