#!/usr/bin/env python3
"""A dataset read by worker processes into page-locked memory: by pinpool.SharedLoader, or by torch's DataLoader.

    pip install ./python numpy
    python python/examples/workers.py --kill            # four workers; one is killed, another reads its batches again
    python python/examples/workers.py --torch           # torch.utils.data.DataLoader and its workers; pip install torch
"""

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import pinpool

LENGTH, BATCH = 400, 16


class Images:
    """Sample i is an image of the value i, and i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((3, 64, 64), index % 256, np.uint8), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", action="store_true", help="kill one worker on the way")
    parser.add_argument("--torch", action="store_true", help="torch's DataLoader, whose collate_fn gives tickets")
    arguments = parser.parse_args()
    batches: Iterable[Any]
    replaced: Callable[[], int]
    if arguments.torch:
        from torch.utils.data import DataLoader

        shared = pinpool.SharedPool(buffer_bytes="1MiB", buffers=3 * arguments.workers + 3)
        # DataLoader takes whatever has a length and items; its annotations name a class of torch.
        dataset: Any = Images()
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=arguments.workers, collate_fn=shared.collate)
        batches, replaced = shared.batches(loader), lambda: 0
    else:
        own = pinpool.SharedLoader(Images(), BATCH, num_workers=arguments.workers, on_death="replace")
        shared, batches, replaced = own.shared, own, lambda: own.replaced
    seen: list[int] = []
    for number, (images, labels) in enumerate(batches):
        # Here a copy to the GPU; then pinpool.record_stream(images, stream).
        assert (np.asarray(images)[:, 0, 0, 0] == np.asarray(labels) % 256).all()
        seen.extend(int(label) for label in labels)
        del images, labels
        if arguments.kill and number == 5:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    assert seen == list(range(LENGTH)), "every sample comes once, in order"
    print(f"{len(seen)} samples, page-locked by {shared.page_lock}, {replaced()} workers replaced, {shared.counts()}")


if __name__ == "__main__":
    main()
