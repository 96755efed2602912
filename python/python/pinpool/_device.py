"""The default GPU of this process, and the number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def torch_device() -> int | None:
    """Returns torch's current GPU if torch has started CUDA, else None."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    # Another thread may be importing torch.
    is_started = getattr(cuda, "is_initialized", lambda: False)
    return cuda.current_device() if is_started() else None


def num_ranks(environ: Mapping[str, str]) -> int:
    """Returns the number of ranks of the job, as far as a launcher (WORLD_SIZE) or an initialized `torch.distributed` shows it, else 1."""
    world_size, distributed = environ.get("WORLD_SIZE", ""), sys.modules.get("torch.distributed")
    ranks = int(world_size) if world_size.isdecimal() else 1
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        ranks = max(ranks, distributed.get_world_size())
    return ranks


def default_device_of_rank() -> int | None:
    """Returns the GPU of a new pool if a launcher has set LOCAL_RANK: torch's current GPU if torch has started CUDA, else LOCAL_RANK."""
    rank = os.environ.get("LOCAL_RANK", "")
    current = torch_device() if rank else None
    return int(rank) if current is None and rank.isdecimal() else current
