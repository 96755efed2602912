"""The default limit of torch's pinned memory.

torch itself has no limit, and some programs pin most of a machine's memory, for example for offloaded optimizers. The default limit of
three quarters of the memory, divided among the ranks of the host, allows that and still protects the machine. The number of
ranks is known only from `LOCAL_WORLD_SIZE`: without it, each process has three quarters of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _device

#: Fraction of the memory that all ranks of the host may pin.
_NUMERATOR, _DENOMINATOR = 3, 4
#: Limits are multiples of this many bytes, as for `max_bytes="auto"`.
_GRANULE = 2 << 20
#: Settings, and the values with which this default applies: the preset "tensorflow" has no limit, and a shared limit has its own.
_NEUTRAL_VALUES = {"max_bytes": "auto", "preset": "adaptive", "ledger": "none"}


def has_unknown_local_ranks(environ: Mapping[str, str]) -> bool:
    """Returns whether there are several ranks, and `LOCAL_WORLD_SIZE` does not tell how many of them are on this host."""
    return _device.num_ranks(environ) > 1 and not environ.get("LOCAL_WORLD_SIZE", "").isdecimal()


def are_defaults(settings: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, str]) -> bool:
    """Returns whether each of the settings in `defaults` is omitted or has this value."""
    variables = {name: environ.get(f"PINPOOL_{name.upper()}") for name in defaults} if settings.get("env", True) else {}
    values = variables | {name: value for name, value in settings.items() if value not in (None, "")}
    pairs = [(values.get(name), default) for name, default in defaults.items()]
    return all(value is None or str(value).strip().lower() in ("", default) for value, default in pairs)


def default_limit(settings: Mapping[str, Any], environ: Mapping[str, str], memory: tuple[int, str] | None) -> tuple[int, str] | None:
    """Returns the limit in bytes and its log line, or None if a setting decides or the memory is unknown.

    Args:
        settings: the settings of the pool.
        environ: the environment variables of the process.
        memory: the memory of the cgroup or machine in bytes, and where that number comes from.
    """
    if memory is None or not are_defaults(settings, environ, _NEUTRAL_VALUES):
        return None
    total, origin = memory
    local_world_size = environ.get("LOCAL_WORLD_SIZE", "")
    num_local_ranks = max(int(local_world_size), 1) if local_world_size.isdecimal() else 1
    share = max(total * _NUMERATOR // _DENOMINATOR // num_local_ranks // _GRANULE, 1) * _GRANULE
    qualification = f", divided by {num_local_ranks} (LOCAL_WORLD_SIZE)" if num_local_ranks > 1 else ""
    if has_unknown_local_ranks(environ):
        qualification = " for this process alone, because LOCAL_WORLD_SIZE is not set: all ranks of a host together may pin more than its memory"
    return share, (
        f"torch limit: max={_format_bytes(share)}: three quarters of {_format_bytes(total)} ({origin}){qualification}; "
        "to change it, set PINPOOL_MAX_BYTES or install(max_bytes=...)"
    )


def _format_bytes(nbytes: float) -> str:
    """Returns `nbytes` as log lines show it, such as 24.0MiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f}{unit}"
        nbytes /= 1024
    return f"{nbytes:.1f}GiB"
