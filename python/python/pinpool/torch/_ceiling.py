"""The ceiling of torch's pinned memory, where none is set.

torch has no limit on what it pins, and programs rely on that: optimizers that are offloaded and key-value caches pin most of a
machine's memory. A pool without a limit would let a mistake end the machine. So the ceiling is what a machine can spare: three
quarters of the memory of the cgroup, else of the machine, divided among the ranks of this host. A pool that pins by ``mlock``
holds no more than the process may lock, whatever its ceiling is.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Of the memory that this process may use.
_NUMERATOR, _DENOMINATOR = 3, 4
#: A ceiling is a multiple of it, as that of ``auto`` is.
_GRANULE = 2 << 20
#: Who sets one of them decides on a ceiling: ``tensorflow`` has none, and that of a host ledger holds for all processes.
_DECIDES = ("max_bytes", "preset", "ledger")
_VARIABLES = tuple(f"PINPOOL_{name.upper()}" for name in _DECIDES)


def choose(settings: Mapping, environ: Mapping[str, str], memory: tuple[int, str] | None) -> tuple[int, str] | None:
    """The ceiling in bytes, and the log line about it; ``None`` if the settings decide, or the memory is not known.

    Args:
        settings: those of the pool.
        environ: the variables of the process.
        memory: its memory in bytes, and where that number comes from.
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
        f"torch: the ceiling of pinned memory is {share} bytes: three quarters of {total} bytes ({origin}){among}; "
        "PINPOOL_MAX_BYTES or install(max_bytes=...) sets another"
    )
