"""Buffers in page-locked memory that worker processes fill."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

from . import _arrays, _log, _pinpool
from ._errors import PinpoolError, ReleasedError
from ._pool import Pool

__all__ = ["Packed", "SharedPool"]

#: Each array begins at a multiple of this: a line of the cache, and what copies to a device like.
_ALIGN = 64
_TICKET = struct.Struct("<4sIQQQQ")

# Of this process, by device and inode of the memory file: an object that arrives twice is attached once.
_attached: weakref.WeakValueDictionary[tuple[int, int], SharedPool] = weakref.WeakValueDictionary()
_attaching = threading.Lock()


class _Leaf(NamedTuple):
    """An array within a buffer."""

    offset: int
    shape: tuple[int, ...]
    #: The name of the type; the type itself where its name does not say all, as with fields.
    dtype: Any
    is_torch: bool


class Packed(NamedTuple):
    """A batch that `collate` or `pack` has put into one shared buffer: its ticket, and where each array lies. Small to pickle."""

    ticket: bytes
    tree: Any

    @property
    def tag(self) -> int:
        return _TICKET.unpack(self.ticket)[5]


class SharedPool:
    """Buffers of one size in page-locked memory that processes share: workers fill them, the trainer receives them in place.

    Made in the trainer, which page-locks the memory once. It goes to workers of `multiprocessing` as any object does (fork, spawn,
    forkserver), as an argument or an attribute of a dataset: they get the memory's descriptor, not its bytes.
    """

    def __init__(
        self,
        buffer_bytes: int | str,
        buffers: int,
        *,
        pool: Pool | None = None,
        hugetlb: bool | None = None,
    ) -> None:
        _log.start()
        if buffers < 1:
            raise ValueError(f"buffers={buffers}: 1 or more")
        self._pool = Pool(name="shared") if pool is None else pool
        self._slabs = _pinpool.Slabs(self._pool, buffer_bytes, buffers, hugetlb)
        self._begin(self._slabs.fileno())

    def _begin(self, descriptor):
        self._descriptor, self._process = descriptor, os.getpid()
        self._worker, self._worker_process = None, None
        # Its descriptor's number may be another file's by then.
        self._is_closed = False

    # The worker's side.

    def _attach(self):
        # After a fork the parent's slot is not this process's.
        worker = self._worker
        if worker is None or self._worker_process != os.getpid():
            with _attaching:
                if self._worker is None or self._worker_process != os.getpid():
                    self._worker, self._worker_process = _pinpool.SharedWorker(self.fileno()), os.getpid()
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

        `batch` is any nesting of dicts, lists and tuples; what is no array stays as it is and is pickled.
        """
        return self._pack(_Plan(), batch, tag, timeout)

    def collate(self, samples: list[Any], *, tag: int = 0, timeout: float | str | None = None) -> Packed:
        """Stacks samples into one shared buffer and sends it: the `collate_fn` of a DataLoader.

        As torch's `default_collate`: arrays, tensors and numbers of all samples become one array each, dicts, lists and tuples stay.
        Types of one kind become the widest of them; ValueError or TypeError for what no type holds without loss, such as a number
        beside None, whole numbers beside others in arrays, or a number that needs more than 64 bits.
        """
        return self._pack(_Plan(stacks=True), samples, tag, timeout)

    def _pack(self, plan, batch, tag, timeout):
        import numpy as np

        tree = plan.stack(batch) if plan.stacks else plan.visit(batch)
        buf = self.get(plan.nbytes, timeout=timeout)
        if plan.nbytes:
            whole = np.frombuffer(buf, np.uint8)
            plan.fill(whole)
            del whole
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
        return self._trainer().receive(ticket.ticket if isinstance(ticket, Packed) else ticket)

    def next(self, timeout: float | str | None = None) -> tuple[int, _pinpool.Buffer] | None:
        """The tag and the buffer of those that was sent first; needs no ticket. None after `timeout` seconds."""
        return self._trainer().next(timeout)

    def next_of_dead(self) -> tuple[int, _pinpool.Buffer] | None:
        """The next buffer that a worker sent which is dead by now, whose ticket may be lost with it; None if there is none."""
        return self._trainer().next_of_dead()

    def unpack(self, packed: Packed) -> Any:
        """The batch of `pack` or `collate`: arrays and tensors over the worker's bytes, in page-locked memory, without a copy.

        The memory goes back to the workers when all of them and their views are gone. Before a copy of one that is not waited for:
        `pinpool.record_stream(array, stream)`.
        """
        buf = self.receive(packed)
        return _unpacked(packed.tree, buf)

    def batches(self, loader: Iterable[Packed]) -> Iterator[Any]:
        """Each batch of a DataLoader with `collate_fn=shared.collate`, unpacked.

        At the end, also by `break` or an exception, what the loader's workers had still sent comes back, once these have ended: with
        `persistent_workers=True` after they have. One loader at a time uses a shared pool.
        """
        iterator = iter(loader)
        try:
            for packed in iterator:
                yield self.unpack(packed)
        finally:
            # Ends the workers of torch's loader, whose iterator an exception's traceback may keep.
            if not getattr(iterator, "_persistent_workers", False):
                getattr(iterator, "_shutdown_workers", lambda: None)()
            del iterator
            self._take_back()

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
        """What page-locks the memory: "register", "mlock" or "none"."""
        return self._trainer().page_lock()

    @property
    def hugetlb(self) -> bool:
        """Whether the memory is in hugetlb pages."""
        return self._trainer().is_hugetlb()

    def stats(self) -> dict[str, Any]:
        """The statistics of the pool, with the names of the crate's JSON: received buffers are `adopted`."""
        return json.loads(self._trainer().stats_json())

    def poll(self) -> None:
        """Puts back the received buffers whose copies are over; the maintenance thread does it too."""
        self._trainer().poll()

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
        return _arrived, (reduction.DupFd(self.fileno()),)

    def __repr__(self) -> str:
        try:
            text = f"{self.buffers} buffers of {self.buffer_bytes} B"
            return f"<pinpool.SharedPool of {text}, {'attached' if self._slabs is None else 'page-locked by ' + self.page_lock}>"
        except PinpoolError:
            return "<pinpool.SharedPool, closed>"


