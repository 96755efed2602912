"""The default limit of torch's pinned memory.

torch itself has no limit, and programs rely on that: offloaded optimizers and key-value caches pin most of a machine's memory. Without
any limit a mistake could exhaust the machine. The default is three quarters of the memory of the cgroup, or else of the machine,
divided among the ranks of this host. A pool that pins with ``mlock`` never holds more than the process may lock.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The share of the memory that this process may use.
_NUMERATOR, _DENOMINATOR = 3, 4
#: Limits are multiples of this, like the limit ``auto``.
_GRANULE = 2 << 20
#: Settings that imply a limit: ``tensorflow`` has none, and a shared limit holds for all processes.
_DECIDES = ("max_bytes", "preset", "ledger")
_VARIABLES = tuple(f"PINPOOL_{name.upper()}" for name in _DECIDES)


def choose(settings: Mapping, environ: Mapping[str, str], memory: tuple[int, str] | None) -> tuple[int, str] | None:
    """The limit in bytes and its log line; ``None`` if a setting decides, or the memory is unknown.

    Args:
        settings: the settings of the pool.
        environ: the environment variables of the process.
        memory: the memory of the process in bytes, and the origin of that number.
    """
    reads_variables = settings.get("env", True)
    decided = any(settings.get(name) is not None for name in _DECIDES)
    if decided or memory is None or (reads_variables and any(environ.get(name) for name in _VARIABLES)):
        return None
    total, origin = memory
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    pools = max(int(ranks), 1) if ranks.isdecimal() else 1
    share = max(total * _NUMERATOR // _DENOMINATOR // pools // _GRANULE, 1) * _GRANULE
    among = f", divided by {pools} (LOCAL_WORLD_SIZE)" if pools > 1 else ""
    return share, (
        f"torch: the limit of pinned memory is {share} bytes: three quarters of {total} bytes ({origin}){among}; "
        "PINPOOL_MAX_BYTES or install(max_bytes=...) changes it"
    )
