#!/usr/bin/env python3
"""pinpool_loader.Loader, torch.utils.data.DataLoader and SPDL on the same files: samples/s, CPU seconds, peak memory.

    pip install ./python numpy torch spdl safetensors pillow webdataset     # SPDL decodes with the libraries of FFmpeg
    python python/bench_loader.py [--files 10000] [--epochs 3] [--rounds 3]
    python python/bench_loader.py --weights 2       # GB: pinpool.safetensors.load beside safetensors.torch.load_file
    python python/bench_loader.py --shards 8        # .tar.gz shards of 500 samples, beside tarfile in workers of DataLoader
    python python/bench_loader.py --images 1000     # photos decoded to 224 x 224, beside Pillow in workers of DataLoader
    python python/bench_loader.py --epochs 1        # one cold epoch of each, which pays for the pinning; as with --weights 2

Makes the files itself, in a temporary folder: lengths log-normal with a mean of 100 KB, random bytes, a folder for each of
ten classes. They were just written, so they come from the page cache if they fit it. Each loader runs in a process of its
own, in turns over several rounds; the table has the median round of each. One that is not installed is left out, and said so.

Each loader gives batches of the same number of samples, as bytes in host memory, in the order of the files; the consumer
looks at the first and the last byte of each sample. The number of samples and the sum of all lengths must be those of the files.
A row "cold" makes a new pool for each epoch or load, so that each one pins its memory anew.

CPU seconds are of the process and its children, from the first batch asked for to the end of all workers. Memory is the
proportional set size (PSS: shared pages are counted once) of the process and its children, every 50 ms, less what the
process had after its imports. The page cache is not in it.
"""

import argparse
import gc
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MEAN_BYTES, SIGMA, CLASSES = 100_000, 0.6, 10


def make_files(root, count):
    rng = random.Random(1)
    mu = math.log(MEAN_BYTES) - SIGMA**2 / 2
    for number in range(count):
        folder = root / f"class{number % CLASSES}"
        folder.mkdir(exist_ok=True)
        length = min(max(int(rng.lognormvariate(mu, SIGMA)), 1024), 16 << 20)
        (folder / f"{number:06}.bin").write_bytes(rng.randbytes(length))


def paths_of(root):
    return sorted(str(path) for path in Path(root).glob("*/*.bin"))


# Each yields the batches of all epochs as lists of arrays, tensors or bytes-like objects.


def with_pinpool(root, epochs, batch, workers):
    import pinpool
    import pinpool_loader

    loader = pinpool_loader.Loader(root, batch_size=batch, workers=workers, epochs=epochs)
    yield
    for samples in loader:
        yield samples
    del samples


def with_pinpool_cold(root, epochs, batch, workers):
    batches = with_pinpool(root, 1, batch, workers)
    yield next(batches)
    yield from batches
    for _ in range(epochs - 1):
        batches = with_pinpool(root, 1, batch, workers)
        next(batches)
        yield from batches


class _Samples:
    def __init__(self, root):
        self.paths = paths_of(root)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        import torch

        path = self.paths[index]
        with open(path, "rb", buffering=0) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(data)
        return torch.frombuffer(data, dtype=torch.uint8), path


def _one_tensor(samples):
    import torch

    tensors, keys = zip(*samples)
    return torch.cat(tensors), [len(tensor) for tensor in tensors], keys


def _with_torch(root, epochs, batch, workers, collate):
    import torch.utils.data

    samples = _Samples(root)
    settings = {"batch_size": batch, "num_workers": workers, "collate_fn": collate, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(samples, **settings)
    yield
    for _ in range(epochs):
        yield from loader


def with_torch_lists(root, epochs, batch, workers):
    batches = _with_torch(root, epochs, batch, workers, list)
    next(batches)
    yield
    for samples in batches:
        yield [tensor for tensor, _ in samples]


def with_torch_one_tensor(root, epochs, batch, workers):
    batches = _with_torch(root, epochs, batch, workers, _one_tensor)
    next(batches)
    yield
    for whole, lengths, _ in batches:
        yield whole.split(lengths)


def _with_spdl(groups, epochs, read, workers):
    from spdl.pipeline import PipelineBuilder

    # A task for each batch: with one for each sample it is many times slower.
    source = (group for _ in range(epochs) for group in groups)
    builder = PipelineBuilder().add_source(source).pipe(read, concurrency=workers, output_order="input")
    pipeline = builder.add_sink(2 * workers).build(num_threads=workers)
    yield
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _groups(paths, batch):
    return [paths[at : at + batch] for at in range(0, len(paths), batch)]


def with_spdl(root, epochs, batch, workers):
    import numpy as np

    def read(group):
        return [np.fromfile(path, np.uint8) for path in group]

    return _with_spdl(_groups(paths_of(root), batch), epochs, read, workers)


# The same for photos, decoded to one size.


def images_with_pinpool(root, epochs, batch, workers):
    import pinpool
    import pinpool_loader

    decode = {"jpg": pinpool_loader.Image(SIDE, SIDE)}
    loader = pinpool_loader.Loader(Path(root) / "photos", batch_size=batch, workers=workers, epochs=epochs, decode=decode)
    yield
    for group in loader:
        yield group.field("jpg").reshape(len(group), -1)


def _photo(file):
    """As a tensor of bytes, by Pillow."""
    import numpy as np
    import torch
    from PIL import Image

    image = Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.BILINEAR)
    return torch.from_numpy(np.array(image).reshape(-1))


