"""Batches of files, shards and images in pinned memory, read and decoded by threads without Python's lock.

    for batch in pinpool_loader.Loader("photos", batch_size=64, decode={"jpg": pinpool_loader.Image(224, 224)}):
        train(batch.field("jpg"), batch.labels)

The memory comes from a pool of the package `pinpool`, which is in the same wheel.
"""

from ._batch import Batch
from ._decode import Image
from ._loader import Loader

__all__ = ["Batch", "Image", "Loader"]
