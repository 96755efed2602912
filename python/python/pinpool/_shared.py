"""Pinned buffers that worker processes fill."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _log, _pinpool
from ._arguments import checked_int
from ._batches import SharedBatches
from ._errors import ClosedError, ForkError, LimitError, PinpoolError
from ._layout import BatchLayout, Views, choose_library
from ._packed import PackedBatch, live_shared_pools
from ._pool import Pool

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ._settings import Size, Time

__all__ = ["SharedPool"]

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The largest value that glibc accepts for M_MMAP_THRESHOLD.
_MMAP_THRESHOLD_MAX = 32 << 20
_TRIM_MARGIN_BYTES = 16 << 20

# Shared pools attached in this process, by inode and device of the memory file, so that a pool is attached only once.
_attached: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()
_attaching = threading.Lock()


def _after_fork() -> None:
    global _attaching
    _attaching = threading.Lock()  # Another thread of the parent may hold the lock.


os.register_at_fork(after_in_child=_after_fork)


class _Counts(NamedTuple):
    """Numbers of live workers, of buffers by state, and of received buffers that the program has not returned."""

    workers: int
    free: int
    filling: int
    sent: int
    received: int
    unreturned: int


class SharedPool:
    """Pinned buffers of one size that worker processes fill and the trainer receives in place.

        shared = pinpool.SharedPool(buffer_bytes="40MiB", num_buffers=10)
        loader = DataLoader(dataset, 64, num_workers=4, collate_fn=shared.collate)
        for images, labels in shared.batches(loader):
            ...

    Create the shared pool in the trainer, which pins the memory once. Pass it to `multiprocessing` workers like any object (fork,
    spawn or forkserver): as an argument, in a `functools.partial`, or as an attribute of a dataset. Workers receive a descriptor
    of the memory, not its bytes. With spawn or forkserver (the default from Python 3.14), a module-level function cannot use the
    shared pool as a global variable: bind it with `functools.partial`. Workers call `get`, `pack` and `collate`; methods that
    receive or count buffers raise ForkError outside the trainer. A worker that attaches a shared pool raises glibc's thresholds
    for returning freed memory to the kernel (`mallopt`), so the worker's heap may stay larger.

    Args:
        buffer_bytes: length of each buffer: bytes, or text such as "40MiB". A larger batch is pickled and copied, with a warning.
        num_buffers: number of buffers: `num_workers * prefetch_factor + 2`, and one more for each batch beyond two that the loop keeps.
        pool: the pool whose limit and GPU apply, by default a new `Pool(name="shared")`.
        hugetlb: whether to use huge pages that the administrator has set aside: "auto" (the default) if enough are free, "2MiB"
            always, "off" never. The setting `hugetlb` of the pool does not apply.
        library: what `collate` creates in every process: tensors ("torch") or arrays ("numpy"). The default is "torch" if it is
            installed.

    Raises:
        LimitError: the buffers exceed the limit of the pool (`max_bytes`).
        RequestError: the number or the length of the buffers is too large.
        TypeError, ValueError: another argument is invalid.
        SharedError, BackendError: the memory cannot be created (as without free huge pages for "2MiB") or pinned.
    """

    library: Literal["numpy", "torch"]
    #: In spawned workers `_core` is None and `_pool` does not exist. In forked ones both belong to the trainer: use `_trainer_core()`.
    _pool: Pool
    _core: _pinpool.SharedPoolCore | None = None
    _worker: _pinpool.SharedWorker | None
    _worker_pid: int | None

    def __init__(
        self,
        buffer_bytes: Size,
        num_buffers: int,
        *,
        pool: Pool | None = None,
        hugetlb: Literal["off", "auto", "2MiB"] = "auto",
        library: Literal["numpy", "torch"] | None = None,
    ) -> None:
        _log.start()
        num_buffers = checked_int("num_buffers", num_buffers, 1)
        if hugetlb not in ("off", "auto", "2MiB"):
            raise ValueError(f"hugetlb must be 'off', 'auto' or '2MiB', not {hugetlb!r}")
        library = choose_library(library)
        self._pool = Pool(name="shared") if pool is None else pool
        self._core = _pinpool.SharedPoolCore(self._pool, buffer_bytes, num_buffers, {"off": False, "auto": None, "2MiB": True}[hugetlb])
        self._initialize(self._core.fileno(), library)
        live_shared_pools[self._identity] = self

    def _initialize(self, descriptor: int, library: Literal["numpy", "torch"]) -> None:
        self.library = library
        self._descriptor = descriptor
        self._owner_pid = os.getpid()
        self._identity = os.fstat(descriptor)[1:3]  # Inode and device of the memory file, equal in all processes.
        self._worker = None
        self._worker_pid = None
        self._is_closed = False
        self._has_warned = False
        self._loop: Generator[Any, None, None] | None = None  # The last loop over `batches`.

    # Methods for workers.

    def _attach(self) -> _pinpool.SharedWorker:
        # After a fork, `_worker` belongs to the parent process.
        worker = self._worker
        if worker is None or self._worker_pid != os.getpid():
            with _attaching:
                if self._worker is None or self._worker_pid != os.getpid():
                    self._worker, self._worker_pid = _pinpool.SharedWorker(self.fileno()), os.getpid()
                    if self._core is None or self._owner_pid != os.getpid():
                        _keep_freed_memory(self._worker.size()[0])
                worker = self._worker
        return worker

    def get(self, nbytes: Size | None = None, *, timeout: Time | None = None) -> _pinpool.SharedBuffer:
        """Returns a free buffer to fill with `nbytes` bytes (default: `buffer_bytes`), and waits until there is one.

        Args:
            nbytes: length in bytes, or text such as "1MiB".
            timeout: maximum wait: seconds, a timedelta, text such as "500ms", or None for no limit. That is the default, because
                workers also wait while the trainer validates or saves.

        Raises:
            TimeoutError: no buffer became free in time. LimitError if `timeout` is 0.
            ClosedError: this process has closed the shared pool.
            RequestError: `nbytes` exceeds `buffer_bytes`, or `timeout` is invalid.
            TrainerUnavailableError: the trainer has ended, has closed the shared pool, or is ending a loop over `batches`, and no buffer
                is free or this process has not attached yet.
        """
        worker = self._attach()
        return worker.get(worker.size()[0] if nbytes is None else nbytes, timeout)

    def pack(self, batch: Any, *, user_data: int = 0, timeout: Time | None = None) -> PackedBatch:
        """Copies the arrays and tensors of `batch` into one shared buffer, sends it, and returns a `PackedBatch` for `unpack`.

        If the batch is larger than a buffer, the result contains its bytes instead of a ticket, and `receive_next` does not return it.

        Args:
            batch: any nesting of dicts, lists and tuples. NumPy scalars become arrays of shape (). Values other than arrays, tensors
                and NumPy scalars are pickled.
            user_data: an int from 0 to 2**64 - 1 with any meaning; `receive_next` returns it with the buffer.
            timeout: as for `get`.

        Raises:
            TypeError: a tensor is sparse, nested or quantized.
            TimeoutError, TrainerUnavailableError: as for `get`.
        """
        layout = BatchLayout()
        return self._send(layout, layout.place(batch), user_data, timeout)

    def collate(self, samples: list[Any], *, user_data: int = 0, timeout: Time | None = None) -> PackedBatch:
        """Stacks samples in one shared buffer and sends it: the `collate_fn` of a DataLoader.

        With `DataLoader(batch_size=None)` use `pack`: `collate` stacks a list of samples.

        With `library="torch"` the batch equals the result of torch's `default_collate`. With "numpy", the arrays, tensors and numbers at
        the same position of all samples become one array, dicts, lists and tuples are kept, and anything else becomes a list.

        Raises:
            RuntimeError, TypeError (with "torch"): as torch's `default_collate` raises them, for example if shapes differ.
            ValueError, TypeError (with "numpy"): the samples cannot be stacked: their shapes differ, or no dtype represents all values
                exactly, as for integers and floats in arrays, None and a number, or an integer of more than 64 bits.
            KeyError: a sample lacks a key of the first sample.
            TimeoutError, TrainerUnavailableError: as for `get`.
        """
        layout = BatchLayout()
        return self._send(layout, layout.collate(samples, self.library), user_data, timeout)

    def _send(self, layout: BatchLayout, tree: Any, user_data: int, timeout: Time | None) -> PackedBatch:
        if layout.nbytes > self.buffer_bytes:
            oversized = bytearray(layout.nbytes)
            layout.fill(oversized)
            return PackedBatch(b"", tree, oversized)
        buf = self.get(layout.nbytes, timeout=timeout)
        layout.fill(buf)
        return PackedBatch(buf.send(user_data), tree, None, self._identity)

    # Methods for the trainer.

    def _trainer_core(self) -> _pinpool.SharedPoolCore:
        if self._core is None or self._owner_pid != os.getpid():
            raise ForkError("this process is a worker of the shared pool: only the process that created it can receive buffers")
        return self._core

    def receive(self, ticket: bytes | PackedBatch) -> _pinpool.Buffer:
        """Returns the buffer of `ticket` with the bytes that the worker wrote, without a copy.

        Workers reuse the buffer after it is released, or dropped with its views, and the work on the recorded streams has completed.

        Raises:
            TicketError: the buffer was received before, or belongs to another shared pool.
            ClosedError: the shared pool was closed.
            ForkError: this process is a worker.
            LimitError: the pool has no memory for a batch that is larger than a shared buffer.
        """
        core = self._trainer_core()
        if not isinstance(ticket, PackedBatch):
            return core.receive(ticket)
        if ticket._oversized is not None:
            return self._copy_oversized(ticket._oversized)
        ticket._is_received = True
        return core.receive(ticket.ticket)

    def _copy_oversized(self, oversized: bytes | bytearray) -> _pinpool.Buffer:
        if not self._has_warned:
            self._has_warned = True
            _log.logger.warning(
                "pool[%s] large_batch: a batch is larger than a shared buffer, so it is pickled and copied; set buffer_bytes=%d (now %d)",
                self._pool.name or "shared", len(oversized), self.buffer_bytes,
            )  # fmt: skip
        buf = self._pool.get(len(oversized))
        with memoryview(buf) as target:
            target[:] = oversized
        return buf

    def receive_next(self, *, timeout: Time | None = None) -> tuple[int, _pinpool.Buffer] | None:
        """Returns the `user_data` of the oldest unreceived buffer and the buffer, or None after `timeout` (as for `get`)."""
        return self._trainer_core().receive_next(timeout)

    def receive_from_dead_worker(self) -> tuple[int, _pinpool.Buffer] | None:
        """Returns a buffer that a worker sent before it ended, as `receive_next` does, or None. The ticket of the buffer may be lost."""
        return self._trainer_core().receive_from_dead_worker()

    def unpack(self, packed: PackedBatch) -> Any:
        """Returns the batch that `pack` or `collate` sent: arrays and tensors in pinned memory, without a copy.

        Workers reuse the memory when all arrays and their views are gone. After an asynchronous copy, call
        `pinpool.record_stream(batch, stream)`.
        """
        if not isinstance(packed, PackedBatch):
            raise TypeError(f"a {type(packed).__name__} is not a batch of a shared pool: pass collate_fn=shared.collate to the DataLoader")
        return Views(self.receive(packed)).restore(packed._tree)

    def batches(self, loader: Iterable[PackedBatch]) -> SharedBatches:
        """Returns the unpacked batches of a DataLoader with `collate_fn=shared.collate`; each loop is an epoch.

        A new loop stops an earlier loop over this shared pool, which then raises RuntimeError at its next step. When a loop ends, also
        after `break` or an exception, its workers are stopped, and unreceived buffers become free. A worker that does not end within
        5 s is killed. With `persistent_workers=True`, the workers keep running, and the buffers become free at the next loop.

        The loop raises LimitError if the program keeps so many batches that fewer than `num_workers * prefetch_factor` buffers are
        left for the workers.
        """
        return SharedBatches(self, loader)

    def _refuse_too_many_kept(self, needed: float) -> None:
        """Raises LimitError if the program keeps so many batches that fewer than `needed` buffers are left for the workers."""
        if self._counts().received + needed <= self.num_buffers:
            return
        generations = iter(range(3))
        while (num_kept := self._num_kept()) + needed > self.num_buffers:
            generation = next(generations, None)
            if generation is None:
                raise LimitError(
                    f"{num_kept} of {self.num_buffers} shared buffers belong to batches that the program keeps, and {needed} are needed to read "
                    f"ahead: drop batches (del), keep copies, or set num_buffers={max(num_kept, 2) + needed}"
                )
            gc.collect(generation)  # Frees batches in reference cycles.

    def _num_kept(self) -> int:
        """Returns the number of received buffers, without buffers that only copies still read."""
        self._pool.maintain()
        counts = self._counts()
        # A returned buffer whose copies never end is not in flight either, so it counts as kept.
        in_flight: int = self._pool.stats()["copies"]["in_flight"]
        return counts.received - min(max(counts.received - counts.unreturned, 0), in_flight)

    @contextlib.contextmanager
    def _refuse_workers(self) -> Iterator[None]:
        """Within the context, workers cannot attach or send, and requests that would wait for a buffer fail immediately."""
        core, ignoring_close = self._trainer_core(), contextlib.suppress(ClosedError)
        with ignoring_close:
            core.refuse_workers(True)
        try:
            yield
        finally:
            with ignoring_close:
                core.refuse_workers(False)

    def _free_unreceived(self) -> None:
        core = self._trainer_core()
        try:
            core.recover()
            while (sent := core.receive_from_dead_worker()) is not None:
                sent[1].release()
        except ClosedError:
            pass  # Another thread has closed the shared pool.

    def recover(self) -> int:
        """Frees the buffers that workers were filling when they died, and returns their number. Waiting workers do this automatically."""
        return self._trainer_core().recover()

    def counts(self) -> dict[str, int]:
        """Returns the numbers of buffers: "free", "filling" (by workers), "sent" (not received) and "received" (or in flight)."""
        counts = self._counts()
        return {"free": counts.free, "filling": counts.filling, "sent": counts.sent, "received": counts.received}

    def _counts(self) -> _Counts:
        return _Counts._make(self._trainer_core().counts())

    @property
    def num_live_workers(self) -> int:
        """Number of attached workers that are alive."""
        return self._counts().workers

    @property
    def buffer_bytes(self) -> int:
        """Length of each buffer in bytes."""
        return (self._attach() if self._core is None else self._core).size()[0]

    @property
    def num_buffers(self) -> int:
        """Number of buffers."""
        return (self._attach() if self._core is None else self._core).size()[1]

    @property
    def pool(self) -> Pool:
        """The pool whose limit and GPU apply. In its statistics, received buffers count as "adopted". Raises ForkError in a worker."""
        self._trainer_core()
        return self._pool

    @property
    def pinned_by(self) -> str | None:
        """What pins the memory: "driver", "kernel" (`mlock`) or None."""
        return self._trainer_core().pages()[0]

    @property
    def is_hugetlb(self) -> bool:
        """True if the memory is in hugetlb pages."""
        return self._trainer_core().pages()[1]

    def close(self) -> None:
        """Closes the shared pool. Received buffers stay usable.

        In workers, `send` then raises TrainerUnavailableError, and so does `get` if no buffer is free. A call in a worker ends only that
        worker's access.
        """
        with _attaching:
            self._is_closed = True
            self._worker = self._worker_pid = None
        if self._core is not None and self._owner_pid == os.getpid():
            self._core.close()

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """File descriptor of the memory, for workers: nothing else may write to it. Raises ClosedError after `close`."""
        if self._is_closed:
            raise ClosedError("the shared pool was closed: create another one")
        return self._descriptor

    def __reduce__(self) -> Any:
        # `multiprocessing` passes the descriptor to the other process.
        return _unpickle, (reduction.DupFd(self.fileno()), self.library)

    def __repr__(self) -> str:
        try:
            text = f"{self.num_buffers} buffers of {self.buffer_bytes} bytes"
            is_worker = self._core is None or self._owner_pid != os.getpid()
            return f"<pinpool.SharedPool of {text}, {'attached' if is_worker else 'pinned by ' + (self.pinned_by or 'nothing')}>"
        except PinpoolError:
            return "<pinpool.SharedPool, closed>"


def _unpickle(duplicate: Any, library: Literal["numpy", "torch"]) -> SharedPool:
    descriptor = duplicate.detach()
    identity = os.fstat(descriptor)[1:3]
    with _attaching:
        attached = _attached.get(identity)
        if attached is not None and attached._owner_pid == os.getpid() and not attached._is_closed:
            os.close(descriptor)
            return attached
        shared = SharedPool.__new__(SharedPool)
        shared._initialize(descriptor, library)
        weakref.finalize(shared, os.close, descriptor)
        _attached[identity] = shared
        return shared


def _keep_freed_memory(nbytes: int) -> None:
    """Makes malloc keep freed memory of about two batches of `nbytes`.

    Otherwise malloc returns the memory to the kernel after each batch, and the kernel clears every page again for the next batch.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # A C library other than glibc.
    mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes + _TRIM_MARGIN_BYTES, (1 << 31) - 1))
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
