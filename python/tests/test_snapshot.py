"""Snapshots of torch's memory as traces: what becomes of each entry, and what is refused. torch is not needed."""

import gzip
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import pinpool
from pinpool.torch import snapshot

DATA = Path(__file__).parents[2] / "tests" / "data" / "torch_snapshot"


def entry(action, addr=64, size=32, **more):
    return {"action": action, "addr": addr, "size": size, "time_us": 1000, "pool_id": (0, 0), **more}


def pickled(*entries, **more):
    return pickle.dumps({"segments": [], "host_traces": list(entries), **more})


class Trace:
    """A trace, read as docs/trace-format.md describes it."""

    # The numbers of each kind of record behind its time.
    NUMBERS = {1: 5, 2: 4, 3: 2, 4: 1, 6: 4, 7: 1, 8: 4, 9: 4}

    def __init__(self, data):
        assert data[:12] == b"PINPOOLT\1\0\0\0"
        self.pools, self.tags, self.records = {}, {}, []
        self.blocks = 0
        at = 12
        while at < len(data):
            length, checksum = struct.unpack_from("<II", data, at)
            items = data[at + 8 : at + 8 + length]
            assert 0 < len(items) == length <= 1 << 20 and zlib.crc32(items) == checksum
            self._read_block(io.BytesIO(items))
            at += 8 + length

    def _read_block(self, items):
        self.blocks += 1
        pool = now = 0
        while kind := items.read(1):
            match kind[0]:
                case 65:
                    pool = self._number(items)
                case 66:
                    number, facts = self._number(items), self._number(items)
                    self.pools[number] = {self._text(items): self._text(items) for _ in range(facts)}
                case 67:
                    number = self._number(items)
                    self.tags[number] = self._text(items)
                case kind:
                    step = self._number(items)
                    now += step // 2 if step % 2 == 0 else -(step + 1) // 2
                    self.records.append((now, pool, kind, *(self._number(items) for _ in range(self.NUMBERS[kind]))))

    def _number(self, items):
        number = shift = 0
        while True:
            byte = items.read(1)[0]
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def _text(self, items):
        length = self._number(items)
        assert length <= 4096
        return items.read(length).decode()


@pytest.fixture
def convert(tmp_path):
    """Converts the bytes of a snapshot, and reads the trace."""

    def run(data):
        source, target = tmp_path / "s.pickle", tmp_path / "t.trace"
        source.write_bytes(data)
        target.unlink(missing_ok=True)
        try:
            snapshot.convert(source, target)
        except pinpool.PinpoolError as error:
            assert str(error).startswith(f"{source}: ")
            assert not target.exists()
            raise
        return Trace(target.read_bytes())

    return run


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_snapshot_is_the_trace_that_the_tool_is_tested_with(tmp_path, protocol):
    target = tmp_path / "t.trace"
    snapshot.convert(DATA / f"host.{protocol}.pickle", target)
    assert target.read_bytes() == (DATA / "host.trace").read_bytes()


def test_snapshots_and_traces_may_be_compressed(tmp_path):
    packed, target = tmp_path / "host.pickle.gz", tmp_path / "t.trace.gz"
    packed.write_bytes(gzip.compress((DATA / "host.4.pickle").read_bytes()))
    snapshot.convert(packed, target)
    assert gzip.decompress(target.read_bytes()) == (DATA / "host.trace").read_bytes()
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(pinpool.PinpoolError, match="damaged or cut off"):
        snapshot.convert(packed, target)


