"""What the wheel does with a GPU beside torch's allocator: loaded batches on the GPU, weights, and the pinned memory of CuPy, Numba
and JAX, every byte compared. One JSON line; each library that is not installed is named in it. Exits with 77 without a GPU.
"""

import gc
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import pinpool


def cupy(pool):
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


def numba(pool):
    """Copies to the GPU and back by the default stream, whose pinned memory is dropped while they run."""
    from numba import cuda

    import pinpool.numba

    cuda.set_memory_manager(pinpool.numba.memory_manager(pool))
    for value in range(100):
        host = cuda.pinned_array(1 << 18, dtype=np.uint8)
        host[:] = value
        there = cuda.to_device(host, stream=cuda.default_stream())
        del host
        assert (there.copy_to_host() == value).all()


def jax(pool):
    """One buffer as an array of the host, then on the GPU."""
    import jax

    with pool.get(1 << 20) as buf:
        np.frombuffer(memoryview(buf), np.uint8)[:] = 7
        here = jax.numpy.from_dlpack(buf)
        there = jax.device_put(here, jax.devices("gpu")[0])
        assert int((there == 7).sum()) == 1 << 20
        del here, there
        gc.collect()


def loader(pool):
    """Batches in the memory of the GPU, taken over by torch while the next ones arrive."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        files = [np.random.default_rng(number).bytes(100_000 + number) for number in range(200)]
        for number, content in enumerate(files):
            (pathlib.Path(folder) / f"{number:03}").write_bytes(content)
        arrived = []
        for batch in pinpool.Loader(folder, batch_size=16, device="cuda:0", pool=pool):
            arrived += [tensor.clone() for tensor in batch.tensors()]
        assert [bytes(tensor.cpu().numpy()) for tensor in arrived] == files


def weights(pool):
    """A file of weights on the GPU."""
    import safetensors.torch
    import torch

    import pinpool.safetensors

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        expected = {f"layer{number}": torch.randn(1000, 1 + number) for number in range(50)}
        safetensors.torch.save_file(expected, path)
        loaded = pinpool.safetensors.load(path, "cuda:0", library="torch", pool=pool)
        assert all(tensor.device.type == "cuda" and torch.equal(tensor.cpu(), expected[name]) for name, tensor in loaded.items())
        assert loaded.keys() == expected.keys()


NEEDS = {"loader": "torch", "weights": "safetensors", "cupy": "cupy", "numba": "numba", "jax": "jax"}


def alone(name):
    """In a process of its own: each library has its own way to start CUDA."""
    pool = pinpool.Pool(env=False, max_bytes="1GiB")
    globals()[name](pool)
    gc.collect()
    stats = pool.stats()
    assert stats["memory"]["quarantined"] == 0, stats
    print(json.dumps({"backend": stats["backend"], "gets": stats["requests"]["hits"] + stats["requests"]["misses"], "misses": stats["requests"]["misses"]}))


def main():
    found, wrong = {}, 0
    for name, needs in NEEDS.items():
        if importlib.util.find_spec(needs) is None:
            found[name] = f"{needs} is not installed"
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