def _arrived(passed):
    descriptor = passed.detach()
    status = os.fstat(descriptor)
    identity = (status.st_dev, status.st_ino)
    known = _attached.get(identity)
    if known is not None and known._process == os.getpid() and not known._is_closed:
        os.close(descriptor)
        return known
    pool = SharedPool.__new__(SharedPool)
    pool._pool = pool._slabs = None
    pool._begin(descriptor)
    weakref.finalize(pool, os.close, descriptor)
    _attached[identity] = pool
    return pool


class _Plan:
    """Where the arrays of a batch go within a buffer."""

    def __init__(self, stacks=False):
        self.stacks, self.nbytes, self._copies = stacks, 0, []

    def _leaf(self, shape, dtype, is_torch, sources, is_stacked):
        import numpy as np

        _refuse_objects(dtype)
        offset = -(-self.nbytes // _ALIGN) * _ALIGN
        self.nbytes = offset + math.prod(shape) * dtype.itemsize
        self._copies.append((offset, shape, dtype, sources, is_stacked))
        return _Leaf(offset, shape, dtype.str if np.dtype(dtype.str) == dtype else dtype, is_torch)

    def visit(self, value):
        array, is_torch = _as_array(value)
        if array is not None:
            return self._leaf(array.shape, array.dtype, is_torch, array, False)
        return _mapped(value, lambda items: [self.visit(item) for item in items])

    def stack(self, samples):
        if not samples:
            raise ValueError("no samples to stack: a batch has one or more")
        first = samples[0]
        array, is_torch = _as_array(first)
        if array is not None:
            arrays = [_as_array(sample)[0] for sample in samples]
            shapes = {None if array is None else array.shape for array in arrays}
            if len(shapes) > 1:
                raise ValueError(f"samples of shapes {sorted(map(str, shapes))} cannot be stacked: make them equal, or use `pack`")
            return self._leaf((len(samples), *array.shape), _common_type(arrays), is_torch, arrays, True)
        if isinstance(first, (bool, int, float)):
            array = _numbers(samples)
            is_torch = "torch" in sys.modules
            return self._leaf(array.shape, array.dtype, is_torch, array, False)
        if isinstance(first, dict):
            return {key: self.stack([sample[key] for sample in samples]) for key in first}
        if isinstance(first, (list, tuple)):
            if len({len(sample) for sample in samples}) > 1:
                raise ValueError("samples of different numbers of elements cannot be stacked: make them equal, or use `pack`")
            return _like(first, [self.stack(list(column)) for column in zip(*samples, strict=True)])
        return list(samples)

    def fill(self, whole):
        import numpy as np

        for offset, shape, dtype, sources, is_stacked in self._copies:
            target = np.ndarray(shape, dtype, whole, offset)
            if is_stacked:
                np.stack(sources, out=target, casting="safe")
            else:
                np.copyto(target, sources)
        self._copies.clear()


def _refuse_objects(dtype):
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype}, which holds addresses of objects, cannot lie in memory that processes share")