def test_each_action_becomes_its_records(convert):
    frames = [{"filename": "??", "name": "copy_", "line": 0}, {"filename": "/a.py", "name": "pin", "line": 4}]
    trace = convert(
        pickled(
            entry("free_requested", 1),  # Of a buffer that was got before the history begins.
            entry("free_completed", 1),
            entry("segment_alloc", time_us=1001),
            entry("alloc", time_us=1002, frames=frames),
            entry("free_requested", time_us=1003),
            entry("free_completed", time_us=1005),
            entry("alloc", time_us=1006, frames=frames[:1]),
            entry("free_completed", time_us=1007),
            entry("oom", size=1 << 40, time_us=1008, pool_id=(0, 1), frames=frames),
            entry("snapshot", time_us=1009),
            entry("annotate", time_us=1009),
            entry("segment_free", time_us=1010),
            entry("segment_map", 128, pool_id=[3, 4], time_us=999),
            entry("segment_unmap", 128, pool_id="none", time_us="now"),
        )
    )
    assert trace.tags == {1: "/a.py:4 pin", 2: "??:0 copy_"}
    assert trace.pools == {
        0: {"backend": "torch", "name": "torch"},
        1: {"backend": "torch", "name": "torch pool 0.1"},
        2: {"backend": "torch", "name": "torch pool 3.4"},
    }
    # Times are from the first entry on, and never before it.
    assert trace.records == [
        (0, 2, 8, 128, 32, 0, 0),
        (0, 2, 6, 128, 128, 32, 1),
        (0, 0, 7, 128),
        (0, 0, 9, 128, 32, 0, 0),
        (1000, 0, 8, 64, 32, 0, 0),
        (1000, 0, 6, 64, 64, 32, 1),
        (2000, 0, 1, 64, 32, 32, 1, 0),
        (3000, 0, 3, 64, 1),
        (5000, 0, 4, 64),
        (6000, 0, 1, 64, 32, 32, 2, 0),
        (7000, 0, 3, 64, 0),
        (8000, 1, 2, 1 << 40, 1 << 40, 1, 0),
        (10000, 0, 7, 64),
        (10000, 0, 9, 64, 32, 0, 0),
    ]


def test_entries_may_stand_in_a_list_for_each_device(convert):
    flat, nested = pickled(entry("alloc")), pickled([entry("alloc")], ())
    assert convert(flat).records == convert(nested).records


def test_a_long_history_has_several_blocks_of_which_each_stands_alone(convert):
    entries = [entry("alloc", 1 << 40 | n, time_us=1000 + n) for n in range(50_000)]
    trace = convert(pickled(*entries))
    assert trace.blocks > 1 and [record[0] for record in trace.records] == [1000 * n for n in range(50_000)]
    assert trace.records[-1] == (49_999_000, 0, 1, 1 << 40 | 49_999, 32, 32, 0, 0)


