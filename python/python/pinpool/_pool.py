"""Methods of `Pool` that are written in Python."""

from __future__ import annotations

import inspect
import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, Never, SupportsIndex

from . import _arrays, _asyncio, _log
from ._diagnosis import Diagnosis
from ._pinpool import Buffer
from ._pinpool import Pool as Pool

if TYPE_CHECKING:
    from ._arrays import _Order, _Shape
    from ._pinpool import _Size, _Time

#: References to the pools of this process, in the order of their creation.
_pools: dict[weakref.ref[Pool], None] = {}


def _init(self: Pool, *, name: Any = None, env: Any = True, **settings: Any) -> None:
    _log.start()
    _pools[weakref.ref(self, lambda reference: _pools.pop(reference, None))] = None


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


async def aget(self: Pool, nbytes: _Size, *, timeout: _Time | None = None) -> Buffer:
    """`get` for asyncio: `buf = await pool.aget(nbytes)`, with the same `timeout` and errors.

    Tasks and threads wait in one queue, in the order of their requests. A cancelled request leaves the queue. On a miss, a thread of
    the pool pins the memory.
    """
    return await _asyncio.get(self, nbytes, timeout)


def empty(self: Pool, shape: _Shape, dtype: Any = None, *, order: _Order = "C", library: str | None = None, timeout: _Time | None = None) -> Any:
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


def stats(self: Pool) -> Any:
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
    return json.loads(self._stats_json())


def diagnose_pool(self: Pool) -> Diagnosis:
    """Returns the main cause of lost time, with the time lost, the evidence and a recommendation, or that the pool is healthy.

    The result is a str with the attributes `cause`, `is_alarm`, `seconds_lost` and `setting`: see `pinpool.Diagnosis`.
    """
    return Diagnosis(*self._diagnosis())


def _return_self(self: Pool) -> Pool:
    return self


def _exit(self: Pool, *_exception: object) -> None:
    self.close()


def _reduce(self: Pool, _protocol: SupportsIndex) -> Never:
    raise TypeError(
        "a pinpool.Pool cannot be pickled or copied deeply, since it belongs to this process: pass a pinpool.SharedPool to DataLoader "
        "workers, or create a pool in the process that uses it"
    )


_REMOVED = {
    "class_stats": "pool.report(), or pool.stats()",
    "partition": "pool.tagged(name) to tell users apart, or another pinpool.Pool with its own max_bytes",
}


def _removed(self: Pool, name: str) -> Never:
    if name in _REMOVED:
        raise AttributeError(f"Pool.{name} was removed: use {_REMOVED[name]}")
    raise AttributeError(f"'pinpool.Pool' object has no attribute {name!r}")


def _signature() -> inspect.Signature:
    """Returns the signature with all settings, for `help` and notebooks."""
    names = {"name": None, "env": True} | dict.fromkeys(Pool._setting_names())
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in names.items()])


_MEMBERS = {
    "__init__": _init, "__enter__": _return_self, "__exit__": _exit, "__copy__": _return_self, "__reduce_ex__": _reduce,
    "__getattr__": _removed, "__signature__": _signature(),
}  # fmt: skip
for _name, _member in _MEMBERS.items():
    setattr(Pool, _name, _member)
diagnose_pool.__name__ = "diagnose"
for _method in (aget, diagnose_pool, empty, stats):
    _method.__qualname__ = f"Pool.{_method.__name__}"
    _method.__module__ = "pinpool"
    setattr(Pool, _method.__name__, _method)
