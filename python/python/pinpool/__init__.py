"""A pool of page-locked ("pinned") host memory for loaders that feed GPUs.

    pool = pinpool.Pool(max_bytes="64GiB", name="loader")
    with pool.get(1 << 20) as buf:           # idle memory of this size, or newly pinned
        np.frombuffer(buf, np.uint8)[:] = 7  # views without a copy

Log lines come through `logging`, under the logger `pinpool`.
"""

from typing import TYPE_CHECKING

from ._arrays import record_stream
from ._batch import Batch
from ._decode import Array, Image
from ._device import DeviceArray
from ._errors import (
    BackendError,
    DeviceError,
    ForkError,
    LimitError,
    LoadError,
    PeerError,
    PinpoolError,
    ReleasedError,
    RequestError,
    SettingError,
    SharedError,
    TicketError,
    TimeoutError,
    WorkerError,
)
from ._loader import Loader
from ._packed import Batches, Packed
from ._pinpool import Buffer, DeviceBuffer, SharedBuffer, __version__
from ._pool import Pool, why
from ._shared import SharedPool
from ._shared_loader import SharedLoader
from ._worker import WorkerInfo, get_worker_info

__all__ = [
    "Array",
    "BackendError",
    "Batch",
    "Batches",
    "Buffer",
    "DeviceArray",
    "DeviceBuffer",
    "DeviceError",
    "ForkError",
    "Image",
    "LimitError",
    "LoadError",
    "Loader",
    "Packed",
    "PeerError",
    "PinpoolError",
    "Pool",
    "ReleasedError",
    "RequestError",
    "SettingError",
    "SharedBuffer",
    "SharedError",
    "SharedLoader",
    "SharedPool",
    "TicketError",
    "TimeoutError",
    "WorkerError",
    "WorkerInfo",
    "get_worker_info",
    "record_stream",
    "why",
]

if not TYPE_CHECKING:  # With this function a type checker would accept every name.

    def __getattr__(name: str) -> object:
        if name in ("Kept", "kept"):
            instead = "allocate from a pool (pinpool.Pool) and reserve its memory with PINPOOL_RESERVE"
            raise AttributeError(f"pinpool.{name} was removed: {instead}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
