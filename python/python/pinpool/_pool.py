"""The class `Pool`."""

from __future__ import annotations

import inspect
import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Self, SupportsIndex, Unpack, final, overload

from . import _arrays, _asyncio, _log, _pinpool
from ._diagnosis import Diagnosis

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ._arrays import _Order, _Shape
    from ._settings import PoolSettings, Size, Time

#: References to the pools of this process, in the order of their creation.
_pools: dict[weakref.ref[Pool], None] = {}


def _signature() -> inspect.Signature:
    """Returns the signature with all settings, for `help` and notebooks."""
    names = {"name": None, "env": True} | dict.fromkeys(_pinpool.PoolCore._setting_names())
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in names.items()])


@final
class Pool(_pinpool.PoolCore):
    """A pool of pinned host memory.

        pool = pinpool.Pool(max_bytes="2GiB", name="loader")
        with pool.get(4096) as buf:
            np.asarray(buf)[:] = 7

    Threads may share a pool. A pool belongs to one process. In a forked child, requests and the calls `reserve` and
    `set_max_bytes` of a pool that has started raise ForkError, and all its statistics are 0: create another pool there.

    The thread that drops the last `Pool` object or buffer of a pool waits until no copy is in flight. After 30 s, it stops as soon
    as one second passes without a completed copy. The memory of the remaining copies is never freed.

    A setting that is omitted or None takes its value from its variable (`PINPOOL_` and the name in upper case), or else its
    default. Sizes are bytes or text such as "64MiB". Times are seconds, a timedelta, or text such as "500ms"; "none" or
    `float("inf")` means no limit.

    Args:
        name: name of the pool in log lines and reports.
        env: whether environment variables supply the settings that are omitted.
        max_bytes: limit on all bytes held: a size, "none" or "auto". The limit "auto" is a quarter of the memory of the cgroup or
            machine, at most what is free, divided by `LOCAL_WORLD_SIZE`; all "auto" pools of the process share it. The default is
            "auto", or "none" under "tensorflow".
        reserve: bytes pinned at the start and kept.
        max_idle_bytes: maximum number of bytes in idle buffers and free memory.
        ledger: name of a limit, such as the job's ID, that all processes of this user and host with the same name share. With
            "auto" all torchrun ranks (not with LOCAL_WORLD_SIZE=1) and Ray processes share one limit, across jobs.
        wait: the default `timeout` of `get`, `aget` and `empty`: how long a request waits when the pool is full (default 30 s; 100 ms
            with `on_full="pageable"`, 0 under "tensorflow").
        on_full: after the wait, "error" (the default) or "pageable" (unpinned memory, at most `max_bytes` of it).
        reserve_wait: whether the constructor waits until the whole reserve is pinned (default True).
        backend: source of memory: "auto", "gpu", "vmm", "register", "cuda", "mlock", or "heap" (unpinned, for tests).
        device: GPU that copies use: a number, "cuda:1" or a torch.device. "cuda" counts as omitted. The default is the GPU that
            the process uses when the pool starts, or else the GPU of the local rank if a launcher has set LOCAL_RANK, or else 0.
            Call `torch.cuda.set_device` first, because the pool usually starts in the constructor. With backend "auto", a pool without
            a reserve, a trace, a shared limit or a `numa_node` starts at its first use, unless CUDA has already started.
        numa_node: NUMA node to pin on; the default "auto" is the node of the GPU.
        idle_timeout: how long free memory stays pinned (default 60 s), after its buffers have been idle for up to 10 s. With the
            backends "register" and "cuda", and with the preset "tensorflow", time alone releases nothing.
        trace: path of a recording for the command `pinpool`.
        socket: path of a Unix socket that serves statistics, or 1 for a default path.
        preset: policy: "adaptive" (the default), or "tensorflow" (reproduces TensorFlow's PoolAllocator).
        pool_size_limit: initial maximum number of idle buffers (default 100).
        auto_resize: whether this maximum grows while evictions and misses are frequent (default True).
        rounding: size classes: "eighths" ("adaptive"), "pow2" or "exact" ("tensorflow").
        log_every: one in this many checks of the limit on idle buffers is logged (default 10).
        hugetlb: huge pages set aside by the administrator: "off" (the default), "auto", "2MiB" or "1GiB".
        growth: whether the pool may pin more than its reserve (default True).
        zero: whether buffers are zeroed before reuse (default False).
        maintenance_thread: whether a thread detects completed copies and releases idle memory (default True). Without it, call
            `maintain()` periodically. This setting has no variable.

    Raises:
        SettingError: a setting is invalid, or two settings contradict each other.
        TypeError: a setting is unknown, or its value has a type that no setting accepts.
        BackendError: the requested backend is not available, or cannot pin the reserve.
        LimitError: the reserve exceeds the limit "auto" or a shared limit.
    """

    __slots__ = ()
    __signature__: ClassVar[inspect.Signature] = _signature()

    def __init__(self, **settings: Unpack[PoolSettings]) -> None:
        if "_core" in settings:  # `tagged` passes it to `__new__` only.
            raise TypeError("_core is not a setting of a pool")
        _log.start()
        _pools[weakref.ref(self, lambda reference: _pools.pop(reference, None))] = None

    def __init_subclass__(cls) -> None:
        raise TypeError("pinpool.Pool cannot be subclassed, because `tagged` returns a Pool: write a class with a pool as an attribute")

    async def aget(self, nbytes: Size, *, timeout: Time | None = "wait") -> _pinpool.Buffer:
        """`get` for asyncio: `buf = await pool.aget(nbytes)`, with the same `timeout` and errors.

        Tasks and threads wait in one queue, in the order of their requests. A cancelled request leaves the queue. On a miss, a thread of
        the pool pins the memory.
        """
        return await _asyncio.get(self, nbytes, timeout)

    @overload
    def empty(
        self,
        shape: _Shape,
        dtype: npt.DTypeLike | None = None,
        *,
        order: _Order = "C",
        library: Literal["numpy"] | None = None,
        timeout: Time | None = "wait",
    ) -> np.ndarray[Any, np.dtype[Any]]: ...
    @overload
    def empty(
        self, shape: _Shape, dtype: Any = None, *, order: Literal["C"] = "C", library: Literal["torch"], timeout: Time | None = "wait"
    ) -> torch.Tensor: ...
    @overload
    def empty(
        self, shape: _Shape, dtype: torch.dtype, *, order: Literal["C"] = "C", library: None = None, timeout: Time | None = "wait"
    ) -> torch.Tensor: ...
    def empty(self, shape: _Shape, dtype: Any = None, *, order: _Order = "C", library: str | None = None, timeout: Time | None = "wait") -> Any:
        """Returns an uninitialized array or tensor in pinned memory. The memory returns to the pool when all views of it are gone.

            images = pool.empty((64, 3, 224, 224), torch.float32)

        Args:
            shape: a length, or a sequence of lengths.
            dtype: a NumPy dtype without Python objects (default float64), or for a tensor also a torch dtype (default
                `torch.get_default_dtype()`). A torch dtype selects a tensor.
            order: "C" (row-major), or "F" for an array.
            library: "numpy" for an array (the default), or "torch" for a tensor on the CPU.
            timeout: as for `get`.

        Raises:
            TypeError, ValueError: the shape, dtype, order or library is invalid.
            ImportError: `library="torch"`, but torch is not installed.
            TimeoutError, LimitError, RequestError, BackendError, ForkError, ClosedError: as for `get`.
        """
        return _arrays.empty(self, shape, dtype, order, library, timeout)

    def stats(self) -> dict[str, Any]:
        """Returns the statistics as nested dicts. Keys that end in `_bytes` are in bytes, keys that end in `_seconds` in seconds.

            pool.stats()["memory"]["in_use_bytes"], pool.stats()["requests"]["hits"]

        The most important ones:

            requests.served         requests that got a buffer: hits + misses
            requests.hits           requests served by an idle buffer, or by a returned one that was handed over
            requests.waits          requests that waited for memory; wait_time has the distribution of the waits
            requests.failed         requests without memory within the limit, or with a backend error
            memory.held_bytes       bytes held from the backend, in any state; peak_held_bytes is the maximum
            memory.in_use_bytes     bytes of the buffers that the program holds
            memory.idle_bytes       bytes of the buffers that later requests can reuse
            memory.pin.count        calls that pinned memory; pin.time has the distribution of their durations
            copies.in_flight        returned buffers that a device may still be using
            limits.max_bytes        the limit on held bytes, None if unlimited

        `Pool.describe_stats()` explains all of them.
        """
        statistics: dict[str, Any] = json.loads(self._stats_json())
        return statistics

    def diagnose(self) -> Diagnosis:
        """Returns the main cause of lost time, with the time lost, the evidence and a recommendation, or that the pool is healthy.

        `str(diagnosis)` is the whole text. The attributes `cause`, `is_alarm`, `seconds_lost` and `setting` are for programs.
        """
        text, cause, is_alarm, seconds_lost, setting = self._diagnosis()
        number = (setting[0], int(setting[1])) if setting is not None and setting[1].isdecimal() else setting
        return Diagnosis(text, cause, is_alarm, seconds_lost, number)

    def tagged(self, tag: str) -> Pool:
        """Returns a handle to the same pool. Its buffers, including buffers of a `Loader` and of `pinpool.torch.install`, carry
        `tag` in `report()`, in errors and in log lines. Buffers of a `SharedPool` carry no tag. All other calls act on the whole pool:
        `close()`, and so the end of a `with` block, closes it.
        """
        return Pool.__new__(Pool, _core=self._tagged(tag))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Never:
        raise TypeError(
            "a pinpool.Pool cannot be pickled or copied deeply, since it belongs to this process: pass a pinpool.SharedPool to DataLoader "
            "workers, or create a pool in the process that uses it"
        )


Pool.__module__ = "pinpool"


def diagnose() -> dict[str, Diagnosis]:
    """Returns the diagnosis of each pool of this process (see `Pool.diagnose`) by the name of the pool.

        for name, diagnosis in pinpool.diagnose().items():
            print(f"{name}: {diagnosis}")

    A pool without a name is "unnamed". If several pools have the same name, the later ones get a number, such as "loader 2". Pools that
    exist only through handles from `tagged` are left out.
    """
    diagnoses: dict[str, Diagnosis] = {}
    # A copy, because other threads create and drop pools meanwhile.
    for reference in _pools.copy():
        if (pool := reference()) is not None:
            name = pool.name or "unnamed"
            names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
            diagnoses[next(key for key in names if key not in diagnoses)] = pool.diagnose()
    return diagnoses
