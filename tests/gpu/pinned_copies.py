"""A torch program without any pinpool code, for `pinpool run`. Copies pinned tensors of many sizes to the GPU and back,
frees them while their copies run, and compares the bytes. Its output is the same with and without a pool. Exits with 77
if torch or a GPU is missing.
"""

import sys

try:
    import torch
except ImportError:
    print("no torch", file=sys.stderr)
    sys.exit(77)

if not torch.cuda.is_available():
    print("torch finds no GPU", file=sys.stderr)
    sys.exit(77)

right = 0
stream = torch.cuda.Stream()
for value in range(100):
    size = 1 + (value * 7919 * 4096) % (24 << 20)
    source = torch.full((size,), value, dtype=torch.uint8).pin_memory()
    with torch.cuda.stream(stream):
        there = source.to("cuda", non_blocking=True)
    del source
    stream.synchronize()
    back = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    back.copy_(there)
    right += bool((back == value).all())
    # torch caches freed blocks. With an empty cache, each tensor makes an allocation.
    torch._C._host_emptyCache()
print(f"{right} of 100 tensors came back right; pinned: {back.is_pinned()}")
sys.exit(right != 100)
