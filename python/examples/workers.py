#!/usr/bin/env python3
"""The workers of torch's DataLoader write batches directly into pinned memory.

pip install './python[torch]'
python python/examples/workers.py --workers 4
"""

import argparse
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import pinpool.torch

LENGTH, BATCH = 400, 16


class Images:
    """Sample i is an image with all pixels i, and the label i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((3, 64, 64), index % 256, np.uint8), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    # The workers prepare num_workers * prefetch_factor batches ahead, and two more buffers let them continue while the loop uses a batch.
    shared = pinpool.SharedPool(buffer_bytes="1MiB", num_buffers=2 * args.workers + 2)
    # DataLoader accepts any object with a length and items, although its type hints require a Dataset.
    dataset: Any = Images()
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=args.workers, collate_fn=shared.collate)
    seen: list[int] = []
    for images, labels in shared.batches(loader):
        inputs = pinpool.torch.to_device(images)
        assert (inputs[:, 0, 0, 0].cpu() == labels % 256).all()
        seen.extend(labels.tolist())
        del images, inputs, labels
    assert seen == list(range(LENGTH)), "every sample comes once, in order"
    print(f"{len(seen)} samples, pinned by {shared.pinned_by or 'nothing'}, {shared.counts()}")


if __name__ == "__main__":
    main()
