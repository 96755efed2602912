"""A pool of pinned host memory for CUDA transfers.

    pool = pinpool.Pool(max_bytes="2GiB", name="loader")
    with pool.get(1 << 20) as buf:           # reuses pinned memory, or pins more
        np.frombuffer(buf, np.uint8)[:] = 7  # a view without a copy

`SharedPool` provides pinned batches for the workers of a `DataLoader`, `pinpool.torch.install` serves torch's own pinned memory, and the
package `pinpool_loader` reads files. Log lines go to the logger `pinpool`.
"""

import importlib
from typing import TYPE_CHECKING

from ._arrays import record_stream
from ._batches import SharedBatches
from ._diagnosis import Diagnosis
from ._errors import (
    AlreadyInstalledError,
    BackendError,
    ClosedError,
    DeviceError,
    ForkError,
    LimitError,
    LoadError,
    PinpoolError,
    ReleasedError,
    RequestError,
    SettingError,
    SharedError,
    TicketError,
    TrainerUnavailableError,
)
from ._errors import TimeoutError as TimeoutError  # Not in `__all__`, because `import *` would replace the builtin exception.
from ._packed import PackedBatch
from ._pinpool import Buffer, SharedBuffer
from ._pinpool import __version__ as __version__
from ._pool import Pool, diagnose
from ._settings import PoolSettings, Size, Time
from ._shared import SharedPool

__all__ = [
    "AlreadyInstalledError",
    "BackendError",
    "Buffer",
    "ClosedError",
    "DeviceError",
    "Diagnosis",
    "ForkError",
    "LimitError",
    "LoadError",
    "PackedBatch",
    "PinpoolError",
    "Pool",
    "PoolSettings",
    "ReleasedError",
    "RequestError",
    "SettingError",
    "SharedBatches",
    "SharedBuffer",
    "SharedError",
    "SharedPool",
    "Size",
    "TicketError",
    "Time",
    "TrainerUnavailableError",
    "diagnose",
    "record_stream",
]

if not TYPE_CHECKING:  # With this function a type checker would accept every name.

    def __getattr__(name: str) -> object:
        if name in ("cupy", "torch"):
            try:
                return importlib.import_module(f".{name}", __name__)
            except ImportError as error:
                raise AttributeError(f"pinpool.{name} cannot be imported: {error}") from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
