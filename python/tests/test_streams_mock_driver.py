"""Streams and pinned memory, over the mock driver instead of libcuda."""

import textwrap

import pytest

import mock_driver
from mock_driver import DEFINITIONS, MOCK_DRIVER, PRELUDE, mock_driver_environment

pytestmark = pytest.mark.skipif(MOCK_DRIVER is None, reason=f"the mock driver is not built: {mock_driver.__doc__.split(chr(10))[2]}")


@pytest.fixture
def with_mock_driver(run_in_subprocess, tmp_path):
    def passes(code, prelude=PRELUDE):
        code = prelude + textwrap.dedent(code) + "\nassert cuda.mock_driver_wrong_uses() == 0\nprint('passed')"
        out, err = run_in_subprocess(code, env=mock_driver_environment(tmp_path))
        assert out.endswith("passed\n"), f"{out}\n{err}"

    return passes


@pytest.mark.parametrize(
    "form",
    [
        "stream",
        "type('Torch', (), {'cuda_stream': stream, 'device_index': 0})()",
        "type('Cupy', (), {'ptr': stream, 'device_id': 0, 'synchronize': None})()",
        "type('Protocol', (), {'__cuda_stream__': lambda self: (0, stream)})()",
        "type('Numba', (), {'handle': ctypes.c_void_p(stream)})()",
    ],
    ids=["int", "torch", "cupy", "protocol", "numba"],
)
def test_a_buffer_is_not_reused_before_the_work_on_its_stream_completes(with_mock_driver, form):
    with_mock_driver(f"""
        pool, stream = pool_of(), new_stream()
        buf = pool.get(SIZE)
        np.frombuffer(buf, np.uint8)[:] = 7
        address = buf.ptr
        hold(stream)
        copy(buf, stream)
        buf.release(stream={form})
        assert buf.is_released and buffer_counts(pool) == (1, 0, 0)
        assert pool.try_get(SIZE) is None
        other = pool.get(SIZE)
        assert other.ptr != address
        np.frombuffer(other, np.uint8)[:] = 9
        let_run(stream)
        assert on_device(SIZE) == {{7}}
        wait_for_counts(pool, (0, 1, 1))
        assert pool.try_get(SIZE).ptr == address
    """)


@pytest.mark.parametrize("end", ["buf.release()", "buf.__exit__()", "del buf", "view = memoryview(buf); buf.__exit__(); view.release()"])
def test_a_recorded_stream_counts_however_the_buffer_ends(with_mock_driver, end):
    with_mock_driver(f"""
        for preset in ("tensorflow", "adaptive"):
            pool, streams = pool_of(preset=preset), [new_stream(), new_stream(), 0]
            buf = pool.get(SIZE)
            [hold(stream) for stream in streams[:2]]
            for stream in streams:
                copy(buf, stream)
                buf.record_stream(stream)
            assert buffer_counts(pool)[:2] == (0, 1), "it stays in use"
            {end}
            assert buffer_counts(pool)[:2] == (1, 0)
            let_run(streams[0])
            driver("cuStreamSynchronize", ctypes.c_void_p(streams[0]))
            assert buffer_counts(pool)[:2] == (1, 0), "the other stream still reads"
            let_run(streams[1])
            wait_for_counts(pool, (0, 0, 1))
            pool.get(SIZE).release()
    """)


BATCH = """next(iter(pinpool_loader.Loader("samples", batch_size=2, pool=pool)))"""


@pytest.mark.parametrize(
    "array",
    [
        "np.from_dlpack(pool.get(SIZE))",
        "np.asarray(pool.get(SIZE))",
        "torch.from_dlpack(pool.get(SIZE))",
        "torch.frombuffer(memoryview(pool.get(SIZE)), dtype=torch.uint8)",
        "pool.empty((SIZE // 4, 4), 'uint8')",
        "pool.empty((SIZE // 4, 4), 'uint8', library='torch')",
        "torch.from_numpy(pool.empty(SIZE, 'uint8')[9:])",
        f"{BATCH}[1]",
        f"{BATCH}.tensors()[1]",
        f"torch.from_numpy({BATCH}[1])",
    ],
)
def test_memory_of_arrays_and_tensors_is_kept_by_the_recorded_streams(with_mock_driver, array, tmp_path, monkeypatch):
    if "torch" in array or "tensors" in array:
        pytest.importorskip("torch")
    (tmp_path / "samples").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / "samples" / name).write_bytes(bytes(100))
    with_mock_driver(f"""
        import pinpool_loader
        if "torch" in {array!r}: import torch
        pool, stream = pool_of(), new_stream()
        array = {array}
        wait_for_counts(pool, (0, 1, 0))
        hold(stream)
        part = array[5:]
        pinpool.record_stream(part, stream)
        del array
        assert buffer_counts(pool) == (0, 1, 0)
        del part
        assert buffer_counts(pool) == (1, 0, 0)
        let_run(stream)
        wait_for_counts(pool, (0, 0, 1))
    """)