def _common_type(arrays):
    """The type that holds the elements of all `arrays` without loss."""
    import numpy as np

    types = list(dict.fromkeys(array.dtype for array in arrays))
    if len(types) == 1:
        return types[0]
    if len({dtype.kind for dtype in types}) > 1 or types[0].kind not in "iufcSU":
        named = ", ".join(map(str, types))
        raise ValueError(f"samples of the types {named} cannot be stacked without loss: convert them to one, or use `pack`")
    return np.result_type(*types)


def _numbers(samples):
    """Python's numbers as an array; TypeError or ValueError for what an array of numbers does not hold as it is."""
    import numpy as np

    numbers = [sample.item() if isinstance(sample, (np.bool_, np.number)) else sample for sample in samples]
    for number in numbers:
        if not isinstance(number, (bool, int, float)):
            raise TypeError(f"{type(numbers[0]).__name__} and {type(number).__name__} cannot be stacked: make them equal, or use `pack`")
    try:
        array = np.array(numbers)
    except OverflowError:
        array = None
    # NumPy takes floats for whole numbers that fit into neither int64 nor uint64.
    is_exact = array is not None and not array.dtype.hasobject
    is_exact = is_exact and (array.dtype.kind != "f" or any(isinstance(number, float) for number in numbers))
    if is_exact and all(not isinstance(number, int) or number == got for number, got in zip(numbers, array.tolist(), strict=True)):
        return array
    raise ValueError(f"the whole numbers from {min(numbers)} to {max(numbers)} have no common type of 64 bits: pass them as str")


def _as_array(value):
    """`value` as an array of NumPy, and whether it is a tensor of torch; None if it is neither."""
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise TypeError("a tensor of bfloat16 has no type of NumPy: pass tensor.view(torch.int16), and view it back")
        return value.detach().cpu().contiguous().numpy(), True
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return np.asarray(value), False
    return None, False


def _like(sequence, items):
    if isinstance(sequence, tuple):
        return type(sequence)(*items) if hasattr(sequence, "_fields") else tuple(items)
    return items


def _mapped(value, visit):
    if isinstance(value, dict):
        return dict(zip(value, visit(value.values()), strict=True))
    if isinstance(value, (list, tuple)) and not isinstance(value, _Leaf):
        return _like(value, visit(value))
    return value


class _Views:
    """Arrays over one buffer. No function that calls itself by a closure: such a circle would keep the memory until the next collection."""

    def __init__(self, buf):
        import numpy as np

        self._buf, self._tensor = buf, None
        self._array = np.frombuffer(buf, np.uint8) if len(buf) else np.empty(0, np.uint8)

    def of(self, value):
        if not isinstance(value, _Leaf):
            return _mapped(value, lambda items: [self.of(item) for item in items])
        import numpy as np

        dtype = np.dtype(value.dtype)
        _refuse_objects(dtype)
        view = np.ndarray(value.shape, dtype, self._array, value.offset)
        if not value.is_torch:
            return view
        import torch

        if view.nbytes == 0:
            return torch.from_numpy(np.empty(value.shape, view.dtype))
        if self._tensor is None:
            # torch keeps the object it is given and gives the view back: so it is given a view.
            self._tensor = torch.frombuffer(memoryview(self._buf), dtype=torch.uint8)
            _arrays._buffers[self._buf.ptr] = self._buf
        dtype = torch.from_numpy(np.empty(0, view.dtype)).dtype
        return self._tensor[value.offset : value.offset + view.nbytes].view(dtype).reshape(value.shape)


def _unpacked(tree, buf):
    return _Views(buf).of(tree)
