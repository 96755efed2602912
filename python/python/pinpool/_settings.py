"""The type of the settings of a pool."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch

    from ._pinpool import _Size, _Time

_Switch: TypeAlias = bool | Literal[0, 1, "0", "1", "on", "off", "yes", "no", "true", "false"]


class PoolSettings(TypedDict, total=False):
    """The keyword arguments of `Pool` and of `install` in `pinpool.torch` and `pinpool.cupy`.

    Annotates a function that passes them on: `**settings: Unpack[PoolSettings]`.
    """

    name: str | None
    env: bool
    max_bytes: _Size | None
    reserve: _Size | None
    max_idle_bytes: _Size | None
    ledger: str | None
    wait: _Time | None
    on_full: Literal["error", "pageable"] | None
    reserve_wait: _Switch | None
    backend: Literal["auto", "gpu", "vmm", "register", "cuda", "mlock", "heap"] | None
    device: int | str | torch.device | None
    numa_node: int | str | None
    idle_timeout: _Time | None
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
