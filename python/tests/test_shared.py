"""`SharedPool` with fork, spawn and forkserver, and with killed workers."""

import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
import types

import numpy as np
import pytest

import pinpool
from helpers import heap, until
from pinpool import _batches

METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture
def shared():
    # The default library would depend on whether another test has imported torch.
    with pinpool.SharedPool(100_000, 4, pool=heap(), library="numpy") as shared:
        yield shared


@pytest.fixture
def started():
    """Starts a process; it is ended in all cases."""
    processes = []

    def start(method, target, *arguments):
        process = multiprocessing.get_context(method).Process(target=target, args=arguments, daemon=True)
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        process.kill()
        process.join(300)


def fill(shared, connection):
    with pytest.raises(pinpool.ForkError):
        shared.receive_next(timeout=0)  # Only the trainer receives.
    with pytest.raises(pinpool.ForkError):
        shared.pool.get(1)
    for value in range(10):
        buf = shared.get(50_000, timeout=300)
        np.frombuffer(buf, np.uint8)[:] = value
        connection.send(buf.send(value) if value % 2 else buf)  # a buffer is pickled as its ticket
    connection.recv()


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_of_each_start_method_fills_in_place(shared, started, method):
    ours, theirs = multiprocessing.get_context(method).Pipe()
    process = started(method, fill, shared, theirs)
    for value in range(10):
        assert ours.poll(300)
        with shared.receive(ours.recv()) as buf:
            array = np.frombuffer(buf, np.uint8)
            assert len(buf) == 50_000 and (array == value).all()
            del array
    assert shared.num_live_workers == 1
    ours.send(None)
    process.join(300)
    assert shared.counts() == {"free": 4, "filling": 0, "sent": 0, "received": 0} and shared.num_live_workers == 0


def test_a_ticket_is_small_and_received_once(shared):
    ticket = shared.get(100_000).send(7)
    assert len(ticket) == 40 and len(pickle.dumps(ticket)) < 100
    buf = shared.receive(ticket)
    with pytest.raises(pinpool.TicketError, match="received before"):
        shared.receive(ticket)
    with pytest.raises(pinpool.TicketError, match="no ticket|40"):
        shared.receive(b"no")
    buf.release()
    with pinpool.SharedPool(100, 1, pool=heap()) as other:
        with pytest.raises(pinpool.TicketError, match="other shared buffers"):
            other.receive(ticket)
    shared.get(3).send(9)
    number, buf = shared.receive_next(timeout=1)
    assert (number, len(buf)) == (9, 3) and shared.receive_next(timeout=0) is None


def test_refused_calls_name_the_reason(shared):
    with pytest.raises(pinpool.RequestError, match="100000 bytes"):
        shared.get(100_001)
    held = [shared.get(1) for _ in range(4)]
    with pytest.raises(pinpool.LimitError, match="4 are being filled"):
        shared.get(1, timeout=0.01)
    view = memoryview(held[0])
    for end in (held[0].send, held[0].release):
        with pytest.raises(BufferError, match="1 view"):
            end()
    del view
    held[0].release()
    with pytest.raises(pinpool.ReleasedError):
        held[0].send()
    with pytest.raises(pinpool.LimitError):
        pinpool.SharedPool("65MiB", 1, pool=heap())
    with pytest.raises(pinpool.SharedError, match="memory file"):
        pinpool._pinpool.SharedWorker(0)
    waiting = held[1]
    shared.close()
    with pytest.raises(pinpool.TrainerUnavailableError, match="closed"):
        waiting.send()
    with pytest.raises(pinpool.ClosedError):
        shared.counts()


