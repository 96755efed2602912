"""Types of the settings of a pool, and of other arguments."""

from __future__ import annotations

from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Literal, SupportsIndex, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch

#: A number of bytes, or text such as "64MiB".
Size: TypeAlias = SupportsIndex | str
#: Seconds, or text such as "500ms".
Time: TypeAlias = float | str | timedelta
_Switch: TypeAlias = bool | Literal[0, 1, "0", "1", "on", "off", "yes", "no", "true", "false"]


class PoolSettings(TypedDict, total=False):
    """The keyword arguments of `Pool` and of `install` in `pinpool.torch` and `pinpool.cupy`.

    Annotates a function that passes them on: `**settings: Unpack[PoolSettings]`.
    """

    name: str | None
    env: bool
    max_bytes: Size | None
    reserve: Size | None
    max_idle_bytes: Size | None
    ledger: str | None
    wait: Time | None
    on_full: Literal["error", "pageable"] | None
    reserve_wait: _Switch | None
    backend: Literal["auto", "gpu", "vmm", "register", "cuda", "mlock", "heap"] | None
    device: int | str | torch.device | None
    numa_node: int | str | None
    idle_timeout: Time | None
    trace: str | PathLike[str] | None
    socket: _Switch | str | PathLike[str] | None
    preset: Literal["adaptive", "tensorflow"] | None
    pool_size_limit: int | str | None
    auto_resize: _Switch | None
    rounding: Literal["eighths", "pow2", "exact"] | None
    log_every: int | str | None
    hugetlb: Literal["off", "auto", "2MiB", "1GiB"] | None
    growth: _Switch | None
    zero: _Switch | None
    maintenance_thread: _Switch | None
