"""Replaces libcuda by the mock driver, for code in a separate process.

Uses the library from `cargo build -p mock_driver`; PINPOOL_MOCK_DRIVER names another one.
"""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[3]
PLACES = [pathlib.Path(os.environ.get("PINPOOL_MOCK_DRIVER", "-")), ROOT / "target" / "debug" / "libmock_driver.so"]
MOCK_DRIVER = next((place for place in PLACES if place.is_file()), None)

DEFINITIONS = """
import asyncio, ctypes, gc, os, pathlib, threading, time
import numpy as np
import pinpool

cuda = ctypes.CDLL("libcuda.so")
cuda.mock_driver_hold_stream.argtypes, cuda.mock_driver_hold_stream.restype = [ctypes.c_size_t, ctypes.c_int], ctypes.c_size_t
cuda.mock_driver_wait_for_held.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
cuda.mock_driver_calls.argtypes, cuda.mock_driver_calls.restype = [ctypes.c_char_p], ctypes.c_uint64
cuda.mock_driver_wrong_uses.restype = ctypes.c_size_t

def driver(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name} answered {code}"

context, target = ctypes.c_void_p(), ctypes.c_uint64()

def use_gpu(number):
    driver("cuInit", 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    driver("cuCtxSetCurrent", context)

def new_stream():
    stream = ctypes.c_void_p()
    driver("cuStreamCreate", ctypes.byref(stream), 1)
    return stream.value

def copy(buf, stream):
    driver("cuMemcpyHtoDAsync_v2", target, ctypes.c_void_p(buf.ptr), ctypes.c_size_t(len(buf)), ctypes.c_void_p(stream))

def on_device(size):
    driver("cuCtxSynchronize")
    bytes_ = (ctypes.c_ubyte * size)()
    driver("cuMemcpyDtoH_v2", bytes_, target, ctypes.c_size_t(size))
    return set(bytes_)

def hold(stream=0): cuda.mock_driver_hold_stream(stream, 1)
def let_run(stream=0): cuda.mock_driver_hold_stream(stream, 0)

def pool_of(**settings):
    settings = {"backend": "cuda", "preset": "tensorflow", "maintenance_thread": False} | settings
    return pinpool.Pool(env=False, **settings)

def buffer_counts(pool):
    pool.maintain()
    stats = pool.stats()
    return stats["copies"]["in_flight"], stats["memory"]["in_use"], stats["memory"]["idle"]

def wait_for_counts(pool, state):
    end = time.monotonic() + 300  # Only bounds a hang.
    while buffer_counts(pool) != state:
        assert time.monotonic() < end, buffer_counts(pool)
        time.sleep(0.001)

SIZE = 65536
SHARED = {"preset": "adaptive", "max_bytes": 3 * SIZE // 2, "ledger": f"python-{os.getpid()}"}

def let_another_pool_want_memory(pool):
    threading.Thread(target=pool_of(**SHARED).get, args=[SIZE // 2]).start()
    while not pool.stats()["limits"]["shared"]["others_wanted_bytes"]: pass
    pool.maintain()
"""
PRELUDE = (
    DEFINITIONS
    + """
use_gpu(0)
driver("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(1 << 20))
"""
)


def mock_driver_environment(folder):
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).symlink_to(MOCK_DRIVER)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}