def ignore_the_request_to_end(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    time.sleep(30)


def test_a_worker_that_ignores_the_request_to_end_is_killed(shared, started, monkeypatch):
    monkeypatch.setattr(_batches, "_JOIN_SECONDS", 0.1)
    ours, theirs = multiprocessing.Pipe()
    worker = started("fork", ignore_the_request_to_end, theirs)
    assert ours.poll(300)
    _batches._end_workers(shared, types.SimpleNamespace(_workers=[worker], _shutdown_workers=worker.terminate), 1)
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL


def test_a_child_forked_within_a_loop_is_refused_and_does_not_end_the_loop(shared, started):
    loop = iter(shared.batches([shared.collate([number]) for number in range(3)]))
    assert next(loop).tolist() == [0]

    def use_in_child(connection):
        calls = [shared.counts, shared.recover, lambda: next(iter(shared.batches([])))]
        for call in [*calls, *(lambda name=name: getattr(shared, name) for name in ("num_live_workers", "pool", "pinned_by", "is_hugetlb"))]:
            with pytest.raises(pinpool.ForkError, match="worker of the shared pool"):
                call()
        connection.send((inspect.getgeneratorstate(shared._loop), repr(shared)))

    ours, theirs = multiprocessing.Pipe()
    child = started("fork", use_in_child, theirs)
    theirs.close()
    assert ours.recv() == (inspect.GEN_SUSPENDED, "<pinpool.SharedPool of 4 buffers of 100000 bytes, attached>")
    child.join(300)
    assert [batch.tolist() for batch in loop] == [[1], [2]] and shared.counts()["free"] == 4


def test_received_buffers_outlive_the_shared_pool(pool):
    shared = pinpool.SharedPool(1000, 2, pool=pool)
    array = shared.unpack(shared.pack({"x": np.arange(10), "name": "a"}))
    shared.close()
    assert shared.pool is pool
    del shared
    assert array["name"] == "a" and (array["x"] == np.arange(10)).all()


def test_required_huge_pages_are_used_or_named(pool):
    try:
        assert pinpool.SharedPool("1MiB", 2, pool=pool, hugetlb="2MiB").is_hugetlb
    except pinpool.SharedError as error:
        assert "nr_hugepages" in str(error)


def test_pack_and_collate_keep_structure_types_and_values(shared):
    batch = {"image": np.random.rand(3, 5), "pair": (np.float32(2), [np.arange(3, dtype=np.int16)]), "path": "p", "n": 3, "empty": np.empty((0, 4))}
    got = shared.unpack(shared.pack(batch))
    assert (got["image"] == batch["image"]).all() and got["pair"][0] == np.float32(2) and got["pair"][1][0].dtype == np.int16
    assert got["path"] == "p" and got["n"] == 3 and got["empty"].shape == (0, 4) and isinstance(got["pair"], tuple)
    samples = [{"x": np.full((2, 3), i, np.float32), "y": i, "z": (float(i), "name")} for i in range(4)]
    packed = shared.collate(samples)
    assert len(pickle.dumps(packed)) < 1000
    got = shared.unpack(packed)
    assert got["x"].shape == (4, 2, 3) and (got["x"][:, 0, 0] == range(4)).all()
    assert list(got["y"]) == [0, 1, 2, 3] and list(got["z"][0]) == [0.0, 1.0, 2.0, 3.0] and got["z"][1] == ["name"] * 4
    del got
    until(lambda: shared.counts()["free"] == 4)


def hold_and_hang(shared, connection, how):
    buf = shared.get(10)
    if how == "sent":
        buf.send(5)
    connection.send("ready")
    time.sleep(3600)


@pytest.mark.parametrize("how", ["filling", "sent"])
def test_the_buffer_of_a_killed_worker_becomes_free_or_is_received(shared, started, how):
    ours, theirs = multiprocessing.Pipe()
    process = started("fork", hold_and_hang, shared, theirs, how)
    assert ours.recv() == "ready" and shared.counts()[how] == 1
    process.kill()
    process.join(300)
    if how == "filling":
        assert shared.recover() == 1
    else:
        assert shared.recover() == 0
        number, buf = shared.receive_from_dead_worker()
        assert number == 5 and shared.receive_from_dead_worker() is None
        buf.release()
    assert shared.counts()["free"] == 4


class Dying:
    """The worker that reads sample 50 dies."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(100, index, np.int32), index


def test_a_dying_worker_of_torch_is_an_error_and_leaves_no_buffer(shared):
    data = pytest.importorskip("torch.utils.data")
    batches = iter(shared.batches(data.DataLoader(Dying(), batch_size=4, num_workers=1, collate_fn=shared.collate)))
    next(batches)
    batches.close()  # as `break` does
    assert shared.counts()["free"] == 4
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):
        for _rows in shared.batches(data.DataLoader(Dying(), batch_size=4, num_workers=1, collate_fn=shared.collate)):
            pass
    _rows = None
    until(lambda: shared.recover() == 0 and shared.counts()["free"] == 4)


@pytest.mark.parametrize(
    ("samples", "error", "said"),
    [([{"label": label} for label in labels], (TypeError, ValueError), "cannot be stacked|no 64-bit dtype represents all numbers") for labels in
     ([2**64, 2**64 + 1], [1, 2**70], [1, None], [1.5, None], [1, "a"], [-1, 2**63], [2**53 + 1, 0.5])]
    + [([np.int8(1), np.float32(1)], ValueError, "without loss"), ([np.int64(1), np.uint64(1)], ValueError, "without loss"), ([np.True_, np.int8(2)], ValueError, "without loss")]
    + [([np.array("a"), np.array(b"a")], ValueError, "without loss"), ([np.zeros(2), np.zeros(3)], ValueError, "stacked"), ([], ValueError, "no samples")],
    ids=str,
)  # fmt: skip
def test_samples_without_a_common_shape_or_dtype_are_refused(shared, samples, error, said):
    with pytest.raises(error, match=said):
        shared.collate(samples)
    assert shared.counts()["free"] == 4


def test_object_arrays_are_not_read_from_shared_memory(shared):
    got = shared.unpack(shared.pack({"mixed": np.array([1, None], object)}))["mixed"]
    assert got.tolist() == [1, None]  # Pickled, like all values other than arrays.
    packed = shared.pack(np.arange(4))
    foreign = pinpool.PackedBatch(packed.ticket, packed._tree._replace(dtype="|O"))
    with pytest.raises(TypeError, match="objects"):
        shared.unpack(foreign)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([np.int8(1), np.int64(1000)], [1, 1000]),
        ([np.float32(0.5), np.float64(0.1)], [0.5, 0.1]),
        ([np.array("a"), np.array("bcd")], ["a", "bcd"]),
        ([1, 0.5], [1.0, 0.5]),
        ([1, np.int64(5)], [1, 5]),
        ([2**63, 2**64 - 1], [2**63, 2**64 - 1]),
        ([np.array((1, 2.5), "i4,f8"), np.array((3, 4.5), "i4,f8")], [(1, 2.5), (3, 4.5)]),
    ],
    ids=str,
)
def test_collate_keeps_values_of_other_types(shared, samples, expected):
    got = shared.unpack(shared.collate(samples))
    assert got.tolist() == expected
    if isinstance(samples[0], np.ndarray):
        assert got.dtype.names == samples[0].dtype.names


def test_a_closed_shared_pool_does_not_access_another_one(pool):
    closed = pinpool.SharedPool("32KiB", 3, pool=pool)
    closed.close()
    with pinpool.SharedPool("32KiB", 3, pool=pool) as other:
        for use in (lambda: closed.get(10), closed.fileno, lambda: closed.pack(np.arange(3)), closed.__reduce__):
            with pytest.raises(pinpool.ClosedError, match="closed"):
                use()
        assert other.counts()["free"] == 3 and other.num_live_workers == 0


def test_a_close_ends_waits_for_batches(shared):
    errors = []

    def receive():
        try:
            shared.receive_next()
        except pinpool.ClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    time.sleep(0.01)  # It probably waits by then, but it fails in any case.
    shared.close()
    waiting.join(300)
    assert not waiting.is_alive() and "closed" in str(errors[0])
