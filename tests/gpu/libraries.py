"""Copies by torch, CuPy and JAX to a GPU from memory of the wheel's pool, with every byte compared. Prints one JSON line,
which also names the libraries that are not installed.
"""

import gc
import importlib.util
import json
import subprocess
import sys

import numpy as np

import pinpool


def check_cupy(pool):
    """Copies that run while CuPy drops their pinned memory."""
    import cupy
    import cupyx

    import pinpool.cupy

    pinpool.cupy.install(pool)
    stream = cupy.cuda.Stream(non_blocking=True)
    kept = []
    for value in range(200):
        host = cupyx.empty_pinned((1 << 18,), dtype=np.uint8)
        host[:] = value % 251
        with stream:
            there = cupy.empty(host.shape, dtype=np.uint8)
            there.set(host, stream=stream)
        kept.append((value % 251, there, host))
        if len(kept) == 20:
            stream.synchronize()
            assert all((there == value).all() for value, there, host in kept)
            kept = []
    pinpool.cupy.uninstall()


def check_jax(pool):
    """Uses one buffer as a host array, then copies it to the GPU."""
    import jax

    with pool.get(1 << 20) as buf:
        np.frombuffer(memoryview(buf), np.uint8)[:] = 7
        here = jax.numpy.from_dlpack(buf)
        there = jax.device_put(here, jax.devices("gpu")[0])
        assert int((there == 7).sum()) == 1 << 20
        del here, there
        gc.collect()


def check_torch(pool):
    """Copies that run while their pinned tensors are dropped."""
    import torch

    kept = []
    for value in range(200):
        host = pool.empty((1 << 20,), "uint8", library="torch").fill_(value)
        kept.append(host.to("cuda", non_blocking=True))
        pinpool.record_stream(host, torch.cuda.current_stream())
        del host
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(kept))


CHECKS = {"torch": check_torch, "cupy": check_cupy, "jax": check_jax}


def alone(name):
    """Runs in a separate process, because each library starts CUDA in its own way."""
    pool = pinpool.Pool(env=False, max_bytes="1GiB")
    CHECKS[name](pool)
    gc.collect()
    stats = pool.stats()
    assert stats["memory"]["quarantined"] == 0, stats
    print(json.dumps({"backend": stats["backend"], "served": stats["requests"]["served"], "misses": stats["requests"]["misses"]}))


def main():
    found, wrong = {}, 0
    for name in CHECKS:
        if importlib.util.find_spec(name) is None:
            found[name] = f"{name} is not installed"
            continue
        ended = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=100)
        if ended.returncode == 0:
            found[name] = json.loads(ended.stdout.splitlines()[-1])
        else:
            wrong += 1
            found[name] = f"exit status {ended.returncode}"
            print(f"{name}: {ended.stderr}", file=sys.stderr)
    print(json.dumps({"figure": "libraries", **found}))
    sys.exit(wrong != 0)


if __name__ == "__main__":
    alone(sys.argv[1]) if len(sys.argv) > 1 else main()