def test_one_call_records_the_stream_for_all_arrays_of_a_batch(with_mock_driver):
    with_mock_driver("""
        import collections
        pool, stream = pool_of(), new_stream()
        array, other = pool.empty((4, SIZE), "uint8"), pool.empty(9, "uint8")
        meta = [other, np.zeros(3), np.empty(0), "name", 7, None, pathlib.Path("a"), object()]  # Objects without arrays are skipped.
        batch = {"images": (array[0], array[1]), "meta": meta}
        hold(stream)
        assert pinpool.record_stream(batch, stream) == 2, "buffers, not arrays"
        hidden = pool.empty(SIZE, "uint8")
        try: pinpool.record_stream([collections.deque([array]), hidden], stream)
        except TypeError as error: assert "the tensors of a deque would not be recorded" in str(error)
        else: raise AssertionError("no error")
        del batch, meta, array, other, hidden
        assert buffer_counts(pool) == (3, 0, 0)
        let_run(stream)
        wait_for_counts(pool, (0, 0, 3))
    """)


#: torch without a GPU, whose copies `calls` records: `gpu` is its current stream.
TORCH = (
    PRELUDE
    + """
import contextlib, dataclasses, types
import torch
import pinpool.torch
import pinpool_loader

calls, pool = [], pool_of()
gpu = types.SimpleNamespace(device=torch.device("cuda", 1), cuda_stream=new_stream())

def to(tensor, *target, **options):
    calls.append((*target, options, torch.cuda.used))
    if tensor.numel() == 3: raise RuntimeError("out of memory")
    return tensor.clone()

@contextlib.contextmanager
def use(stream):
    torch.cuda.used = stream
    yield

def tensor(): return pool.empty(SIZE, "uint8", library="torch").fill_(5)

def use_fake_gpu():
    torch.Tensor.to, torch.cuda.is_available, torch.cuda.stream, torch.cuda.current_stream = to, lambda: True, use, lambda device: gpu
"""
)


def test_to_device_keeps_the_memory_of_each_tensor_until_its_copy_has_completed(with_mock_driver):
    pytest.importorskip("torch")
    with_mock_driver(
        """
        try: pinpool.torch.to_device(torch.zeros(3), "cuda")
        except pinpool.BackendError as error: assert "torch finds none" in str(error)
        else: assert torch.cuda.is_available()
        outside, packed = torch.ones(4), torch.nn.utils.rnn.pack_sequence([torch.ones(4, 2)])
        use_fake_gpu()
        for stream in (None, gpu):
            batch = {"x": (tensor(), [outside]), "packed": packed, "more": [7, "name", None, np.array(["text"]), torch.empty(0)]}
            batch["array"] = tensor().numpy()
            hold(gpu.cuda_stream)
            copy = pinpool.torch.to_device(batch, stream=stream)
            assert list(copy) == list(batch) and torch.equal(copy["x"][0], batch["x"][0]) and copy["x"][0] is not batch["x"][0]
            assert type(copy["packed"]) is type(packed) and copy["more"][:4] == batch["more"][:4]
            assert len(calls) == 5 and all(call == (gpu.device, {"non_blocking": True}, gpu) for call in calls), calls
            batch = None
            calls.clear()
            assert buffer_counts(pool)[:2] == (2, 0) and torch.equal(copy["array"], copy["x"][0]), buffer_counts(pool)
            let_run(gpu.cuda_stream)
            wait_for_counts(pool, (0, 0, 2))
    """,
        TORCH,
    )


