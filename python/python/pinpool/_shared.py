"""Buffers in pinned memory that worker processes fill."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any, Literal

from . import _log, _pinpool
from ._arguments import count
from ._errors import LimitError, PinpoolError, ReleasedError
from ._packed import Batches, Packed, trainers
from ._pool import Pool
from ._tree import Plan, Views, choose_library

__all__ = ["SharedPool"]

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The largest value of M_MMAP_THRESHOLD.
_MMAP_MOST = 32 << 20
_TRIM_MORE = 16 << 20

# Shared pools attached in this process, by device and inode of the memory file: a pool that arrives twice is attached once.
_attached: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()
_attaching = threading.Lock()


class SharedPool:
    """Buffers of one size in pinned memory that processes share: workers fill them, the trainer receives them in place.

    Create it in the trainer, which pins the memory once. It is passed to `multiprocessing` workers like any object (fork, spawn,
    forkserver), as an argument or an attribute of a dataset: workers receive the memory's descriptor, not its bytes.

    `library` selects what `collate` creates in every process: tensors ("torch") or arrays ("numpy"). The default is tensors if the
    process that creates the pool has imported torch.
    """

    def __init__(
        self,
        buffer_bytes: int | str,
        buffers: int,
        *,
        pool: Pool | None = None,
        hugetlb: bool | None = None,
        library: Literal["numpy", "torch"] | None = None,
    ) -> None:
        _log.start()
        buffers = count("buffers", buffers, 1)
        library = choose_library(library)
        self._pool = Pool(name="shared") if pool is None else pool
        self._slabs = _pinpool.Slabs(self._pool, buffer_bytes, buffers, hugetlb)
        self._begin(self._slabs.fileno(), library)
        trainers.add(self)

    def _begin(self, descriptor, library):
        self._descriptor, self._process, self.library = descriptor, os.getpid(), library
        self._worker, self._worker_process = None, None
        # After `close` the number of the descriptor may belong to another file.
        self._is_closed = self._has_warned = False

    # The worker's side.

    def _attach(self):
        # After a fork the slot belongs to the parent.
        worker = self._worker
        if worker is None or self._worker_process != os.getpid():
            with _attaching:
                if self._worker is None or self._worker_process != os.getpid():
                    self._worker, self._worker_process = _pinpool.SharedWorker(self.fileno()), os.getpid()
                    if self._slabs is None or self._process != os.getpid():
                        _keep_freed_memory(self._worker.buffer_bytes())
                worker = self._worker
        return worker

    def get(self, n: int | str | None = None, *, timeout: float | str | None = None) -> _pinpool.SharedBuffer:
        """A free buffer to fill with `n` bytes (default: its full length).

        Waits until one is free, at most `timeout` seconds. Raises PeerError once the trainer has ended.
        """
        worker = self._attach()
        return worker.get(worker.buffer_bytes() if n is None else n, timeout)

    def pack(self, batch: Any, *, tag: int = 0, timeout: float | str | None = None) -> Packed:
        """Copies the arrays and tensors of `batch` into one shared buffer and sends it.

        `batch` is any nesting of dicts, lists and tuples; values other than arrays are pickled. A batch that is too long for a buffer
        is pickled whole, and the trainer copies it to pinned memory.
        """
        plan = Plan()
        return self._send(plan, plan.visit(batch), tag, timeout)

    def collate(self, samples: list[Any], *, tag: int = 0, timeout: float | str | None = None) -> Packed:
        """Stacks samples into one shared buffer and sends it: the `collate_fn` of a DataLoader.

        With `library="torch"` the result equals that of torch's `default_collate`; tensors are stacked directly in shared memory. With
        "numpy", arrays, tensors and numbers of all samples become one array each, dicts, lists and tuples are kept, and anything else
        becomes a list. Types of one kind become the widest of them. Raises ValueError or TypeError if no type represents all values
        without loss, such as numbers mixed with None, integers mixed with floats in arrays, or numbers of more than 64 bits.
        """
        plan = Plan()
        return self._send(plan, plan.collate(samples, self.library), tag, timeout)

    def _send(self, plan, tree, tag, timeout):
        if plan.nbytes > self.buffer_bytes:
            longer = bytearray(plan.nbytes)
            plan.fill(longer)
            return Packed(b"", tree, longer)
        buf = self.get(plan.nbytes, timeout=timeout)
        plan.fill(buf)
        return Packed(buf.send(tag), tree)

    # The trainer's side.

    def _trainer(self):
        if self._slabs is None:
            raise TypeError("this process is a worker of the shared pool: only the process that created it can receive buffers")
        return self._slabs

    def receive(self, ticket: bytes | Packed) -> _pinpool.Buffer:
        """The buffer of `ticket` as a `pinpool.Buffer`, with the worker's bytes in place.

        Once it is released, or dropped with its views, workers may use it again after the work on the recorded streams.
        """
        trainer = self._trainer()
        if not isinstance(ticket, Packed):
            return trainer.receive(ticket)
        if ticket.longer is not None:
            return self._copied(ticket.longer)
        ticket.is_received = True
        return trainer.receive(ticket.ticket)

    def _copied(self, longer):
        if not self._has_warned:
            self._has_warned = True
            _log.logger.warning(
                "pool[%s] long_batch: a batch is longer than a shared buffer, so it is pickled and copied; set buffer_bytes=%d (now %d)",
                self._pool.name or "shared", len(longer), self.buffer_bytes,
            )  # fmt: skip
        buf = self._pool.get(len(longer))
        with memoryview(buf) as target:
            target[:] = longer
        return buf

    def next(self, timeout: float | str | None = None) -> tuple[int, _pinpool.Buffer] | None:
        """The tag and buffer that were sent first, without a ticket. None after `timeout` seconds."""
        return self._trainer().next(timeout)

    def next_of_dead(self) -> tuple[int, _pinpool.Buffer] | None:
        """The next buffer sent by a worker that has died, whose ticket may be lost. None if there is none."""
        return self._trainer().next_of_dead()

    def unpack(self, packed: Packed) -> Any:
        """The batch of `pack` or `collate`: arrays and tensors over the worker's bytes, in pinned memory, without a copy.

        Workers may reuse the memory when all arrays and their views are gone. After an asynchronous copy, call
        `pinpool.record_stream(array, stream)`.
        """
        return Views(self.receive(packed)).of(packed.tree)

    def batches(self, loader: Iterable[Packed]) -> Batches:
        """The batches of a DataLoader with `collate_fn=shared.collate`, unpacked: `for batch in shared.batches(loader)`, once an epoch.

        At the end of a `for`, including `break` and exceptions, buffers that workers have sent become free; with
        `persistent_workers=True` the next `for` frees them. Only one loader at a time may use a shared pool. The workers need
        `num_workers * prefetch_factor` buffers, and the program one for each batch that it keeps (a plain loop: two, while it takes the
        next). If there are fewer, it raises LimitError immediately.
        """
        return Batches(self, loader)

    def _refuse_too_many_held(self, needed=1):
        """LimitError if the program holds so many buffers that fewer than `needed` are left for the workers."""
        if self.counts()["held"] + needed <= self.buffers:
            return
        held = 0
        for generation in range(3):
            # Frees batches in reference cycles, most of which are young, and batches with completed copies.
            gc.collect(generation)
            self.maintain()
            held = self.counts()["held"] - self.stats()["copies"]["in_flight"]
            if held + needed <= self.buffers:
                return
        if needed > 0 and held + needed > self.buffers:
            raise LimitError(
                f"{held} of {self.buffers} shared buffers belong to batches that the program keeps, and {needed} are needed to read ahead: "
                f"drop batches (del), keep copies, or set buffers={held + needed}"
            )

    @contextlib.contextmanager
    def _refusing_waits(self):
        """Within the context, workers that wait for a buffer fail immediately."""
        trainer, gone = self._trainer(), contextlib.suppress(ReleasedError)
        with gone:
            trainer.refuse_waits(True)
        try:
            yield
        finally:
            with gone:
                trainer.refuse_waits(False)

    def _reclaim(self):
        trainer = self._trainer()
        try:
            trainer.recover()
            while (sent := trainer.next_of_dead()) is not None:
                sent[1].release()
        except ReleasedError:
            pass  # Closed by another thread.

    def recover(self) -> int:
        """Frees the buffers that dead workers were filling, and returns their number. Waiting workers do it too."""
        return self._trainer().recover()

    def counts(self) -> dict[str, int]:
        """Numbers of buffers that are free, being filled, sent but not received, and held by the trainer."""
        return dict(zip(("free", "filling", "sent", "held"), self._trainer().counts(), strict=True))

    @property
    def workers(self) -> int:
        """Number of workers that are attached and alive."""
        return self._trainer().workers()

    @property
    def buffer_bytes(self) -> int:
        return self._attach().buffer_bytes() if self._slabs is None else self._slabs.buffer_bytes()

    @property
    def buffers(self) -> int:
        return self._attach().buffers() if self._slabs is None else self._slabs.buffers()

    @property
    def pinned_by(self) -> str:
        """How the memory is pinned: "register", "mlock" or "none"."""
        return self._trainer().pinned_by()

    @property
    def hugetlb(self) -> bool:
        """Whether the memory is in hugetlb pages."""
        return self._trainer().is_hugetlb()

    def stats(self) -> dict[str, Any]:
        """The statistics of the pool; received buffers count as `adopted`."""
        return json.loads(self._trainer().stats_json())

    def maintain(self) -> None:
        """Reclaims received buffers whose copies have completed, as the background thread does."""
        self._trainer().maintain()

    def close(self) -> None:
        """Tells the workers that nothing more is received, and closes this object. Received buffers stay usable."""
        with _attaching:
            self._is_closed = True
            self._worker = self._worker_process = None
        if self._slabs is not None and self._process == os.getpid():
            self._slabs.close()

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor of the memory. Raises ReleasedError after `close`."""
        if self._is_closed:
            raise ReleasedError("the shared pool was closed: make another one")
        return self._descriptor

    def __reduce__(self):
        # `multiprocessing` passes the descriptor: to a process that it starts, or through its resource sharer.
        return _unpickle, (reduction.DupFd(self.fileno()), self.library)

    def __repr__(self) -> str:
        try:
            text = f"{self.buffers} buffers of {self.buffer_bytes} B"
            return f"<pinpool.SharedPool of {text}, {'attached' if self._slabs is None else 'pinned by ' + self.pinned_by}>"
        except PinpoolError:
            return "<pinpool.SharedPool, closed>"


def _unpickle(passed, library):
    descriptor = passed.detach()
    status = os.fstat(descriptor)
    identity = (status.st_dev, status.st_ino)
    known = _attached.get(identity)
    if known is not None and known._process == os.getpid() and not known._is_closed:
        os.close(descriptor)
        return known
    pool = SharedPool.__new__(SharedPool)
    pool._pool = pool._slabs = None
    pool._begin(descriptor, library)
    weakref.finalize(pool, os.close, descriptor)
    _attached[identity] = pool
    return pool


def _keep_freed_memory(nbytes: int) -> None:
    """Makes the C library keep about two batches of `nbytes` of freed memory.

    Otherwise it would return the memory to the kernel after each batch, which then clears every page for the next one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # A C library other than glibc.
    mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes + _TRIM_MORE, (1 << 31) - 1))
    mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)
