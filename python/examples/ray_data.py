"""One epoch of WebDataset shards with Ray Data: worker processes read the shards, and the trainer copies the rows to pinned memory.
Ray restarts a worker that died; every sample is delivered exactly once.

    pip install ./python "ray[data]"
    python python/examples/ray_data.py DIRECTORY_OF_TARS
    python python/examples/ray_data.py --kill            # writes shards first; one worker is killed during the run
"""

import argparse
import hashlib
import io
import os
import signal
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

import pinpool

#: Samples per batch, and bytes per sample: shorter samples are padded with zeros.
BATCH, SAMPLE = 64, 65536


class ReadShards:
    """A worker process, which reads the shards that Ray assigns to it."""

    def __call__(self, rows: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        for shard in rows["shard"]:
            with tarfile.open(shard) as tar:
                for member in tar:
                    # A real program decodes the image here.
                    data = tar.extractfile(member).read()  # type: ignore[union-attr]
                    padded = np.zeros((1, SAMPLE), np.uint8)
                    padded[0, : len(data)] = np.frombuffer(data, np.uint8)
                    key = f"{shard}!{Path(member.name).stem}"
                    yield {"key": [key], "length": [len(data)], "data": padded, "worker": [os.getpid()]}


def write_shards(directory: Path, shards: int = 40, samples: int = 100) -> dict[str, str]:
    """Writes shards of random samples. Returns the digest of each sample by its key."""
    rng, digests = np.random.default_rng(7), {}
    for shard in range(shards):
        path = directory / f"{shard:05}.tar"
        with tarfile.open(path, "w") as tar:
            for sample in range(samples):
                data = rng.bytes(int(rng.integers(1_000, 60_000)))
                member = tarfile.TarInfo(f"{sample:04}.bin")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                digests[f"{path}!{sample:04}"] = hashlib.sha256(data).hexdigest()
    return digests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="a directory of .tar files; without it they are written first")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (default 4)")
    parser.add_argument("--kill", action="store_true", help="kill one worker after a quarter of the samples; ignored with a directory")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as own:
        directory = args.directory or Path(own)
        expected = None if args.directory else write_shards(directory)
        shards = sorted(str(path.resolve()) for path in directory.glob("*.tar"))
        if not shards:
            print(f"{directory}: no .tar file", file=sys.stderr)
            return 1

        pool = pinpool.Pool(max_bytes="64MiB")
        ray.init(num_cpus=args.workers, include_dashboard=False)
        try:
            dataset = ray.data.from_items([{"shard": shard} for shard in shards])
            samples = dataset.map_batches(
                ReadShards,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=2),
            )
            delivered: Counter[str] = Counter()
            digests: dict[str, str] = {}
            workers: set[int] = set()
            killed = None
            for rows in samples.iter_batches(batch_size=BATCH):
                # Pinned memory: copy it to the GPU here, then call pinpool.record_stream(batch, stream).
                batch = np.stack(list(rows["data"]), out=pool.empty((len(rows["data"]), SAMPLE), np.uint8))
                for key, data, length in zip(rows["key"], batch, rows["length"], strict=True):
                    digests[str(key)] = hashlib.sha256(data[:length]).hexdigest()
                delivered.update(map(str, rows["key"]))
                workers.update(rows["worker"].tolist())
                if args.kill and killed is None and expected and len(delivered) * 4 >= len(expected):
                    killed = int(rows["worker"][-1])
                    os.kill(killed, signal.SIGKILL)
                del batch, data
        finally:
            ray.shutdown()

    twice = [key for key, times in delivered.items() if times > 1]
    print(f"{len(delivered)} samples of {len(shards)} shards from {len(workers)} worker processes", end="")
    print(f", one of them killed ({killed})" if killed else "")
    print(f"pinned by {pool.pinned_by or 'nothing'}, {pool.stats()['memory']['in_use']} buffers in use")
    if twice:
        print(f"{len(twice)} samples came more than once, the first: {twice[0]}", file=sys.stderr)
        return 1
    if expected is not None and digests != expected:
        missing = expected.keys() - digests.keys()
        wrong = [key for key in digests if digests[key] != expected.get(key)]
        print(f"{len(missing)} samples are missing, {len(wrong)} are wrong", file=sys.stderr)
        return 1
    if expected is not None:
        print("each sample came exactly once, with the bytes that were written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
