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

_USE_COLLATE = "torch.utils.data.DataLoader with collate_fn=shared.collate of a pinpool.SharedPool, and shared.batches(loader)"
_USE_TO_DEVICE = "pinpool.torch.to_device(images), which copies and records"
_USE_RESERVE = "a pool (pinpool.Pool), with PINPOOL_RESERVE"
#: Names that were removed, and what to use instead.
_REMOVED = {
    "Array": "pinpool_loader.Loader(map=), with np.load of each sample",
    "Batch": "pinpool_loader.Batch",
    "DeviceArray": _USE_TO_DEVICE,
    "DeviceBuffer": _USE_TO_DEVICE,
    "Image": "pinpool_loader.ImageDecoder",
    "Kept": _USE_RESERVE,
    "Loader": "pinpool_loader.Loader (import pinpool_loader)",
    "SharedLoader": _USE_COLLATE,
    "WorkerError": _USE_COLLATE,
    "WorkerInfo": "torch.utils.data.get_worker_info()",
    "get_worker_info": "torch.utils.data.get_worker_info()",
    "kept": _USE_RESERVE,
    "numba": "arrays over buffers (pool.empty), and pinpool.record_stream(array, stream) after a copy",
    "safetensors": "safetensors.torch.load_file, or its tensors copied into pool.empty(..., library='torch')",
}

if not TYPE_CHECKING:  # With this function a type checker would accept every name.

    def __getattr__(name: str) -> object:
        if name in ("cupy", "torch"):
            try:
                return importlib.import_module(f".{name}", __name__)
            except ImportError as error:
                raise AttributeError(f"pinpool.{name} cannot be imported: {error}") from error
        if name in _REMOVED:
            raise AttributeError(f"pinpool.{name} was removed: use {_REMOVED[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
