"""Converts the history of torch's pinned memory into a trace that the tool ``pinpool`` reads.

    torch.cuda.memory._record_memory_history(record_pinned_host_memory=True)   # of PyTorch 2.14 and later
    ...
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

    python -m pinpool.torch.snapshot snapshot.pickle trace.gz                  # then: pinpool advise trace.gz

Needs neither torch nor a GPU. A pickle is read as data alone: one that names a class or a function is refused.

In the history each buffer is a call of the driver of its own, whose length is rounded up to a power of two: a ``segment_alloc``, and
at the same address an ``alloc`` for each use. The length that was requested is not in it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Iterator

from .._errors import PinpoolError

__all__ = ["convert"]

# Most bytes of a snapshot.
_BYTES_MAX = 1 << 30
# Most tags: half of what a reader of traces takes.
_TAGS_MAX = 32_768
# docs/trace-format.md has the format: the kinds of items and records, and how long a text and a block may be.
_POOL, _FACTS, _TAG = 65, 66, 67
_GET, _REFUSED, _PUT, _COMPLETED, _NEW, _GONE, _PIN, _UNPIN = 1, 2, 3, 4, 6, 7, 8, 9
_TEXT_BYTES_MAX = 4096
_BLOCK_BYTES = 1 << 19
_NO_HISTORY = (
    "it has no history of pinned memory (`host_traces`): torch.cuda.memory._record_memory_history(record_pinned_host_memory=True) "
    "records it, of PyTorch 2.14 and later"
)


def convert(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Writes what the snapshot in the file ``source`` tells of pinned memory to the file ``target``, as a trace.

    Args:
        source: what ``torch.cuda.memory._dump_snapshot`` wrote, plain or compressed by gzip.
        target: the trace; compressed if its name ends in ``.gz``.

    Raises:
        PinpoolError: the file is no snapshot, has no history of pinned memory, or is also the target.
        OSError: a file cannot be read or written.
    """
    if os.path.exists(target) and os.path.samefile(source, target):
        raise PinpoolError(f"{os.fspath(target)}: this is the snapshot: name another file for the trace")
    try:
        trace = _trace(_Importer(_load(source)))
    except PinpoolError as error:
        raise PinpoolError(f"{os.fspath(source)}: {error}") from error
    opened = gzip.open if os.fspath(target).endswith(".gz") else open
    with opened(target, "wb") as file:
        file.write(trace)


class _Data(pickle.Unpickler):
    """Reads data alone."""

    def find_class(self, module, name):
        raise PinpoolError(
            f"the pickle names {module}.{name}, and a snapshot is made of dictionaries, lists, texts and numbers alone"
        )

    def persistent_load(self, _name):
        raise PinpoolError("the pickle names something outside itself, which a snapshot does not")


