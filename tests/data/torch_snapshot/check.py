"""Checks a snapshot that `pinpool trace --format pytorch` wrote: `python3 check.py FILE`.

Plays its trace backwards from the end, as memory_viz does, and fails at an entry that has nothing to undo. Prints
`entries N`. If PyTorch is installed, its own functions also read the snapshot; otherwise this prints `skipped: ...`.
"""

import importlib.util
import pickle
import sys
from bisect import bisect_right, insort


def main(path):
    with open(path, "rb") as f:
        snapshot = pickle.load(f)
    segments = {s["address"]: s["total_size"] for s in snapshot["segments"]}
    starts = sorted(segments)
    blocks = {}
    for s in snapshot["segments"]:
        at = s["address"]
        for b in s["blocks"]:
            assert b["address"] == at and 0 < b["size"], (s, b)
            at += b["size"]
            if b["state"] != "inactive":
                blocks[b["address"]] = b["size"]
        assert at == s["address"] + s["total_size"], "blocks fill their segment"

    def segment_of(addr, size):
        i = bisect_right(starts, addr) - 1
        assert i >= 0 and addr + size <= starts[i] + segments[starts[i]], f"{addr:#x} of {size} bytes is in no segment"
        return starts[i]

    def cut(addr, size):
        start = segment_of(addr, size)
        end = start + segments.pop(start)
        starts.remove(start)
        for a, b in [(start, addr), (addr + size, end)]:
            if a < b:
                segments[a] = b - a
                insort(starts, a)

    def add(addr, size):
        end = addr + size
        i = bisect_right(starts, addr) - 1
        if i >= 0 and starts[i] + segments[starts[i]] == addr:
            addr = starts[i]
            segments.pop(addr)
            starts.remove(addr)
        if end in segments:
            starts.remove(end)
            end += segments.pop(end)
        segments[addr] = end - addr
        insort(starts, addr)

    [trace] = snapshot["device_traces"]
    for e in reversed(trace):
        action, addr, size = e["action"], e["addr"], e["size"]
        assert 0 <= addr < 1 << 63 and 0 <= size < 1 << 63 and e["frames"], e
        if action == "free_completed":
            segment_of(addr, size)
            assert addr not in blocks, e
            blocks[addr] = size
        elif action == "free_requested":
            assert blocks[addr] == size, e
        elif action == "alloc":
            assert blocks.pop(addr) == size, e
        elif action == "segment_map":
            cut(addr, size)
        elif action == "segment_unmap":
            add(addr, size)
        else:
            assert action == "oom", e
    assert not blocks and not segments, "each block and segment has an earlier entry"
    print("entries", len(trace))
    if importlib.util.find_spec("torch") is None:
        print("skipped: PyTorch is not installed, so its own functions did not read this")
        return
    from torch.cuda import _memory_viz

    for view in (_memory_viz.segsum, _memory_viz.trace):
        assert view(snapshot), view
    for page in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz" in page(snapshot), page
    print("PyTorch reads it")


main(sys.argv[1])
