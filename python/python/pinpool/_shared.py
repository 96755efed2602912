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
from ._tree import Plan, Views, chosen

__all__ = ["SharedPool"]

# Of mallopt in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The most that it takes for M_MMAP_THRESHOLD.
_MMAP_MOST = 32 << 20
_TRIM_MORE = 16 << 20

# Of this process, by device and inode of the memory file: an object that arrives twice is attached once.
_attached: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()
_attaching = threading.Lock()


class SharedPool:
    """Buffers of one size in pinned memory that processes share: workers fill them, the trainer receives them in place.

    Made in the trainer, which pins the memory once. It goes to workers of `multiprocessing` as any object does (fork, spawn,
    forkserver), as an argument or an attribute of a dataset: they get the memory's descriptor, not its bytes.

    `library` says what `collate` makes, whichever process calls it: tensors ("torch") or arrays ("numpy"). By default it is tensors if
    the process that makes this has imported torch.
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
        library = chosen(library)
        self._pool = Pool(name="shared") if pool is None else pool
        self._slabs = _pinpool.Slabs(self._pool, buffer_bytes, buffers, hugetlb)
        self._begin(self._slabs.fileno(), library)
        trainers.add(self)

    def _begin(self, descriptor, library):
        self._descriptor, self._process, self.library = descriptor, os.getpid(), library
        self._worker, self._worker_process = None, None
        # Its descriptor's number may be another file's by then.
        self._is_closed = self._has_warned = False

    # The worker's side.

    def _attach(self):
        # After a fork the parent's slot is not this process's.
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
        """A free buffer, to be filled with `n` bytes, by default as many as it holds.

        Waits until one is free, at most `timeout` seconds. PeerError once the trainer is gone.
        """
        worker = self._attach()
        return worker.get(worker.buffer_bytes() if n is None else n, timeout)

    def pack(self, batch: Any, *, tag: int = 0, timeout: float | str | None = None) -> Packed:
        """Copies the arrays and tensors of `batch` into one shared buffer and sends it.

        `batch` is any nesting of dicts, lists and tuples; what is no array stays as it is and is pickled. A batch that no buffer holds is
        pickled whole, and the trainer copies it to pinned memory.
        """
        plan = Plan()
        return self._send(plan, plan.visit(batch), tag, timeout)

    def collate(self, samples: list[Any], *, tag: int = 0, timeout: float | str | None = None) -> Packed:
        """Stacks samples into one shared buffer and sends it: the `collate_fn` of a DataLoader.

        With `library="torch"` it is torch's `default_collate`, and makes what that makes; tensors are stacked in the place where the
        trainer gets them. With "numpy", arrays, tensors and numbers of all samples become one array each; dicts, lists and tuples stay;
        what is nothing of these is a list. Types of one kind become the widest of them; ValueError or TypeError for what no type holds
        without loss, such as a number beside None, whole numbers beside others in arrays, or a number that needs more than 64 bits.
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
            raise TypeError("this process is a worker of the shared pool: only the process that made it receives")
        return self._slabs

    def receive(self, ticket: bytes | Packed) -> _pinpool.Buffer:
        """The buffer of `ticket`, as a `pinpool.Buffer`: its bytes are as the worker wrote them, in place.

        Released, or gone with its views, it is free for workers again, behind the streams that were recorded.
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
                "a batch of %d B is longer than a shared buffer: it and others like it are pickled and copied; "
                "buffer_bytes=%d would hold it (now %d)", len(longer), len(longer), self.buffer_bytes
            )
        buf = self._pool.get(len(longer))
        with memoryview(buf) as target:
            target[:] = longer
        return buf

    def next(self, timeout: float | str | None = None) -> tuple[int, _pinpool.Buffer] | None:
        """The tag and the buffer of those that was sent first; needs no ticket. None after `timeout` seconds."""
        return self._trainer().next(timeout)

    def next_of_dead(self) -> tuple[int, _pinpool.Buffer] | None:
        """The next buffer that a worker sent which is dead by now, whose ticket may be lost with it; None if there is none."""
        return self._trainer().next_of_dead()

    def unpack(self, packed: Packed) -> Any:
        """The batch of `pack` or `collate`: arrays and tensors over the worker's bytes, in pinned memory, without a copy.

        The memory goes back to the workers when all of them and their views are gone. After a copy of one that is not waited for, call
        `pinpool.record_stream(array, stream)`.
        """
        return Views(self.receive(packed)).of(packed.tree)

    def batches(self, loader: Iterable[Packed]) -> Batches:
        """The batches of a DataLoader with `collate_fn=shared.collate`, unpacked: `for batch in shared.batches(loader)`, once an epoch.

        At the end of a `for`, also by `break` or an exception, what the loader's workers had still sent comes back; with
        `persistent_workers=True` the next one takes it back. One loader at a time uses a shared pool. Its workers need
        `num_workers * prefetch_factor` buffers, and the program those of the batches that it keeps (one in a plain loop): LimitError, at
        once, where there are fewer.
        """
        return Batches(self, loader)

    def _refuse_too_many_held(self, needed=1):
        """LimitError if the program holds so many buffers that fewer than `needed` are left for the workers."""
        if self.counts()["held"] + needed <= self.buffers:
            return
        held = 0
        for generation in range(3):
            # Batches of a circle of references, of which most are young, and those whose copies are over.
            gc.collect(generation)
            self.maintain()
            held = self.counts()["held"] - self.stats()["copies"]["in_flight"]
            if held + needed <= self.buffers:
                return
        if needed > 0 and held + needed > self.buffers:
            raise LimitError(
                f"{held} of {self.buffers} shared buffers are held by batches that the program keeps, and {needed} are needed for those that "
                f"are read ahead: let batches go (del), keep copies, or make {held + needed} with buffers="
            )

    @contextlib.contextmanager
    def _refusing_waits(self):
        """Meanwhile a worker that waits for a buffer fails at once."""
        trainer, gone = self._trainer(), contextlib.suppress(ReleasedError)
        with gone:
            trainer.refuse_waits(True)
        try:
            yield
        finally:
            with gone:
                trainer.refuse_waits(False)

    def _take_back(self):
        trainer = self._trainer()
        try:
            trainer.recover()
            while (sent := trainer.next_of_dead()) is not None:
                sent[1].release()
        except ReleasedError:
            pass  # It was closed meanwhile.

    def recover(self) -> int:
        """Frees what dead workers were filling; returns how many buffers that were. A worker that waits for one does it too."""
        return self._trainer().recover()

    def counts(self) -> dict[str, int]:
        """How many buffers are free, being filled, sent and not received, and held by the trainer."""
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
    def page_lock(self) -> str:
        """What pins the memory: "register", "mlock" or "none"."""
        return self._trainer().page_lock()

    @property
    def hugetlb(self) -> bool:
        """Whether the memory is in hugetlb pages."""
        return self._trainer().is_hugetlb()

    def stats(self) -> dict[str, Any]:
        """The statistics of the pool, with the names of the crate's JSON: received buffers are `adopted`."""
        return json.loads(self._trainer().stats_json())

    def maintain(self) -> None:
        """Reclaims received buffers whose copies have completed, as the background thread does."""
        self._trainer().maintain()

    def close(self) -> None:
        """Tells the workers that no more is received, and ends the use of this object. What was received stays usable."""
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
        """The descriptor of the memory. ReleasedError once it is closed."""
        if self._is_closed:
            raise ReleasedError("the shared pool was closed: make another one")
        return self._descriptor

    def __reduce__(self):
        # The descriptor goes by the way of the process that is started, else by a server of `multiprocessing`.
        return _arrived, (reduction.DupFd(self.fileno()), self.library)

    def __repr__(self) -> str:
        try:
            text = f"{self.buffers} buffers of {self.buffer_bytes} B"
            return f"<pinpool.SharedPool of {text}, {'attached' if self._slabs is None else 'pinned by ' + self.page_lock}>"
        except PinpoolError:
            return "<pinpool.SharedPool, closed>"


def _arrived(passed, library):
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
    """Lets this process keep the memory of samples that it freed, about two batches of `nbytes`, for the next ones.

    The C library would give it back to the kernel after each batch, and have every page of the next one filled with zeros again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # A C library other than glibc.
    mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes + _TRIM_MORE, (1 << 31) - 1))
    mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)
