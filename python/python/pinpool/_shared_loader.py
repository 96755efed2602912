"""A loader with worker processes that fill shared buffers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple

from ._arguments import count, switch
from ._errors import PeerError, ReleasedError, WorkerError
from ._pool import Pool
from ._shared import SharedPool
from ._tree import Plan, Views, chosen
from ._worker import WorkerInfo, begin, read, seed_generators

__all__ = ["SharedLoader"]


#: Workers that may die while they read one batch.
_DEATHS = 3
#: Seconds between two looks of an idle worker at whether its trainer lives.
_LOOK = 1.0


class _Begun(NamedTuple):
    """What a worker sends before it reads a batch."""


class _Failed(NamedTuple):
    """What a worker sends instead of a batch."""

    error: Exception
    text: str


def _work(shared, info, epoch, init, has_torch, collate, connection, others, timeout):
    """The worker's process: numbers of samples in, tickets out."""
    for other in others:
        other.close()
    if has_torch:
        import torch

        # Threads of the trainer's are not there after a fork, and workers share its cores.
        torch.set_num_threads(1)
    parent, dataset = os.getppid(), info.dataset
    begin(info)
    try:
        if init is not None:
            seed_generators(info.seed, epoch, -1 - info.id)
            try:
                init(info.id)
            except Exception as error:
                connection.send((None, _Failed(_portable(error), traceback.format_exc())))
                return
        while (task := _task(connection, parent)) is not None:
            batch, indices = task
            connection.send((batch, _Begun()))
            try:
                # By the batch, so that it has the same numbers whichever worker reads it, again after a death too.
                samples = read(dataset, indices, info.seed, epoch, batch)
                packed = _packed(shared, collate, samples, batch, timeout)
                message = ForkingPickler.dumps((batch, packed))
            except PeerError:
                return
            except Exception as error:
                message = ForkingPickler.dumps((batch, _Failed(_portable(error), traceback.format_exc())))
            connection.send_bytes(message)
    except (EOFError, OSError, KeyboardInterrupt):
        pass


def _packed(shared, collate, samples, number, timeout):
    if collate is None:
        return shared.collate(samples, tag=number, timeout=timeout)
    return shared.pack(collate(samples), tag=number, timeout=timeout)


def _task(connection, parent):
    """The next batch to read; None at the end, and once the trainer is gone."""
    # Other children of the trainer may have its end of the connection: then a trainer that was killed leaves it open.
    while not connection.poll(_LOOK):
        trainer = multiprocessing.parent_process()
        if os.getppid() != parent or trainer is not None and not trainer.is_alive():
            return None
    return connection.recv()


def _failed(what, failed):
    error = failed.error
    return WorkerError(f"{what}: {type(error).__name__}: {error}\n\nIn the worker:\n{failed.text}")


def _portable(error):
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Reading:
    """The iterator of one `for`; ended, it says so."""

    def __init__(self, batches):
        self._batches, self._is_ended = batches, False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_ended:
            raise ReleasedError(
                "this iterator of the SharedLoader was ended, by a later one or by close(): a loader reads one at a time; make two loaders"
            )
        return next(self._batches)

    def end(self):
        # One that is exhausted stays so.
        self._is_ended = self._batches.gi_frame is not None
        self._batches.close()

    close = end


class _Worker:
    def __init__(self, loader, at, others):
        context = loader._context
        self.connection, child = context.Pipe()
        # A child of fork has the ends of those that were started before.
        inherited = [other.connection for other in others] + [self.connection] if context.get_start_method() == "fork" else []
        info = WorkerInfo(at, loader.num_workers, loader.seed, loader.dataset)
        has_torch = "torch" in sys.modules
        arguments = (loader.shared, info, loader.epoch, loader.worker_init_fn, has_torch, loader.collate, child, inherited, loader.timeout)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        child.close()
        self.pending: list[int] = []
        self.begun: int | None = None

    def end(self):
        try:
            self.connection.send(None)
        except OSError:
            pass
        self.connection.close()


