"""A batch that a worker sends to the trainer in a shared buffer."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

from ._errors import PinpoolError

if TYPE_CHECKING:
    from ._shared import SharedPool

__all__ = ["PackedBatch"]

#: The shared pools created in this process or in its parent before a fork, by inode and device of the memory file.
live_shared_pools: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()


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
        if (shared := live_shared_pools.get(self._identity)) is not None and shared._owner_pid == os.getpid():
            with contextlib.suppress(PinpoolError):  # Fails if the ticket was received in another way.
                shared.receive(self).release()

    def __repr__(self) -> str:
        return "<pinpool.PackedBatch, a batch in a shared buffer: iterate over shared.batches(loader), or call shared.unpack(...) on it>"