def _load(source) -> dict:
    with open(source, "rb") as file:
        data = gzip.open(file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        try:
            pickled = data.read(_BYTES_MAX + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PinpoolError(f"the compressed data is damaged or cut off ({error}): copy the file again") from error
    if len(pickled) > _BYTES_MAX:
        raise PinpoolError(f"it has over {_BYTES_MAX} bytes, the most that is read: record less history (max_entries)")
    try:
        snapshot = _Data(io.BytesIO(pickled)).load()
    except PinpoolError:
        raise
    except Exception as error:  # Bytes that are no pickle end in errors of any kind.
        why = f"{type(error).__name__}: {error}"
        raise PinpoolError(f"it cannot be read as a pickle ({why}): it is cut off, damaged or something else") from error
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} & snapshot.keys():
        raise PinpoolError("it is a pickle of something else: it has neither `segments` nor `device_traces`")
    return snapshot


class _Importer:
    """What the entries of a snapshot become: records as (time in ns, pool, kind, numbers), pools and tags."""

    def __init__(self, snapshot: dict):
        self.records: list[tuple] = []
        self.pools: dict[tuple[int, int], int] = {}
        self.tags: dict[str, int] = {}
        self._begun_us = None
        # Buffers that are held, and of those the ones that were given back while copies used them.
        self._held: set[tuple] = set()
        self._requested: set[tuple] = set()
        for number, entry in enumerate(_entries(snapshot)):
            try:
                self._add(entry)
            except PinpoolError as error:
                raise PinpoolError(f"entry {number} of host_traces: {error}") from error
        if not self.records:
            raise PinpoolError(_NO_HISTORY)
        self.records.sort(key=lambda record: record[0])

    def _add(self, entry) -> None:
        if not isinstance(entry, dict):
            raise PinpoolError("not a dictionary")
        action = entry.get("action")
        if not isinstance(action, str):
            raise PinpoolError("`action` is no text")
        # Marks of the user, which change no memory.
        if action in ("snapshot", "annotate"):
            return
        size, pool = _unsigned(entry, "size"), self._pool(entry)
        tag = self._tag(entry) if action in ("alloc", "oom") else 0
        if action == "oom":
            return self._record(entry, pool, (_REFUSED, size, size, tag, 0))
        address = _unsigned(entry, "addr")
        buffer = (pool, address)
        match action:
            case "segment_alloc" | "segment_map":
                self._record(entry, pool, (_PIN, address, size, 0, 0), (_NEW, address, address, size, 1))
            case "segment_free" | "segment_unmap":
                self._record(entry, pool, (_GONE, address), (_UNPIN, address, size, 0, 0))
            case "alloc":
                self._requested.discard(buffer)
                self._held.add(buffer)
                self._record(entry, pool, (_GET, address, size, size, tag, 0))
            # Of buffers that were got before the history begins, nothing is known.
            case "free_requested" | "free_completed" if buffer not in self._held:
                self._record(entry, pool)
            case "free_requested":
                self._requested.add(buffer)
                self._record(entry, pool, (_PUT, address, 1))
            case "free_completed":
                self._held.discard(buffer)
                # Recording may skip requests.
                was_requested = buffer in self._requested
                self._requested.discard(buffer)
                self._record(entry, pool, (_COMPLETED, address) if was_requested else (_PUT, address, 0))
            case _:
                raise PinpoolError(f"`{action[:40]}` is no action that is known")

    def _record(self, entry, pool, *events) -> None:
        """Adds events at the time of an entry, which is counted from the first entry on."""
        now_us = entry.get("time_us")
        if not _is_number(now_us):
            now_us = self._begun_us or 0
        if self._begun_us is None:
            self._begun_us = now_us
        time_ns = min(max(now_us - self._begun_us, 0) * 1000, (1 << 63) - 1)
        self.records.extend((time_ns, pool, *event) for event in events)

    def _pool(self, entry) -> int:
        match entry.get("pool_id"):
            case [first, second] if _is_number(first) and _is_number(second):
                pool = (first, second)
            case _:
                pool = (0, 0)
        return self.pools.setdefault(pool, len(self.pools))

    def _tag(self, entry) -> int:
        """Who asked: the innermost frame of Python, if the history has any; else the innermost of all."""
        frames = entry.get("frames")
        frames = [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, (list, tuple)) else []
        if not frames:
            return 0
        frame = next((frame for frame in frames if _words(frame, "filename").endswith(".py")), frames[0])
        line = frame.get("line")
        name = f"{_words(frame, 'filename')}:{line if _is_number(line) else 0} {_words(frame, 'name')}"
        if name not in self.tags and len(self.tags) >= _TAGS_MAX:
            return 0
        return self.tags.setdefault(name, len(self.tags) + 1)


def _entries(snapshot: dict) -> Iterator:
    """One list, or one for each device as those of the device's memory are."""
    traces = snapshot.get("host_traces")
    for trace in traces if isinstance(traces, (list, tuple)) else ():
        if isinstance(trace, (list, tuple)):
            yield from trace
        else:
            yield trace


def _unsigned(entry: dict, key: str) -> int:
    value = entry.get(key)
    if not _is_number(value) or value < 0:
        raise PinpoolError(f"`{key}` is no number of bytes or address")
    return value


def _is_number(value) -> bool:
    """Whether it is a whole number that has a place in a trace: a pickle may hold one of a million digits."""
    return type(value) is int and abs(value) < 1 << 64


def _words(frame: dict, key: str) -> str:
    value = frame.get(key)
    return value if isinstance(value, str) else "?"


def _trace(history: _Importer) -> bytes:
    """The trace as the tool reads it, which docs/trace-format.md describes."""
    trace = bytearray(b"PINPOOLT" + struct.pack("<I", 1))
    items = bytearray()
    for (first, second), number in history.pools.items():
        name = "torch" if (first, second) == (0, 0) else f"torch pool {first}.{second}"
        items += bytes([_FACTS]) + _numbers(number, 2)
        items += b"".join(map(_text, ("backend", "torch", "name", name)))
        _end_block(trace, items, _BLOCK_BYTES)
    for name, number in history.tags.items():
        items += bytes([_TAG]) + _numbers(number) + _text(name)
        _end_block(trace, items, _BLOCK_BYTES)
    # A block begins at time 0 and in no pool.
    before, pool_before = 0, None
    for time_ns, pool, kind, *numbers in history.records:
        if pool != pool_before:
            items += bytes([_POOL]) + _numbers(pool)
        # Times are in order, so that their differences in zigzag are even.
        items += bytes([kind]) + _numbers(2 * (time_ns - before), *numbers)
        before, pool_before = (0, None) if _end_block(trace, items, _BLOCK_BYTES) else (time_ns, pool)
    _end_block(trace, items, 1)
    return bytes(trace)


def _end_block(trace: bytearray, items: bytearray, length: int) -> bool:
    """Adds the items to the trace as a block if they have this length."""
    if len(items) < length:
        return False
    trace += struct.pack("<II", len(items), zlib.crc32(items)) + items
    items.clear()
    return True


def _numbers(*numbers: int) -> bytes:
    """In LEB128."""
    encoded = bytearray()
    for number in numbers:
        while number >= 0x80:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _text(text: str) -> bytes:
    # Cut between two characters.
    encoded = text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore").encode()
    return _numbers(len(encoded)) + encoded


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pinpool.torch.snapshot", description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", metavar="SNAPSHOT.pickle", help="what torch.cuda.memory._dump_snapshot wrote")
    parser.add_argument("trace", metavar="TRACE", help="the trace; compressed if its name ends in .gz")
    files = parser.parse_args()
    try:
        convert(files.snapshot, files.trace)
    except (PinpoolError, OSError) as error:
        print(f"pinpool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
