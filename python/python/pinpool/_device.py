"""The GPU of this process by default."""

from __future__ import annotations

import os
import sys


def of_torch() -> int:
    """Returns torch's current GPU, or else the GPU of the local rank. Does not start CUDA."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.current_device()
    rank = os.environ.get("LOCAL_RANK", "")
    # Some launchers make only one GPU visible to each rank.
    return int(rank) if rank.isdecimal() and int(rank) < torch.cuda.device_count() else 0


def of_rank(env: bool) -> int | None:
    """Returns the GPU of a new pool without `device`, if a launcher has set LOCAL_RANK and this process has imported torch."""
    if "torch" not in sys.modules or not os.environ.get("LOCAL_RANK") or env and os.environ.get("PINPOOL_DEVICE"):
        return None
    return of_torch()