def test_to_device_keeps_the_memory_of_a_batch_of_a_loader(with_mock_driver, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "images").mkdir()
    for name in ("a.jpg", "b.png"):
        pytest.importorskip("PIL.Image").new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "images" / name)
    monkeypatch.chdir(tmp_path)
    with_mock_driver(
        """
        use_fake_gpu()
        outside = torch.ones(4)
        for settings in ({}, {"decode": {"jpg;png": pinpool_loader.ImageDecoder(4, 4)}}):
            for given in ("batch", "[batch]", "[outside, batch]", "batch.to"):
                loader_pool = pool_of()
                [batch] = pinpool_loader.Loader("images", batch_size=2, pool=loader_pool, **settings)
                hold(gpu.cuda_stream)
                try: copy = batch.to(gpu.device) if given == "batch.to" else pinpool.torch.to_device(eval(given), stream=gpu)
                except TypeError as error: assert not settings and "no field of this Batch is decoded" in str(error), error
                else:
                    assert settings
                    copy = copy[-1] if isinstance(copy, list) else copy
                    assert list(copy) == ["jpg", "labels"]
                    assert torch.equal(copy["jpg"], torch.from_numpy(batch["jpg"])) and copy["labels"].tolist() == batch["labels"] == [0, 0]
                    batch = None
                    assert buffer_counts(loader_pool)[:2] == (1, 0)
                let_run(gpu.cuda_stream)
        waits, gpu.synchronize = [], lambda: waits.append(gpu)
        [batch] = pinpool_loader.Loader("images", batch_size=2, pool=pool, **settings)
        batch.to("cuda")
        assert not waits
        batch.to("cuda", non_blocking=False)
        assert waits == [gpu]
    """,
        TORCH,
    )


def test_to_device_keeps_the_memory_of_copies_before_a_failure(with_mock_driver):
    pytest.importorskip("torch")
    with_mock_driver(
        """
        use_fake_gpu()
        hold(gpu.cuda_stream)
        try: pinpool.torch.to_device([tensor(), torch.zeros(3)], "cuda:1")
        except RuntimeError as error: assert str(error) == "out of memory"
        assert buffer_counts(pool)[:2] == (1, 0), "the copy before the failure"
        let_run(gpu.cuda_stream)
    """,
        TORCH,
    )


def test_to_device_refuses_objects_with_hidden_tensors_and_other_devices(with_mock_driver):
    pytest.importorskip("torch")
    with_mock_driver(
        """
        use_fake_gpu()
        Box = dataclasses.make_dataclass("Box", ["items"])
        assert pinpool.torch.to_device([tensor(), Box(["name", np.array(["text"])])], stream=gpu)[1] == Box(["name", np.array(["text"])])
        Graph = type("Graph", (), {"to": lambda self, device: self})
        assert pinpool.torch.to_device([tensor(), Graph], stream=gpu)[1] is Graph, "a class"
        for batch, device, error, said in (
            ([tensor(), Graph()], "cuda", TypeError, "the tensors of a Graph would not be copied: pass them in a dict"),
            ([tensor(), Box([Graph()])], "cuda", TypeError, "the tensors of a Box would not be copied: pass them in a dict"),
            ([np.array(["text"]), 7], "cuda", TypeError, "neither a tensor nor a numeric array is in this list"),
            ([tensor(), Box({"x": [np.ones(2)]})], "cuda", TypeError, "the tensors of a Box would not be copied: pass them in a dict"),
            (tensor(), "cuda:0", ValueError, "not on cuda:0"),
            (tensor(), "cpu", ValueError, "not on cpu"),
        ):
            try: pinpool.torch.to_device(batch, device, stream=gpu)
            except error as found: assert said in str(found), found
            else: raise AssertionError(said)
    """,
        TORCH,
    )


