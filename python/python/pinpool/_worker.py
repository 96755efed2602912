"""What a worker process of a loader knows of itself, and the random numbers that it draws."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from typing import Any, NamedTuple

__all__ = ["WorkerInfo", "get_worker_info"]

# Of mallopt in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The most that it takes for M_MMAP_THRESHOLD.
_MMAP_MOST = 32 << 20
_TRIM_MORE = 16 << 20


class WorkerInfo(NamedTuple):
    """The worker process that asks."""

    #: From 0 on. A worker that replaces a dead one has its number.
    id: int
    num_workers: int
    #: The seed of the loader.
    seed: int
    #: This process's copy of it.
    dataset: Any


_info: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """The worker of a `SharedLoader` that this process is; None in the trainer."""
    return _info


def begin(info: WorkerInfo) -> None:
    """This process is a worker from now on."""
    global _info
    _info = info


def seed_generators(*origin: int) -> None:
    """Seeds the generators of `random`, NumPy and, if it is imported here, torch from the numbers of `origin`."""
    import numpy  # What a worker stacks needs it.

    text = " ".join(map(str, origin))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    random.seed(number)
    numpy.random.seed([number & 0xFFFF_FFFF, number >> 32])
    # Its generator of the CPU alone: a worker has no device.
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(number)


def read(dataset: Any, indices: list[int], *origin: int) -> list[Any]:
    """The samples of `indices`, whose random numbers are those of `origin`."""
    has_torch = "torch" in sys.modules
    seed_generators(*origin)
    samples = [dataset[index] for index in indices]
    if "torch" in sys.modules and not has_torch:
        # The dataset has just imported it, and drawn numbers that no seed repeats.
        return read(dataset, indices, *origin)
    return samples


def keep_freed_memory(nbytes: int) -> None:
    """Lets this process keep the memory of samples that it freed, about two batches of `nbytes`, for the next ones.

    The C library would give it back to the kernel after each batch, and have every page of the next one filled with zeros again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # A C library other than glibc.
    mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes + _TRIM_MORE, (1 << 31) - 1))
    mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)
