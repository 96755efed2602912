"""Measures pinned memory of other libraries on this machine. Prints one JSON line per result and skips missing libraries."""

import json
import time


def report(peer, **figures):
    print(json.dumps({"figure": "peer", "peer": peer, **figures}), flush=True)


def nanoseconds(call, times=2000):
    call()
    begun = time.perf_counter_ns()
    for _ in range(times):
        call()
    return round((time.perf_counter_ns() - begun) / times)


def torch_figures():
    import torch

    if not torch.cuda.is_available():
        return report("torch", skipped="it sees no GPU")
    size = 64 << 20
    torch.cuda.init()
    begun = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    first = time.perf_counter() - begun
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    rate = 20 * size / (time.perf_counter() - begun) / 1e9
    hit = nanoseconds(lambda: torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True))
    report("torch", version=torch.__version__, pin_64_mib_ms=first * 1e3, h2d_gb_per_s=rate, hit_ns=hit)


def cupy_figures():
    import cupy

    pool = cupy.cuda.PinnedMemoryPool()
    begun = time.perf_counter()
    first = pool.malloc(64 << 20)
    took = time.perf_counter() - begun
    del first
    report("cupy", version=cupy.__version__, pin_64_mib_ms=took * 1e3, hit_ns=nanoseconds(lambda: pool.malloc(1 << 20)))


for peer, figures in [("torch", torch_figures), ("cupy", cupy_figures)]:
    try:
        figures()
    except ImportError as why:
        report(peer, skipped=str(why))
    except Exception as why:  # A failing library does not hide the other.
        report(peer, failed=repr(why))
