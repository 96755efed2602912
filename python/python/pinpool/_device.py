"""The GPU of this process by default."""

from __future__ import annotations

import os
import sys
from typing import Any


def torch_device() -> int | None:
    """Returns torch's current GPU if torch has started CUDA, else None."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    # Another thread may be importing torch.
    is_started = getattr(cuda, "is_initialized", lambda: False)
    return cuda.current_device() if is_started() else None


def default_device_of_rank() -> int | None:
    """Returns the GPU of a new pool if a launcher has set LOCAL_RANK: torch's current GPU if torch has started CUDA, else LOCAL_RANK."""
    rank = os.environ.get("LOCAL_RANK", "")
    current = torch_device() if rank else None
    return int(rank) if current is None and rank.isdecimal() else current
