#!/usr/bin/env python3
"""Photos decoded to 224 x 224 by pinpool_loader and by torch's DataLoader over Pillow: samples/s and CPU seconds.

    pip install './python[torch]' pillow webdataset
    python python/benches/loader.py [--images 1600] [--epochs 3] [--rounds 3]

Writes the photos to a temporary folder first, as files and as four tar shards, and reads them from the page cache. Each loader runs in a
separate process, interleaved over several rounds. The first epoch includes the start of workers and pinning; "steady" is the median of the
later epochs. Each number in the table is its median over the rounds. CPU seconds cover the process and its children in all epochs.
"""

import argparse
import gc
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

SIDE, BATCH = 224, 64


def make_photos(root, count):
    """Writes photos of 500 x 375 pixels, filled with noise of several scales."""
    import numpy as np
    from PIL import Image

    rng, jpegs = np.random.default_rng(1), []
    for _ in range(min(count, 32)):
        whole = np.zeros((375, 500, 3))
        for scale, strength in ((4, 80), (16, 60), (64, 35), (256, 14)):
            small = rng.normal(0, strength, (max(2, 375 * scale // 512), max(2, 500 * scale // 512), 3)).astype(np.float32)
            for channel in range(3):
                layer = Image.fromarray(small[..., channel], "F").resize((500, 375), Image.BICUBIC)
                whole[..., channel] += np.asarray(layer)
        file = io.BytesIO()
        Image.fromarray(np.clip(whole + 128, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
        jpegs.append(file.getvalue())
    (root / "photos").mkdir()
    archives = [tarfile.open(root / f"{shard}.tar", "w") for shard in range(4)]
    for number in range(count):
        data = jpegs[number % len(jpegs)]
        (root / "photos" / f"{number:06}.jpg").write_bytes(data)
        info = tarfile.TarInfo(f"{number:06}.jpg")
        info.size = len(data)
        archives[number % len(archives)].addfile(info, io.BytesIO(data))
    for archive in archives:
        archive.close()


def decode_with_pillow(file):
    import numpy as np
    from PIL import Image

    return np.array(Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.BILINEAR))


class Photos:
    def __init__(self, root):
        self.paths = sorted((Path(root) / "photos").glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return decode_with_pillow(self.paths[index])


# Each of the following functions returns a function that returns the batches of one epoch.


def torch_loader(root, workers, collate=None):
    from torch.utils.data import DataLoader

    loader = DataLoader(Photos(root), BATCH, num_workers=workers, persistent_workers=True, collate_fn=collate)
    return lambda: loader


def shared_collate(root, workers):
    import pinpool

    shared = pinpool.SharedPool(BATCH * SIDE * SIDE * 3, 2 * workers + 2, library="numpy")
    loader = torch_loader(root, workers, shared.collate)()
    return lambda: shared.batches(loader)


def webdataset_loader(root, workers):
    import webdataset
    from torch.utils.data import DataLoader, default_collate

    shards = sorted(str(path) for path in Path(root).glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    dataset = dataset.map(lambda sample: decode_with_pillow(io.BytesIO(sample["jpg"]))).batched(BATCH, collation_fn=default_collate)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: loader


def pinpool_files(root, workers, paths):
    import pinpool_loader

    loader = pinpool_loader.Loader(f"{root}/{paths}", batch_size=BATCH, num_threads=workers, decode={"jpg": pinpool_loader.ImageDecoder(SIDE, SIDE)})
    return lambda: (batch.field("jpg") for batch in loader)


LOADERS = {
    "DataLoader, persistent": torch_loader,
    "webdataset, DataLoader": webdataset_loader,
    "DataLoader, shared.collate": shared_collate,
    "Loader, decode=, files": lambda root, workers: pinpool_files(root, workers, "photos"),
    "Loader, decode=, tar": lambda root, workers: pinpool_files(root, workers, "*.tar"),
}


def cpu_seconds():
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def measure(name, args):
    """One loader in this process; prints the numbers as JSON."""
    epoch, rates = LOADERS[name](args.folder, args.workers), []
    cpu = cpu_seconds()
    for _ in range(args.epochs):
        begun, samples = time.perf_counter(), 0
        for batch in epoch():
            assert tuple(batch.shape[1:]) == (SIDE, SIDE, 3) and batch[:, ::32, ::32].sum() > 0
            samples += len(batch)
            del batch
        rates.append(samples / (time.perf_counter() - begun))
        assert samples == args.images, samples
    del epoch
    gc.collect()  # workers end, and their CPU time counts
    print(json.dumps({"first": rates[0], "steady": statistics.median(rates[1:] or rates), "cpu": cpu_seconds() - cpu}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args)
    rounds = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory(prefix="loader_bench.") as folder:
        make_photos(Path(folder), args.images)
        before = os.getloadavg()[0]
        for _ in range(args.rounds):
            for name, results in rounds.items():
                done = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], f"--folder={folder}", f"--measure={name}"], capture_output=True, text=True
                )
                if done.returncode == 0:
                    results.append(json.loads(done.stdout.splitlines()[-1]))
                elif not results:
                    print(f"{name}: left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    print(f"{args.images} photos, {args.epochs} epochs, {args.workers} workers, load {before:.1f} to {os.getloadavg()[0]:.1f}, {args.rounds} rounds")
    print("| loader | first epoch, samples/s | steady | steady, ratio | CPU s per 1000 |\n| --- | ---: | ---: | ---: | ---: |")
    baseline = [result["steady"] for result in rounds[next(iter(rounds))]]
    for name, results in rounds.items():
        if results:
            first, steady, cpu = (statistics.median(result[key] for result in results) for key in ("first", "steady", "cpu"))
            ratio = statistics.median(result["steady"] / base for result, base in zip(results, baseline, strict=True))
            print(f"| {name} | {first:,.0f} | {steady:,.0f} | {ratio:.2f} | {1000 * cpu / args.images / args.epochs:.2f} |")


if __name__ == "__main__":
    main()