def test_prefetch_copies_the_next_batch_while_the_caller_uses_the_current_one(with_mock_driver):
    pytest.importorskip("torch")
    with_mock_driver(
        """
        events, packed = [], torch.nn.utils.rnn.pack_sequence([torch.ones(4, 2)])
        main = types.SimpleNamespace(device=gpu.device, cuda_stream=new_stream(), wait_event=lambda event: events.append(f"wait {event}"))

        def to_gpu(value, *target, **options):
            copy = to(value, *target, **options)
            copy.is_copy = True
            return copy

        def enqueued():
            events.append("copied")
            return sum(event == "copied" for event in events)

        def batches(count, fails=False):
            for number in range(count):
                events.append(f"request {number + 1}")
                yield [tensor(), {"label": number, "more": (tensor(), [outside])}]
            if fails: raise OSError("a damaged file")

        def loop(iterable):
            for batch in pinpool.torch.prefetch(iterable):
                events.append(f"use {batch[1]['label'] + 1}")
                yield batch

        use_fake_gpu()
        outside, gpu.record_event = torch.ones(4), enqueued
        torch.Tensor.to, torch.cuda.Stream, torch.cuda.current_stream = to_gpu, lambda device: gpu, lambda device: main
        torch.Tensor.is_cuda = property(lambda tensor: hasattr(tensor, "is_copy"))
        torch.Tensor.record_stream = lambda tensor, stream: events.append("record" if stream is main else "wrong stream")
        hold(gpu.cuda_stream)
        # The batches in host memory are dropped, so only their copies keep the memory from reuse.
        for batch in loop(batches(3)): assert buffer_counts(pool)[1] == 0
        used = ["wait 1", *["record"] * 3, "use 1"]
        assert events[:4] == ["request 1", "copied", "request 2", "copied"] and events[4:9] == used, events
        assert events[9:11] == ["request 3", "copied"] and events[-1] == "use 3" and "wrong stream" not in events, events
        assert all(stream is gpu for *_, stream in calls)
        assert buffer_counts(pool) == (6, 0, 0)
        let_run(gpu.cuda_stream)
        wait_for_counts(pool, (0, 0, 6))
        for batch in loop(batches(3)): break
        labels, failing = [], loop(batches(2, fails=True))
        try: labels += (batch[1]["label"] for batch in failing)
        except OSError as error: assert str(error) == "a damaged file" and events[-1] == "use 2" and labels == [0, 1], events
        else: raise AssertionError("no error")

        class Stateful:
            position = 0
            def __iter__(self):
                for batch in batches(3):
                    self.position += 1
                    yield batch
            def state_dict(self): return {"position": self.position}

        loader = Stateful()
        prefetched = pinpool.torch.prefetch(loader)
        assert prefetched.state_dict() == {"position": 0}
        positions = [(prefetched.state_dict()["position"], loader.position) for _ in prefetched]
        assert positions == [(1, 2), (2, 3), (3, 3)] and prefetched.state_dict() == {"position": 3}, positions
        assert list(pinpool.torch.prefetch([])) == []
        assert list(pinpool.torch.prefetch([packed]))[0].data.is_copy
    """,
        TORCH,
    )


def test_a_refused_stream_keeps_each_buffer_of_a_batch_from_reuse(with_mock_driver):
    with_mock_driver("""
        pool = pool_of()
        batch = [pool.empty(SIZE, "uint8") for _ in range(3)]
        try: pinpool.record_stream(batch, 0xdead00)
        except pinpool.DeviceError: pass
        else: raise AssertionError("no error")
        gc.disable()  # The error must not keep the arrays in a reference cycle.
        del batch
        pool.maintain()
        assert pool.stats()["memory"]["quarantined"] == 3, pool.stats()
        cuda.mock_driver_reset()  # It has reported the invalid handle.
    """)


#: Fences are then events.
WITHOUT_TIMELINES = """
cuda.mock_driver_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
cuda.mock_driver_fail(b"cuStreamWriteValue32_v2", 1, 1 << 40, 801)
"""


def test_completed_streams_of_a_buffer_are_dropped(with_mock_driver):
    with_mock_driver(
        WITHOUT_TIMELINES
        + """
pool = pool_of()
buf = pool.get(SIZE)
for _ in range(1000):
    stream = new_stream()
    buf.record_stream(stream)
    driver("cuStreamSynchronize", ctypes.c_void_p(stream))
assert cuda.mock_driver_calls(b"cuEventDestroy_v2") > 900
buf.release()
wait_for_counts(pool, (0, 0, 1))
"""
    )


def test_a_record_replaces_the_earlier_fence_of_its_stream_alone(with_mock_driver):
    with_mock_driver(
        WITHOUT_TIMELINES
        + """
pool, streams = pool_of(), [new_stream(), new_stream()]
buf = pool.get(SIZE)
for stream in streams:
    hold(stream)
for stream in streams[:1] + 50 * streams[1:]:
    buf.record_stream(stream)
assert cuda.mock_driver_calls(b"cuEventRecord") == 51 and cuda.mock_driver_calls(b"cuEventQuery") == 0, "2 fences need no check"
buf.release()
let_run(streams[1])
driver("cuStreamSynchronize", ctypes.c_void_p(streams[1]))
assert buffer_counts(pool)[:2] == (1, 0), "the other stream still reads"
let_run(streams[0])
wait_for_counts(pool, (0, 0, 1))
"""
    )