class SharedLoader:
    """Batches of a dataset, read by worker processes, in page-locked memory that they fill themselves.

    As torch's DataLoader with `num_workers`: `dataset[i]` gives a sample, and samples are stacked as by `SharedPool.collate`. The
    batches come in order, as arrays of NumPy or tensors of torch over shared memory: no byte is pickled, and none is copied in this process.
    It needs no torch; torch's own DataLoader with `SharedPool.collate` has samplers and datasets of every kind, and stops when a worker dies.
    With `num_workers=0` there are no workers. A worker that dies is replaced and its batches are read again (`on_death="replace"`), or
    raises WorkerError; either way its buffers come back. A batch with which three workers died raises WorkerError too. One iterator at a
    time reads with workers: a second one ends the first, whose next batch is a ReleasedError. `collate_fn` gives the batch of a list of
    samples, which `SharedPool.pack` takes. LimitError where the program keeps so many batches that no buffer is left for the next one.

    In a worker the generators of `random`, NumPy and torch are seeded for each batch, from `seed`, the number of the epoch and that of the
    batch: no two batches have the same numbers, and a batch has the same ones again under the same seed, whichever worker reads it. `epoch`
    is the number of the next epoch, and may be set. Without
    workers the trainer's generators are used as they are. `worker_init_fn(id)` runs first in each worker; `pinpool.get_worker_info()` says
    which one it is.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        drop_last: bool = False,
        batch_sampler: Sequence[Sequence[int]] | None = None,
        buffer_bytes: int | str | None = None,
        buffers: int | None = None,
        prefetch_factor: int = 2,
        on_death: Literal["raise", "replace"] = "raise",
        timeout: float = 60.0,
        pool: Pool | None = None,
        hugetlb: bool | None = None,
        library: Literal["numpy", "torch"] | None = None,
        context: str | None = None,
    ) -> None:
        batch_size, prefetch_factor = count("batch_size", batch_size, 1), count("prefetch_factor", prefetch_factor, 1)
        num_workers = count("num_workers", num_workers, 0)
        shuffle, drop_last = switch("shuffle", shuffle), switch("drop_last", drop_last)
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout >= 0:
            raise ValueError(f"timeout={timeout!r}: 0 or more seconds")
        if on_death not in ("raise", "replace"):
            raise ValueError(f"on_death={on_death!r}: 'raise' or 'replace'")
        if isinstance(batch_sampler, Iterator):
            raise TypeError(
                f"batch_sampler={batch_sampler!r}: an iterator gives its batches once; pass list(...) of it, or an object that gives "
                "an iterator for each epoch"
            )
        self.dataset, self.batch_size, self.collate = dataset, batch_size, collate_fn
        self.worker_init_fn = worker_init_fn
        self.shuffle, self.seed, self.drop_last, self.batch_sampler = shuffle, seed, drop_last, batch_sampler
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.on_death, self.timeout = on_death, timeout
        self.epoch, self.replaced = 0, 0
        self._reading: Callable[[], _Reading | None] = lambda: None
        self._context: Any = multiprocessing.get_context(context)
        library = chosen(library)
        if buffer_bytes is None:
            buffer_bytes = self._measured(library)
        # Those that are read ahead, one in each worker's hands, and three for the user.
        if buffers is None:
            buffers = max(num_workers, 1) * (prefetch_factor + 1) + 3
        buffers = count("buffers", buffers, 1)
        #: The buffers, a `pinpool.SharedPool`.
        self.shared = SharedPool(buffer_bytes, buffers, pool=pool, hugetlb=hugetlb, library=library)

    def _measured(self, library):
        """Bytes of the first batch: samples of other lengths need `buffer_bytes`."""
        indices = next(iter(self._batches()), [])
        samples = [self.dataset[index] for index in indices]
        plan = Plan()
        if samples and self.collate is None:
            plan.collate(samples, library)
        elif samples:
            plan.visit(self.collate(samples))
        return max(plan.nbytes, 1)

    def _batches(self):
        if self.batch_sampler is not None:
            batches = [list(batch) for batch in self.batch_sampler]
            if [] in batches:
                raise ValueError(f"batch_sampler: batch {batches.index([])} has no samples")
            return batches
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        return batches[:-1] if self.drop_last and batches and len(batches[-1]) < self.batch_size else batches

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        self.epoch += 1
        if self.num_workers == 0:
            return self._alone(batches)
        # Two would take each other's buffers when a worker dies.
        self._end_reading()
        reading = _Reading(self._by_workers(batches))
        self._reading = weakref.ref(reading)
        return reading

    def _end_reading(self):
        reading = self._reading()
        if reading is not None:
            reading.end()

    def _alone(self, batches):
        for number, indices in enumerate(batches):
            samples = [self.dataset[index] for index in indices]
            self.shared._refuse_too_many_held()
            packed = _packed(self.shared, self.collate, samples, number, self.timeout)
            del samples
            yield self.shared.unpack(packed)

    def _by_workers(self, batches):
        workers: list[Any] = []
        arrived: dict[int, Any] = {}
        # Buffers of dead workers whose messages are still to be read, by the number of the batch.
        early: dict[int, Any] = {}
        # How many workers died while they read a batch, by its number, and since the last message of any, under None.
        deaths: Counter[int | None] = Counter()
        try:
            for at in range(min(self.num_workers, max(len(batches), 1))):
                workers.append(_Worker(self, at, workers))
            given = 0
            for number in range(len(batches)):
                # As many are on their way as fit into the buffers beside those that the user has.
                while given < len(batches) and given < number + len(workers) * self.prefetch_factor:
                    self._give(workers, given % len(workers), [given], batches)
                    given += 1
                while number not in arrived:
                    self._collect(workers, arrived, early, deaths, batches)
                packed = arrived.pop(number)
                if isinstance(packed, _Failed):
                    raise _failed(f"batch {number}", packed) from packed.error
                tree, buf = packed
                yield Views(buf).of(tree)
                del packed, buf
        finally:
            self._end(workers, arrived, early)

    def _give(self, workers, at, numbers, batches):
        worker = workers[at]
        worker.pending.extend(numbers)
        try:
            for number in numbers:
                worker.connection.send((number, batches[number]))
        except OSError:
            pass  # It is dead, which is seen when its messages are read.

    def _collect(self, workers, arrived, early, deaths, batches):
        by_connection = {worker.connection: at for at, worker in enumerate(workers)}
        ready = wait(list(by_connection), 0)
        if not ready:
            self.shared._refuse_too_many_held()
        for connection in ready or wait(list(by_connection)):
            at = by_connection[connection]
            try:
                number, packed = connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                self._replace(workers, at, early, deaths, batches)
                continue
            if number is None:
                raise _failed(f"worker_init_fn in worker {at}", packed)
            deaths.pop(None, None)
            if isinstance(packed, _Begun):
                workers[at].begun = number
                continue
            workers[at].begun = None
            workers[at].pending.remove(number)
            # Received at once: what is only sent is taken back if its worker dies.
            if not isinstance(packed, _Failed):
                packed = packed.tree, early.pop(number) if number in early else self.shared.receive(packed)
            arrived[number] = packed

    def _replace(self, workers, at, early, deaths, batches):
        """Worker `at` has closed its connection: all of its messages were read."""
        worker = workers[at]
        worker.connection.close()
        worker.process.join(self.timeout)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        status, number, lost = worker.process.exitcode, worker.process.pid, worker.pending
        worker.process.close()
        workers[at] = None
        self._take_back(early)
        # Sent without a message that arrived: they are read again.
        for batch in lost:
            early.pop(batch, None)
        ended = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        if self.on_death == "raise":
            raise WorkerError(
                f"worker {at} (process {number}) {ended} with batches {lost} not read; its buffers are free again. "
                'on_death="replace" goes on with another worker'
            )
        begun = worker.begun
        deaths[begun] += 1
        if begun is None and deaths[None] > _DEATHS * len(workers):
            raise WorkerError(f"worker {at} (process {number}) {ended} before it read a batch, as {deaths[None] - 1} others before it")
        if begun is not None and deaths[begun] == _DEATHS:
            raise WorkerError(
                f"worker {at} (process {number}) {ended} while it read batch {begun} of the samples {_some(batches[begun])}, as "
                f"{_DEATHS - 1} others did: leave out the sample that ends the process"
            )
        self.replaced += 1
        workers[at] = _Worker(self, at, [other for other in workers if other is not None])
        self._give(workers, at, lost, batches)

    def _take_back(self, early):
        """What dead workers were filling is free; what they sent is received."""
        self.shared.recover()
        while (sent := self.shared.next_of_dead()) is not None:
            early[sent[0]] = sent[1]

    def _end(self, workers, arrived, early):
        living = [worker for worker in workers if worker is not None]
        for worker in living:
            worker.end()
        for worker in living:
            worker.process.join(1)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(1)
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.process.close()
        arrived.clear()
        self._take_back(early)
        early.clear()

    def close(self) -> None:
        """Ends the workers and frees the buffers; batches that were handed out stay usable."""
        self._end_reading()
        self.shared.close()

    def __enter__(self) -> SharedLoader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _some(numbers):
    """At most eight of `numbers`, as text."""
    return f"[{', '.join(map(repr, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"