class _Photos:
    def __init__(self, root):
        self.paths = sorted((Path(root) / "photos").glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return _photo(self.paths[index])


def images_with_torch(root, epochs, batch, workers):
    import torch.utils.data

    settings = {"batch_size": batch, "num_workers": workers, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(_Photos(root), **settings)
    yield
    for _ in range(epochs):
        yield from loader


def images_with_webdataset(root, epochs, batch, workers):
    import io

    import torch.utils.data
    import webdataset

    shards = sorted(str(path) for path in Path(root).glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    dataset = dataset.map(lambda sample: _photo(io.BytesIO(sample["jpg"]))).batched(batch, collation_fn=torch.stack)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    yield
    for _ in range(epochs):
        yield from loader


def images_with_spdl(root, epochs, batch, workers):
    import spdl.io

    resized = spdl.io.get_video_filter_desc(scale_width=SIDE, scale_height=SIDE, scale_algo="bilinear", scale_mode=None, pix_fmt="rgb24")
    paths = sorted(str(path) for path in (Path(root) / "photos").glob("*.jpg"))

    def read(group):
        frames = [spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=resized) for path in group]
        return spdl.io.to_numpy(spdl.io.convert_frames(frames)).reshape(len(group), -1)

    return _with_spdl(_groups(paths, batch), epochs, read, workers)


def make_images(root, count):
    """Photos of 640 x 480, as files and as shards: noise of several scales."""
    import io
    import tarfile

    import numpy as np
    from PIL import Image

    rng, different = np.random.default_rng(1), []
    for _ in range(min(count, 32)):
        whole = np.zeros((480, 640, 3))
        for scale, strength in ((4, 80), (16, 60), (64, 35), (256, 14)):
            small = rng.normal(0, strength, (max(2, 480 * scale // 512), max(2, 640 * scale // 512), 3)).astype(np.float32)
            for channel in range(3):
                layer = Image.fromarray(small[..., channel], "F").resize((640, 480), Image.BICUBIC)
                whole[..., channel] += np.asarray(layer)
        file = io.BytesIO()
        Image.fromarray(np.clip(whole + 128, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
        different.append(file.getvalue())
    (root / "photos").mkdir()
    archives = [tarfile.open(root / f"{shard}.tar", "w") for shard in range(4)]
    for number in range(count):
        data = different[number % len(different)]
        (root / "photos" / f"{number:06}.jpg").write_bytes(data)
        info = tarfile.TarInfo(f"{number:06}.jpg")
        info.size = len(data)
        archives[number % len(archives)].addfile(info, io.BytesIO(data))
    for archive in archives:
        archive.close()
    return count, count * SIDE * SIDE * 3


# The same for weights: one batch, of all tensors as bytes.


def weights_with_pinpool(root, epochs, batch, workers, is_cold=False):
    import torch

    import pinpool.safetensors

    pool = pinpool.Pool()
    yield
    for _ in range(epochs):
        if is_cold:
            pool = pinpool.Pool()
        tensors = pinpool.safetensors.load(Path(root) / WEIGHTS, library="torch", pool=pool, workers=workers)
        yield pages_of(tensors, torch)


def weights_with_pinpool_cold(root, epochs, batch, workers):
    return weights_with_pinpool(root, epochs, batch, workers, is_cold=True)


def weights_with_safetensors(root, epochs, batch, workers):
    import torch
    from safetensors.torch import load_file

    yield
    for _ in range(epochs):
        yield pages_of(load_file(Path(root) / WEIGHTS), torch)


def weights_with_safetensors_copied(root, epochs, batch, workers):
    import torch
    from safetensors.torch import load_file

    yield
    for _ in range(epochs):
        tensors = load_file(Path(root) / WEIGHTS)
        yield pages_of({name: tensor.clone() for name, tensor in tensors.items()}, torch)


# The same for compressed shards. What the loader does to list them counts.


def shards_with_pinpool(root, epochs, batch, workers):
    import pinpool
    import pinpool_loader

    yield
    paths = sorted(Path(root).glob("*.tar.gz"))
    for samples in pinpool_loader.Loader(paths, batch_size=batch, workers=workers, epochs=epochs, shuffle=True):
        yield samples
    del samples


def shards_with_torch(root, epochs, batch, workers):
    import tarfile

    import torch.utils.data

    class Samples(torch.utils.data.IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            for path in sorted(Path(root).glob("*.tar.gz"))[worker.id :: worker.num_workers]:
                with tarfile.open(path, "r|gz") as archive:
                    for member in archive:
                        yield torch.frombuffer(bytearray(archive.extractfile(member).read()), dtype=torch.uint8)

    loader = torch.utils.data.DataLoader(Samples(), batch_size=batch, num_workers=workers, collate_fn=_lengths_and_tensor)
    yield
    for _ in range(epochs):
        for whole, lengths in loader:
            yield whole.split(lengths)


def _lengths_and_tensor(samples):
    import torch

    return torch.cat(samples), [len(sample) for sample in samples]


def make_shards(root, count):
    """Shards of 500 samples, of bytes that gzip shortens by a third, about."""
    import io
    import tarfile

    rng, total = random.Random(1), 0
    mu = math.log(MEAN_BYTES) - SIGMA**2 / 2
    for shard in range(count):
        with tarfile.open(root / f"{shard:03}.tar.gz", "w:gz", compresslevel=1) as archive:
            for number in range(500):
                length = min(max(int(rng.lognormvariate(mu, SIGMA)), 1024), 16 << 20)
                info = tarfile.TarInfo(f"{shard}/{number:05}.bin")
                info.size = length
                # Six bits of eight.
                archive.addfile(info, io.BytesIO(rng.randbytes(length).translate(bytes(byte & 0x3F for byte in range(256)))))
                total += length
    return count * 500, total


def pages_of(tensors, torch):
    """Each tensor as bytes, all of whose pages were looked at: a mapped file is read only then."""
    for name in list(tensors):
        tensor = tensors.pop(name).view(torch.uint8).flatten()
        tensor[::4096].max()
        yield tensor


def make_weights(root, gigabytes):
    """Layers of a transformer: matrices of 32 and 88 MB, and short vectors."""
    import torch
    from safetensors.torch import save_file

    tensors, size = {}, 0
    while size < gigabytes * 1e9:
        layer = len(tensors) // 3
        for name, shape in (("attention", (4096, 4096)), ("mlp", (11008, 4096)), ("norm", (4096,))):
            tensors[f"layers.{layer}.{name}"] = torch.randint(-99, 99, shape, dtype=torch.int16).view(torch.bfloat16)
        size = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, root / WEIGHTS)
    return len(tensors), size


WEIGHTS = "model.safetensors"
#: Pixels of a side of a decoded photo.
SIDE = 224

WEIGHT_LOADERS = {
    "pinpool.safetensors.load": weights_with_pinpool,
    "pinpool.safetensors.load, cold": weights_with_pinpool_cold,
    # Maps the file: its pages are those of the page cache, which no device copies from at the speed of the bus.
    "safetensors.torch.load_file": weights_with_safetensors,
    # What a program does that wants them in memory of its own, as to pin it.
    "load_file and a copy": weights_with_safetensors_copied,
}

IMAGE_LOADERS = {
    "pinpool_loader.Loader, decode": images_with_pinpool,
    "DataLoader over Pillow": images_with_torch,
    "webdataset over Pillow": images_with_webdataset,
    "SPDL, threads": images_with_spdl,
}

SHARD_LOADERS = {
    "pinpool_loader.Loader": shards_with_pinpool,
    "DataLoader over tarfile": shards_with_torch,
}

LOADERS = {
    "pinpool_loader.Loader": with_pinpool,
    "pinpool_loader.Loader, cold": with_pinpool_cold,
    "DataLoader, one tensor a batch": with_torch_one_tensor,
    "DataLoader, a tensor a sample": with_torch_lists,
    "SPDL, threads": with_spdl,
}


def family():
    """This process and its descendants."""
    found, parents = [os.getpid()], [os.getpid()]
    while parents:
        pid = parents.pop()
        for task in os.listdir(f"/proc/{pid}/task"):
            children = [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
            found += children
            parents += children
    return found


def pss_kib():
    total = 0
    for pid in family():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return total


class Peak(threading.Thread):
    """Follows the memory of the family, as long as `with` lasts."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.kib = pss_kib()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.05):
            try:
                self.kib = max(self.kib, pss_kib())
            except OSError:
                pass

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


def cpu_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def look(group):
    """The consumer. Nothing of the batch is kept when it returns."""
    samples = nbytes = 0
    for sample in group:
        nbytes += len(sample)
        samples += int(sample[0]) >= 0 <= int(sample[-1])
    return samples, nbytes


def measure(kind, name, root, epochs, batch, workers):
    """One loader in this process; prints the figures as JSON."""
    loaders = {"shards": SHARD_LOADERS, "weights": WEIGHT_LOADERS, "images": IMAGE_LOADERS, "files": LOADERS}[kind]
    batches = loaders[name](root, epochs, batch, workers)
    next(batches)  # imports, lists, and opens nothing
    gc.collect()
    samples = nbytes = 0
    with Peak() as peak:
        cpu, begun = cpu_seconds(), time.perf_counter()
        for group in batches:
            of_group = look(group)
            samples, nbytes = samples + of_group[0], nbytes + of_group[1]
        seconds = time.perf_counter() - begun
        del batches, group
        gc.collect()  # workers end, and their CPU time counts
    cpu = cpu_seconds() - cpu
    print(json.dumps({"samples": samples, "bytes": nbytes, "seconds": seconds, "cpu": cpu, "kib": peak.kib - peak.before}))


def table(rounds, nbytes):
    lines = ["| loader | samples/s | GB/s | CPU s per GB | peak memory, MiB |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, figures in rounds.items():
        middle = sorted(figures, key=lambda figure: figure["seconds"])[len(figures) // 2]
        gigabytes = middle["bytes"] / 1e9
        rate = middle["samples"] / middle["seconds"]
        peak = statistics.median(figure["kib"] for figure in figures) / 1024
        cpu = statistics.median(figure["cpu"] for figure in figures) / gigabytes
        lines.append(f"| {name} | {rate:,.0f} | {gigabytes / middle['seconds']:.2f} | {cpu:.3f} | {peak:,.0f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--weights", type=float, help="GB of weights to load, in place of files")
    parser.add_argument("--shards", type=int, help="number of compressed shards to load, in place of files")
    parser.add_argument("--images", type=int, help="number of photos to decode, in place of files")
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure.split(":", 1), args.folder, args.epochs, args.batch, args.workers)

    root = Path(tempfile.mkdtemp(prefix="bench_loader.", dir=args.folder))
    try:
        kind, loaders = "files", LOADERS
        if args.weights:
            kind, loaders = "weights", WEIGHT_LOADERS
            count, nbytes = make_weights(root, args.weights)
        elif args.shards:
            kind, loaders = "shards", SHARD_LOADERS
            count, nbytes = make_shards(root, args.shards)
        elif args.images:
            kind, loaders = "images", IMAGE_LOADERS
            count, nbytes = make_images(root, args.images)
        else:
            make_files(root, args.files)
            count, nbytes = args.files, sum(os.path.getsize(path) for path in paths_of(root))
        batches = "one load each" if args.weights else f"batches of {args.batch}"
        print(f"{count} { {'weights': 'tensors', 'shards': 'samples'}.get(kind, kind) }, {nbytes / 1e9:.3f} GB; {args.epochs} epochs, {batches}, {args.workers} workers")
        print(f"load average before: {os.getloadavg()[0]:.2f}; {args.rounds} rounds", flush=True)
        rounds = {name: [] for name in loaders}
        settings = [f"--{name}={getattr(args, name)}" for name in ("epochs", "batch", "workers")]
        for _ in range(args.rounds):
            for name in list(rounds):
                command = [sys.executable, __file__, f"--measure={kind}:{name}", f"--folder={root}", *settings]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    print(f"{name}: left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    del rounds[name]
                    continue
                figures = json.loads(done.stdout.splitlines()[-1])
                expected = (count * args.epochs, nbytes * args.epochs)
                if (figures["samples"], figures["bytes"]) != expected:
                    sys.exit(f"{name}: {figures['samples']} samples and {figures['bytes']} B, where {expected} were expected")
                rounds[name].append(figures)
        print(f"load average after: {os.getloadavg()[0]:.2f}\n\n{table(rounds, nbytes)}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