def test_memory_is_never_reused_if_no_fence_can_be_recorded(with_mock_driver):
    with_mock_driver("""
        pool, stream = pool_of(), new_stream()
        driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 2)
        lost = set()

        def raises(call, error, text):
            try: call()
            except error as raised: assert text in str(raised), raised
            else: raise AssertionError("no error")

        def with_block(buf, stream):
            with buf: buf.record_stream(stream)

        for wrong, error, text in ((0xdead00, pinpool.DeviceError, "pass a live stream"),
                                   (stream, pinpool.DeviceError, "on the stream of that launch. The memory of this buffer is never reused")):
            for call in (lambda buf: buf.release(stream=wrong), lambda buf: buf.record_stream(wrong),
                         lambda buf: with_block(buf, wrong)):
                buf = pool.get(SIZE)
                assert buf.ptr not in lost, "memory is reused although its work was refused"
                lost.add(buf.ptr)
                raises(lambda: call(buf), error, text)
                del buf
        assert pool.get(SIZE).ptr not in lost
        pool.maintain()
        assert pool.stats()["memory"]["quarantined"] == len(lost) == 6, pool.stats()
        # An argument that is not a stream has no effect.
        buf = pool.get(SIZE)
        raises(lambda: buf.release(stream="0"), TypeError, "is not a stream")
        assert not buf.is_released
        buf.release()
        assert pool.stats()["memory"]["idle"] == 1
        graph = ctypes.c_void_p()
        driver("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        cuda.mock_driver_reset()  # It has reported the invalid handle.
    """)


def test_pinned_memory_is_exported_as_cuda_host_on_request(with_mock_driver):
    with_mock_driver("""
        for backend in ("cuda", "register", "vmm"):
            pool = pool_of(backend=backend, preset="adaptive")
            buf = pool.get(SIZE)
            assert buf.is_pinned and buf.__dlpack_device__() == (1, 0)
            exported = buf.__dlpack__(dl_device=(3, 0))
            assert buf.num_views == 1
            del exported
            buf.release()
    """)


