"""The methods of `Pool` that are written in Python."""

import inspect
import json
import weakref

from . import _arrays, _asyncio, _log
from ._errors import ReleasedError
from ._pinpool import Pool as Pool


# The pools of this process, for `diagnose`.
_pools = weakref.WeakSet()


def _init(self, *, name=None, env=True, **settings):
    _log.start()
    _pools.add(self)


def diagnose() -> str:
    """The diagnoses of all pools of this process (`Pool.diagnose`): the costliest cause, the time lost and a recommendation."""
    said = []
    for pool in sorted(_pools, key=lambda pool: pool.name or ""):
        try:
            text = pool.diagnose()
        except ReleasedError:
            continue
        said.append(f"{pool.name}: {text}" if pool.name else text)
    return "\n".join(said)


def from_env(name=None):
    """A pool with the settings of the PINPOOL_ variables, and defaults for the others."""
    return Pool(name=name)


async def aget(self, n, *, timeout=None):
    """`get` for asyncio: `await pool.aget(n)`. Tasks and threads wait in one queue.

    A cancelled request leaves the queue. On a miss, memory is pinned on a thread of the pool.
    """
    return await _asyncio.get(self, n, timeout)


def empty(self, shape, dtype=None, *, order="C", library="numpy", timeout=None):
    """An uninitialized NumPy array in pinned memory, or a torch tensor with `library="torch"`.

    The memory returns to the pool when the array and all of its views are gone.
    """
    return _arrays.empty(self, shape, dtype, order, library, timeout)


def stats(self):
    """The statistics as a dict."""
    return json.loads(self._stats_json())


_REMOVED = {
    "class_stats": "pool.dump(), or pool.stats()",
    "partition": "pool.tagged(name) to tell users apart, or another pinpool.Pool with its own max_bytes",
}


def _removed(self, name):
    if name in _REMOVED:
        raise AttributeError(f"Pool.{name} was removed: use {_REMOVED[name]}")
    raise AttributeError(f"'pinpool.Pool' object has no attribute {name!r}")


def _signature():
    """Name, `env` and each setting, so that `help` and notebooks show them."""
    names = {"name": None, "env": True} | dict.fromkeys(Pool.setting_names())
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in names.items()])


Pool.__init__ = _init
Pool.__signature__ = _signature()
Pool.from_env = staticmethod(from_env)
Pool.__getattr__ = _removed
for _method in (aget, empty, stats):
    _method.__qualname__ = f"Pool.{_method.__name__}"
    _method.__module__ = "pinpool"
    setattr(Pool, _method.__name__, _method)
