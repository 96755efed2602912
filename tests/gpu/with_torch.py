"""Copies through a pool and through PyTorch's pinned memory in one process, with every byte compared.

    with_torch.py LIBRARY [ROUNDS] [--without-torch]

LIBRARY is the shared library of tests/in_process. Prints one JSON line. The exit status is 0 if all bytes are
correct, 77 if PyTorch or a GPU is missing, and 1 otherwise. --without-torch runs only the pool.
"""

import ctypes
import importlib
import json
import sys
import threading
from typing import Any

SKIPPED = 77


def report(**figures):
    print(json.dumps({"figure": "with_torch", **figures}), flush=True)


def skip(why):
    report(outcome="skipped", why=why)
    sys.exit(SKIPPED)


def torch_round(torch, size, seed):
    """Copies a pinned tensor to the device and back. Returns whether all bytes are right."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        device = source.to("cuda", non_blocking=True)
        back = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        back.copy_(device, non_blocking=True)
    stream.synchronize()
    return bool(torch.equal(source, back))


def main():
    arguments = [word for word in sys.argv[1:] if not word.startswith("--")]
    library, rounds = arguments[0], int((arguments + ["", "300"])[1] or 300)
    torch: Any = None
    if "--without-torch" not in sys.argv:
        try:
            torch = importlib.import_module("torch")
        except ImportError as why:
            skip(str(why))
        if not torch.cuda.is_available():
            skip("PyTorch sees no GPU")
        torch.cuda.init()
    pool = ctypes.CDLL(library)
    pool.pinpool_rounds.restype = ctypes.c_int64
    result = []
    # A call through ctypes releases the interpreter's lock, so the other thread can run.
    thread = threading.Thread(target=lambda: result.append(pool.pinpool_rounds(ctypes.c_uint32(rounds))))
    thread.start()
    right = wrong = 0
    while torch and (thread.is_alive() or right < 3):
        size = 1 + (right * 7919 * 4096) % (24 << 20)
        if torch_round(torch, size, right):
            right += 1
        else:
            wrong += 1
            break
    thread.join()
    if torch:
        # PyTorch's memory still works after the end of the pool.
        wrong += not torch_round(torch, 8 << 20, 1)
    is_right = result == [0] and wrong == 0
    version = torch.__version__ if torch else None
    report(
        outcome="ok" if is_right else "failed",
        torch=version,
        pool_rounds=rounds,
        pool_wrong_bytes=result[0] if result else None,
        torch_rounds=right,
        torch_wrong=wrong,
    )
    sys.exit(0 if is_right else 1)


main()