@pytest.mark.parametrize(
    "held, settings, slow",
    [
        ("cuMemHostAlloc", {}, "pool.get(SIZE)"),
        ("cuMemHostAlloc", {}, "pool.empty(SIZE)"),
        ("cuMemHostAlloc", {}, "asyncio.run(pool.aget(SIZE))"),
        ("cuMemHostAlloc", {"preset": "adaptive"}, "pool.reserve(SIZE)"),
        ("cuMemFreeHost", {"pool_size_limit": 0}, "buf.release()"),
        ("cuMemFreeHost", {"pool_size_limit": 0}, "buf.__exit__()"),
        ("cuMemFreeHost", {"pool_size_limit": 0}, "globals().pop('buf')"),
        ("cuMemFreeHost", {}, "(buf.release(), pool.trim())"),
        ("cuMemFreeHost", {}, "(buf.release(), globals().pop('pool'))"),
        ("cuMemFreeHost", "SHARED", "(let_another_pool_want_memory(pool), buf.release())"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_interpreter_runs_while_the_driver_pins_or_releases(with_mock_driver, held, settings, slow):
    """Another thread is inside a driver call, which returns only when this thread allows it."""
    with_mock_driver(f"""
        pool = pool_of(**{settings})
        buf = None if {held!r} == "cuMemHostAlloc" else pool.get(SIZE)
        cuda.mock_driver_hold_call({held!r}.encode(), 1)
        def slowly():
            {slow}
        thread = threading.Thread(target=slowly)
        thread.start()
        cuda.mock_driver_wait_for_held({held!r}.encode(), 1)
        assert sum(range(100_000)) and thread.is_alive()
        cuda.mock_driver_hold_call({held!r}.encode(), 0)
        thread.join(300)
        assert not thread.is_alive()
    """)


def test_the_interpreter_runs_while_the_first_use_of_a_pool_starts_the_driver(run_in_subprocess, tmp_path):
    code = """
        import ctypes, threading
        import pinpool

        cuda = ctypes.CDLL("libcuda.so")
        cuda.mock_driver_wait_for_held.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        pool = pinpool.Pool(env=False)
        cuda.mock_driver_hold_call(b"cuInit", 1)
        thread = threading.Thread(target=pool.tagged, args=["images"])
        thread.start()
        cuda.mock_driver_wait_for_held(b"cuInit", 1)
        assert sum(range(100_000)) and thread.is_alive()
        cuda.mock_driver_hold_call(b"cuInit", 0)
        thread.join(300)
        assert not thread.is_alive()
    """
    run_in_subprocess(code, env=mock_driver_environment(tmp_path))


def test_driver_memory_is_refused_in_a_forked_child(with_mock_driver):
    with_mock_driver("""
        pool = pool_of()
        buf, array = pool.get(SIZE), pool.empty(SIZE)
        for use in (lambda: memoryview(buf), lambda: pinpool.record_stream(array, 0)):
            child = os.fork()
            if child == 0:
                try: use()
                except pinpool.ForkError as error: os._exit(7 if "build a new pool after the fork" in str(error) else 2)
                except Exception as error: print(repr(error), flush=True)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert memoryview(buf).nbytes == SIZE
    """)


def test_the_interpreter_ends_while_copies_run(with_mock_driver):
    with_mock_driver("""
        import threading
        pool, stream = pool_of(), new_stream()
        buf, kept = pool.get(SIZE), pool.get(SIZE)
        hold(stream)
        for each in (buf, kept):
            copy(each, stream)
            each.record_stream(stream)
        buf.release()
        threading.Timer(0.2, let_run, [stream]).start()
    """)


def test_shared_memory_is_registered_once_and_buffers_wait_for_their_stream(with_mock_driver):
    with_mock_driver("""
        pool, stream = pool_of(backend="register", preset=None, maintenance_thread=True), new_stream()
        before = cuda.mock_driver_calls(b"cuMemHostRegister_v2")
        shared = pinpool.SharedPool(SIZE, 2, pool=pool)
        assert shared.pinned_by == "driver" and cuda.mock_driver_calls(b"cuMemHostRegister_v2") == before + 1
        for value in range(20):
            filling = shared.get(SIZE)
            np.frombuffer(filling, np.uint8)[:] = value
            with shared.receive(filling.send()) as buf:
                assert buf.is_pinned and buf.__dlpack_device__() == (1, 0)
                copy(buf, stream)
                buf.record_stream(stream)
            assert on_device(SIZE) == {value}
        assert cuda.mock_driver_calls(b"cuMemHostRegister_v2") == before + 2, "one page for the values that streams write, none for a buffer"
        assert pool.stats()["copies"]["timeline_bytes"] == 4096
        hold(stream)
        buf = shared.receive(shared.get(SIZE).send())
        copy(buf, stream)
        buf.release(stream=stream)
        other = shared.get(SIZE)
        try: shared.get(1, timeout=0.05)
        except pinpool.TimeoutError: pass
        else: raise SystemExit("the device is reading it")
        gc.collect, collect = None, gc.collect
        shared._refuse_too_many_kept(2)  # Needs no garbage collection while only copies use the buffers.
        gc.collect = collect
        foreign = pool.get(SIZE)
        copy(foreign, stream)
        foreign.release(stream=stream)
        kept = shared.receive(other.send())
        assert pool.stats()["copies"]["in_flight"] == 2
        try: shared._refuse_too_many_kept(2)
        except pinpool.LimitError as error: assert "1 of 2 shared buffers" in str(error)
        else: raise SystemExit("the copy of another buffer of the pool hides the batch that is kept")
        kept.release()
        shared._refuse_too_many_kept(2)  # A released object is not kept.
        let_run(stream)
        for free in [shared.get(1, timeout=300) for _ in range(2)]: free.release()
        shared.close()
        del shared, buf, filling, other
    """)


@pytest.mark.parametrize(
    "rank, setup, call, gpu",
    [
        ("", "", "pool_of()", 0),
        ("3", "", "pool_of()", 3),
        ("3", "", "pool_of(device='cuda')", 3),
        ("3", "", "pool_of(device=1)", 1),
        ("3", "os.environ['PINPOOL_DEVICE'] = '2'", "pool_of()", 3),
        ("3", "os.environ['PINPOOL_DEVICE'] = '2'", "pinpool.Pool(backend='cuda')", 2),
        ("4", "", "pool_of()", 0),  # The launcher shows other GPUs to this rank.
        ("9" * 20, "", "pool_of()", 0),
        ("three", "", "pool_of()", 0),
        ("3", "sys.modules['torch'] = None", "pool_of()", 3),
        ("3", "torch(is_initialized=lambda: False)", "pool_of()", 3),
        ("4", "torch(is_initialized=lambda: True, current_device=lambda: 1)", "pool_of()", 1),
        ("3", "use_gpu(1)", "pool_of()", 1),  # As CuPy may do, for example: torch may be a CPU build.
        ("three", "use_gpu(1)", "pool_of()", 1),
        ("2", "use_gpu(1); use_gpu(2); driver('cuCtxSetCurrent', None)", "pool_of()", 2),
        ("3", "", "used_later(1)", 1),
        ("3", "", "used_later()", 3),
    ],
)
def test_a_pool_uses_the_gpu_in_use_or_else_the_gpu_of_the_local_rank(with_mock_driver, rank, setup, call, gpu):
    with_mock_driver(
        f"""
        import logging, sys, types
        cuda.mock_driver_set_device_count(4)
        lines, logger = [], logging.getLogger("pinpool")
        logger.addHandler(handler := logging.Handler())
        handler.emit = lambda record: lines.append(record.getMessage())
        logger.setLevel(logging.INFO)
        def torch(**functions):
            sys.modules["torch"] = types.SimpleNamespace(Tensor=(), cuda=types.SimpleNamespace(**functions))
        def used_later(*numbers):
            pool = pool_of(backend="auto", preset="adaptive")
            assert cuda.mock_driver_calls(b"cuInit") == 0, "the pool starts at its first use"
            for number in numbers: use_gpu(number)
            return pool
        os.environ["LOCAL_RANK"] = {rank!r}
        {setup}
        {call}.get(1)
        [line] = [line for line in lines if " created: " in line]
        assert line.partition(" gpu=")[2][0] == "{gpu}", line
    """,
        DEFINITIONS,
    )


def test_a_pool_without_a_driver_backend_asks_neither_torch_nor_the_driver(with_mock_driver):
    with_mock_driver(
        """
        import sys, types
        sys.modules["torch"] = types.SimpleNamespace(Tensor=(), cuda=types.SimpleNamespace(is_initialized=lambda: False))
        os.environ["LOCAL_RANK"] = "3"
        for settings in ({"backend": "heap"}, {"backend": "mlock"}, {"backend": "auto", "preset": "adaptive"}):
            pool_of(**settings)
        assert cuda.mock_driver_calls(b"cuInit") == 0
    """,
        DEFINITIONS,
    )


def test_a_torch_block_with_a_refused_stream_is_kept(with_mock_driver):
    with_mock_driver("""
    class Stream(ctypes.Structure):
        _fields_ = [("handle", ctypes.c_void_p), ("device", ctypes.c_int32)]

    pool = pool_of(backend="vmm", preset="adaptive").tagged("torch/pinned")
    table = (ctypes.c_void_p * 6).from_address(pinpool._pinpool._torch_functions(pool))
    get = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 1, ctypes.c_size_t, *[ctypes.c_void_p] * 3, ctypes.c_size_t)(table[1])
    put = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Stream), ctypes.c_size_t)(table[2])
    block, address = ctypes.c_void_p(), ctypes.c_void_p()
    assert get(table[0], SIZE, ctypes.byref(block), ctypes.byref(address), None, 0) == 0
    assert "torch/pinned" in pool.report()
    streams = (Stream * 2)(Stream(new_stream(), 0), Stream(new_stream(), 0))
    cuda.mock_driver_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    cuda.mock_driver_fail(b"cuStreamGetCtx_v2", 2, 3, 400)
    assert put(block, streams, 2) == 1, "the caller keeps it"
    assert put(block, streams, 2) == put(block, streams, 2) == 1
    assert pool.stats()["memory"]["in_use"] == 1
    assert put(block, streams, 2) == 0
    driver("cuCtxSynchronize")
    wait_for_counts(pool, (0, 0, 1))
    assert pool.stats()["memory"]["quarantined"] == 0
    """)
