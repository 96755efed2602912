"""Reads files, tar archives and images into batches in pinned memory, on Rust threads.

    for batch in pinpool_loader.Loader("photos", batch_size=64, decode={"jpg": pinpool_loader.ImageDecoder(224, 224)}):
        train(batch["jpg"], batch.labels)

The memory comes from a `pinpool.Pool`. Both packages are in the same wheel, and this one uses private modules of `pinpool`.
"""

from ._batch import Batch
from ._decode import ImageDecoder
from ._loader import Loader, LoaderSettings

__all__ = ["Batch", "ImageDecoder", "Loader", "LoaderSettings"]
