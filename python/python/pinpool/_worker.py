"""What a worker process of a loader knows of itself, and the random numbers that it draws."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any, NamedTuple

__all__ = ["WorkerInfo", "get_worker_info"]


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