def test_names_of_any_kind_are_short_texts(convert):
    frames = [{"filename": "\ud800" + "\u00fc" * 4000 + ".py", "name": 10**5000, "line": 10**5000}]
    trace = convert(pickled(entry("alloc", frames=frames, pool_id=(10**5000, 0), time_us=10**5000)))
    assert trace.tags[1].startswith("?\u00fc\u00fc") and len(trace.tags[1].encode()) >= 4095
    assert trace.pools == {0: {"backend": "torch", "name": "torch"}} and trace.records[0][0] == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (entry("resize"), "entry 1 of host_traces: `resize` is no action"),
        (entry(None), "entry 1 of host_traces: `action` is no text"),
        (entry(10**5000), "entry 1 of host_traces: `action` is no text"),
        (entry("alloc", addr=None), "entry 1 of host_traces: `addr` is no number"),
        (entry("alloc", addr=-1), "entry 1 of host_traces: `addr` is no number"),
        (entry("alloc", size=1 << 64), "entry 1 of host_traces: `size` is no number"),
        ("alloc", "entry 1 of host_traces: not a dictionary"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(convert, wrong, why):
    with pytest.raises(pinpool.PinpoolError, match=why):
        convert(pickled(entry("alloc"), wrong))


def test_a_snapshot_without_history_and_a_pickle_of_something_else_are_told_apart(convert):
    for data in (pickled(), pickled(entry("free_requested")), (DATA / "no_history.pickle").read_bytes()):
        with pytest.raises(pinpool.PinpoolError, match="record_pinned_host_memory=True"):
            convert(data)
    for data in (b"\x80\x02}.", pickle.dumps([1])):
        with pytest.raises(pinpool.PinpoolError, match="something else"):
            convert(data)


def test_a_snapshot_over_the_limit_is_refused_before_it_is_read(convert, monkeypatch):
    monkeypatch.setattr(snapshot, "_BYTES_MAX", 1000)
    with pytest.raises(pinpool.PinpoolError, match="over 1000 bytes"):
        convert(b"\x80" * 2000)


class Calls:
    """Leaves a file where it is unpickled by the module `pickle`."""

    def __reduce__(self):
        return os.mkdir, ("called",)


@pytest.mark.parametrize(
    "data",
    [
        (DATA / "object.pickle").read_bytes(),
        *(pickle.dumps({"segments": [], "host_traces": [Calls()]}, protocol) for protocol in range(6)),
        b"\x80\x02cos\nmkdir\nX\x06\0\0\0called\x85R.",
        b"(S'called'\nios\nmkdir\n.",
    ],
)
def test_a_pickle_that_names_a_function_is_refused_and_calls_nothing(convert, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pinpool.PinpoolError, match="dictionaries, lists, texts and numbers alone"):
        convert(data)
    assert not Path("called").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02e.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02h\x09.",
        b"\x80\x02X\xff\xff\xff\xffab.",
        b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x02X\x01\0\0\0\xff.",
        b"\x80\x02\x85.",
        b"\x80\x02(K\x01t0e.",
        b"\x80\x02K\x01(0t.",
        b"\x80\x02K\x01Q.",  # Something outside the pickle.
        b"\x80\x02K\x01)R.",  # A call of a number.
        b"\x80\x02]}b.",  # The state of a list.
        b"\x80\x02\x82\x07.",  # A class by a number that nobody has registered.
        b"\x80\x09.",
        b"Thread,Time,Action,Pointer,Size,Stream\n",
    ],
)
def test_what_is_no_data_is_refused(convert, data):
    with pytest.raises(pinpool.PinpoolError, match="pickle"):
        convert(data)


def test_a_pickle_that_is_cut_off_anywhere_is_an_error(convert):
    whole = pickled(entry("alloc"))
    convert(whole)
    for end in range(len(whole)):
        with pytest.raises(pinpool.PinpoolError, match="cut off"):
            convert(whole[:end])


def test_neither_depth_nor_sharing_takes_more_than_the_file(convert):
    # A million lists, each in the next; and lists that hold the one before twice: 2^60 values if they were copied.
    deep = b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."
    doubled = b"\x80\x02]\x94" + b"".join(b"]\x94(h%ch%ce" % (n, n) for n in range(60)) + b"."
    for data in (deep, doubled):
        with pytest.raises(pinpool.PinpoolError, match="something else"):
            convert(data)


def test_as_a_command_it_names_the_file_and_what_helps(tmp_path):
    def run(*args):
        command = [sys.executable, "-m", "pinpool.torch.snapshot", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    target = tmp_path / "t.trace"
    done = run(DATA / "host.5.pickle", target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert target.read_bytes() == (DATA / "host.trace").read_bytes()
    own = tmp_path / "own.pickle"
    shutil.copy(DATA / "host.5.pickle", own)
    for args, words in [
        ((DATA / "object.pickle", target), "object.pickle: the pickle names pathlib."),
        ((DATA / "no_history.pickle", target), "no_history.pickle: it has no history of pinned memory"),
        ((tmp_path / "none.pickle", target), "No such file or directory"),
        ((own, tmp_path / "none" / "t.trace"), "No such file or directory"),
        ((own, own), "name another file for the trace"),
    ]:
        done = run(*args)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert words in done.stderr and done.stderr.startswith("pinpool: ") and done.stderr.count("\n") == 1, done.stderr
    assert own.read_bytes() == (DATA / "host.5.pickle").read_bytes()
    assert run().returncode == 2
