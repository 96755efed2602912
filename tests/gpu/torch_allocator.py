"""Tests `pinpool.torch.install` on a GPU: copies, a graph and a DataLoader, with every byte compared. Prints whether torch considers the
memory of each backend pinned, which only a test on a GPU can check. Exits with 77 if torch or a GPU is missing.
"""

import json
import sys

try:
    import torch
except ImportError:
    print("no torch", file=sys.stderr)
    sys.exit(77)

if not torch.cuda.is_available():
    print("torch finds no GPU", file=sys.stderr)
    sys.exit(77)

import pinpool
import pinpool.torch


def same(got, expected, what):
    assert torch.equal(got.cpu(), expected.cpu()), f"{what}: wrong bytes"


def round_trips(empty):
    """Copies that run while the memory of `empty(length)` is freed and used again."""
    stream = torch.cuda.Stream()
    kept = []
    for value in range(200):
        source = empty(1 << 18).fill_(value % 251)
        with torch.cuda.stream(stream):
            kept.append((value % 251, source.to("cuda", non_blocking=True)))
        del source
    stream.synchronize()
    for value, there in kept:
        same(there, torch.full_like(there, value), "non_blocking")


def graph():
    """A captured copy reads its source at each replay; pinned memory is allocated and freed during the capture."""
    source = torch.arange(1 << 16, dtype=torch.int32).pin_memory()
    target = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        other = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
        target.copy_(source, non_blocking=True)
        del other
    for value in (1, 2):
        source.add_(value)
        captured.replay()
        torch.cuda.synchronize()
        same(target, source, "graph")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((4096,), index, dtype=torch.int64)


def loader():
    batches = torch.utils.data.DataLoader(Numbers(), batch_size=16, num_workers=2, pin_memory=True, multiprocessing_context="spawn")
    for number, batch in enumerate(batches):
        there = batch.to("cuda", non_blocking=True)
        same(there[:, 0], torch.arange(16) + 16 * number, "DataLoader")


def is_pinned():
    """Returns whether torch, which asks the driver, considers the memory of each backend pinned."""
    found = {}
    for backend in ("vmm", "register", "cuda"):
        try:
            buf = pinpool.Pool(env=False, backend=backend).get(4 << 20)
        except pinpool.PinpoolError as why:
            found[backend] = str(why)[:100]
            continue
        found[backend] = torch.frombuffer(memoryview(buf), dtype=torch.uint8).is_pinned()
    return found


def main():
    before = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    pool = pinpool.torch.install()
    ours = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    figures = {"torch": torch.__version__, "backend": pool.stats()["backend"], "is_pinned": is_pinned(), "empty_is_pinned": ours.is_pinned()}
    assert pool.stats()["memory"]["in_use"] == 1, "the tensor does not come from the pool"
    round_trips(lambda length: torch.empty(length, dtype=torch.uint8, pin_memory=True))
    other = pinpool.Pool(env=False, backend="gpu")
    round_trips(lambda length: other.empty(length, torch.uint8))  # torch reports these copies too.
    graph()
    loader()
    del before, ours
    torch.cuda.synchronize()
    torch.cuda.host_memory_stats()
    torch._C._host_emptyCache()
    stats = pool.stats()
    assert (stats["memory"]["quarantined"], stats["memory"]["in_use"]) == (0, 0), stats
    assert pinpool.torch.uninstall() == 0
    after = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert after.is_pinned() and pool.stats()["memory"]["in_use"] == 0
    print(json.dumps({"figure": "torch_allocator", **figures, "served": stats["requests"]["served"]}))


if __name__ == "__main__":
    main()
