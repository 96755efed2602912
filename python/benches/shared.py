#!/usr/bin/env python3
"""torch's DataLoader with and without pinpool's shared buffers: GB/s and CPU seconds.

    pip install './python[torch]'
    python python/benches/shared.py [--workers 4] [--batches 200] [--rounds 3] [--megabytes 8]

A sample is a copy of prepared random bytes, and a batch has 16 samples. All loaders have the same number of worker processes, started by
Python's default method, and read the same number of batches ahead. The trainer reads one byte of each 4 KiB page of a batch. Each loader
runs in a separate process, and the loaders alternate over several rounds. Each number in the table is its median over the rounds.

| row | the batch in the trainer |
| --- | --- |
| `torch` + `shared.collate` | pinned, in the memory that the worker wrote |
| `torch` | pageable, in memory that the worker shares by a file descriptor |
| `torch`, copied to pinned | the same, then copied by a thread into a buffer of a `Pool`, in place of `pin_memory=True` |

CPU seconds cover the process and its workers. "copied" counts the bytes that the trainer copies between host buffers.
"""

import argparse
import gc
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import threading
import time

BATCH = 16


class Samples:
    def __init__(self, batches, sample_bytes):
        import numpy as np

        self.length, self.sample_bytes = batches * BATCH, sample_bytes
        self.source = np.random.default_rng(1).integers(0, 256, 4 * sample_bytes, np.uint8)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        begin = (index * 4099) % (3 * self.sample_bytes)
        return self.source[begin : begin + self.sample_bytes].copy()


def described(shared):
    return f"{shared.pinned_by or 'nothing'}{', hugetlb pages' if shared.is_hugetlb else ''}"


def torch_loader(samples, workers, **settings):
    from torch.utils.data import DataLoader

    return DataLoader(samples, batch_size=BATCH, num_workers=workers, prefetch_factor=2, **settings)


# Each of the following functions returns what pins the batches, and the batches.


def with_shared_collate(samples, workers, hugetlb):
    import pinpool

    shared = pinpool.SharedPool(BATCH * samples.sample_bytes, 3 * workers + 3, hugetlb=hugetlb, library="numpy")
    loader = torch_loader(samples, workers, collate_fn=shared.collate)
    return described(shared), shared.batches(loader)


def with_torch(samples, workers, _hugetlb):
    loader = torch_loader(samples, workers)

    def batches():
        for batch in loader:
            yield batch.numpy()

    return "none", batches()


def with_torch_copied(samples, workers, _hugetlb):
    import numpy as np

    import pinpool

    pool, loader, copied = pinpool.Pool(), torch_loader(samples, workers), queue.Queue(1)
    pool.get(BATCH * samples.sample_bytes).release()

    def copy():
        for batch in loader:
            array = pool.empty(tuple(batch.shape), np.uint8)
            np.copyto(array, batch.numpy())
            copied.put(array)
            del array
        copied.put(None)

    def batches():
        threading.Thread(target=copy, daemon=True).start()
        while (array := copied.get()) is not None:
            yield array

    return pool.backend, batches()


LOADERS = {
    "torch + shared.collate": (with_shared_collate, False),
    "torch": (with_torch, False),
    "torch, copied to pinned": (with_torch_copied, True),
}


def cpu_seconds():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def run(name, args):
    sample_bytes = args.megabytes * (1 << 20) // BATCH
    samples = Samples(args.batches, sample_bytes)
    make, copies = LOADERS[name]
    pinned_by, batches = make(samples, args.workers, "off" if args.no_hugetlb else "auto")
    begun, cpu, own = time.perf_counter(), cpu_seconds(), resource.getrusage(resource.RUSAGE_SELF)
    count = checked = copied = 0
    for batch in batches:
        assert batch.shape == (BATCH, sample_bytes)
        checked += int(batch[:, ::4096].astype("uint64").sum())
        copied += batch.nbytes if copies else 0
        count += 1
        del batch
    del batches
    gc.collect()
    taken = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_SELF)
    trainer = used.ru_utime + used.ru_stime - own.ru_utime - own.ru_stime
    assert count == args.batches
    result = {"seconds": taken, "cpu": cpu_seconds() - cpu, "trainer": trainer, "copied": copied, "sum": checked, "pinned_by": pinned_by}
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=8, help="of one batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-hugetlb", action="store_true", help="shared buffers in pages of the usual size")
    parser.add_argument("--only", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return run(args.only, args)
    results = {name: [] for name in LOADERS}
    for _ in range(args.rounds):
        for name in LOADERS:
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], capture_output=True, text=True)
            if done.returncode == 0:
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
            elif not results[name]:
                print(f"{name}: left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    assert len({result["sum"] for rounds in results.values() for result in rounds}) == 1, "all loaders give the same bytes"
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"{args.workers} workers, {args.batches} batches of {args.megabytes} MiB, {cores} cores, load {load:.1f}; median of {args.rounds}")
    print("| loader | GB/s | CPU s | of the trainer | copied by the trainer | pinned by |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, rounds in results.items():
        if rounds:

            def median(key, rounds=rounds):
                return statistics.median(result[key] for result in rounds)

            rate = args.batches * args.megabytes * (1 << 20) / median("seconds") / 1e9
            copied = f"{median('copied') / 1e9:.1f} GB"
            print(f"| {name} | {rate:.2f} | {median('cpu'):.2f} | {median('trainer'):.2f} | {copied} | {rounds[0]['pinned_by']} |")


if __name__ == "__main__":
    main()
