"""Writes snapshots of PyTorch's memory as `torch.cuda.memory._dump_snapshot` does, without PyTorch or a GPU.

The keys and their order are those of PyTorch 2.14 and 2.15, where
`_record_memory_history(record_pinned_host_memory=True)` adds `host_segments` and `host_traces`.
Run it in this folder: `python3 generate.py`.
"""

import pickle

MIB = 1 << 20
BASE = 0x7F2A_0000_0000
BEGUN_US = 1_790_000_000_000_000

# Shared by many entries, as PyTorch shares them.
LOADER = [
    {"name": "copy_", "filename": "??", "line": 0},
    {"name": "pin_batch", "filename": "/srv/train/loader.py", "line": 41},
]
STATE = [{"name": "save", "filename": "/srv/train/checkpoint.py", "line": 7}]


class History:
    def __init__(self):
        self.entries = []
        self.now_us = BEGUN_US

    def add(self, action, addr, size, frames=None, pool=(0, 0), after_us=100):
        self.now_us += after_us
        entry = {
            "action": action,
            "addr": addr,
            "size": size,
            "stream": 0,
            "time_us": self.now_us,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": pool,
        }
        if frames is not None:
            entry["frames"] = frames
        self.entries.append(entry)


def history():
    """Two loader buffers that are used alternately, a checkpoint buffer in a separate pool, and incomplete entries."""
    h = History()
    # It was allocated before the history begins.
    h.add("free_completed", BASE + 512 * MIB, 4096)
    for n in range(2):
        h.add("segment_alloc", BASE + n * MIB, MIB, LOADER)
        h.add("alloc", BASE + n * MIB, MIB, LOADER)
    for step in range(10):
        addr = BASE + step % 2 * MIB
        h.add("free_requested", addr, MIB, LOADER)
        h.add("free_completed", addr, MIB, LOADER, after_us=2000)
        h.add("alloc", addr, MIB, LOADER)
    h.add("segment_alloc", BASE + 64 * MIB, 16 * MIB, STATE, (0, 1))
    h.add("alloc", BASE + 64 * MIB, 16 * MIB, STATE, (0, 1))
    h.add("snapshot", 0, 0)
    # Recorded with skip_actions=["free_requested"].
    h.add("free_completed", BASE + 64 * MIB, 16 * MIB, STATE, (0, 1))
    h.add("segment_free", BASE + 64 * MIB, 16 * MIB, None, (0, 1))
    return h.entries


def snapshot(host_traces):
    host_segments = [
        {"address": BASE + n * MIB, "size": MIB, "allocated": True, "active": True, "segment_pool_id": (0, 0), "frames": LOADER}
        for n in range(2)
    ]
    return {
        "segments": [],
        "device_traces": [[]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "garbage_collection_threshold": 0.0, "expandable_segments": False},
        "external_annotations": [],
        "host_segments": host_segments if host_traces else [],
        "host_traces": host_traces,
    }


def main():
    with open("host.4.pickle", "wb") as f:
        pickle.dump(snapshot(history()), f, 4)
    with open("object.pickle", "wb") as f:
        pickle.dump({"segments": [pathlike()], "host_traces": []}, f)


def pathlike():
    import pathlib

    return pathlib.PurePosixPath("/")


if __name__ == "__main__":
    main()
