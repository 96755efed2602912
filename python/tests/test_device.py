"""Batches and weights in the memory of a GPU, over the mock driver that stands for libcuda."""

import json
import os
import textwrap

import pytest

import pinpool
import pinpool.safetensors
from test_double import over_the_double, pytestmark  # noqa: F401

PRELUDE = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp(prefix="pinpool-device."))
import atexit, shutil
atexit.register(shutil.rmtree, folder)
pool, spare = pool_of(max_bytes="64MiB"), pool_of(max_bytes="64MiB")

def content(number, size=5000):
    return np.random.default_rng(number).bytes(size + number)

def make_files(count, size=5000):
    for number in range(count):
        (folder / f"{number:02}").write_bytes(content(number, size))

def loader_of(**settings):
    return pinpool.Loader(folder, device="cuda:0", pool=pool, **({"batch_size": 3} | settings))

def read(address, size, stream=None):
    # Into pinned memory, since a copy into other memory returns at its end.
    data = spare.get(size)
    if stream is None:
        driver("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ptr), ctypes.c_uint64(address), ctypes.c_size_t(size))
    else:
        driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(data.ptr), ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_void_p(stream))
    return memoryview(data)

def synchronize(stream): driver("cuStreamSynchronize", ctypes.c_void_p(stream))
def is_idle(stream): return cuda.cuStreamQuery(ctypes.c_void_p(stream)) == 0

def bytes_of(array):
    interface = array.__cuda_array_interface__
    synchronize(interface["stream"])
    return bytes(read(interface["data"][0], array.nbytes))

class DlTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]

def dltensor(capsule, name=b"dltensor", skip=0):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = DlTensor.from_address(get(capsule, name) + skip)
    # A copy, since the structure ends with the capsule.
    return DlTensor.from_buffer_copy(tensor), tensor.shape[:tensor.ndim], tensor.strides[:tensor.ndim]
"""


@pytest.fixture
def on_the_double(over_the_double):  # noqa: F811
    return lambda code: over_the_double(PRELUDE + textwrap.dedent(code))


def test_batches_arrive_on_the_device(on_the_double):
    on_the_double(
        """
        make_files(20)
        for settings in ({}, {"batch_bytes": 1777}, {"workers": 1, "prefetch": 1}):
            loader = loader_of(epochs=2, **settings)
            arrived = []
            for batch in loader:
                assert batch.buffer.device == "cuda:0" and not isinstance(batch.buffer, pinpool.Buffer)
                for index, array in enumerate(batch):
                    assert array.dtype == "uint8" and array.shape == (array.nbytes,) and array.device == "cuda:0"
                    if batch.starts[index] == 0:
                        arrived.append(b"")
                    arrived[-1] += bytes_of(array)
            assert arrived == 2 * [content(number) for number in range(20)], settings
        import pickle
        try:
            pickle.dumps(batch)
        except TypeError as error:
            assert "on a GPU cannot be pickled" in str(error)
        else:
            raise AssertionError("it was pickled")
        del batch, array
        settled(pool, (0, 0, held_back(pool)[2]))
        """
    )


def test_a_consumer_waits_for_the_copy_on_the_stream_that_it_names(on_the_double):
    on_the_double(
        """
        consumer = new_stream()
        for hand in (lambda array: array.__dlpack__(stream=consumer), lambda array: array.record_stream(consumer)):
            # A new copy behind the held stream, in memory of its own.
            device = pinpool._pinpool.Device(0)
            target = device.allocate(SIZE)
            ours = target.stream
            assert ours not in (0, 1, 2)
            hold(ours)
            pinned = pool.get(SIZE)
            np.frombuffer(pinned, np.uint8)[:] = 7
            target._fill(pinned, 0)
            assert pinned.released
            array = pinpool.DeviceArray(target, 0, (SIZE,))
            kept = hand(array)
            address = dltensor(array.__dlpack__(stream=consumer))[0].data
            read_back = read(address, SIZE, consumer)
            waits = not is_idle(consumer)
            let_run(ours)
            synchronize(consumer)
            assert waits, "for the copy"
            assert set(read_back) == {7}
        """
    )


def test_memory_is_not_filled_again_while_a_stream_that_it_was_handed_to_reads_it(on_the_double):
    on_the_double(
        """
        make_files(8)
        for number, hand in enumerate((lambda array: array.__dlpack__(stream=consumer), lambda array: array.record_stream(consumer))):
            consumer = new_stream()
            loader = loader_of(batch_size=1)
            batches = iter(loader)
            batch = next(batches)
            kept = hand(batch[0])
            address = dltensor(pinpool.DeviceArray(batch.buffer, 0, (1,)).__dlpack__(stream=consumer))[0].data
            hold(consumer)
            read_back = read(address, len(content(0)), consumer)
            del kept, batch
            gc.collect()
            seen = set()
            for batch in batches:
                seen.add(dltensor(batch[0].__dlpack__(stream=1))[0].data)
            del batch
            let_run(consumer)
            synchronize(consumer)
            assert address in seen, "the memory is used again"
            assert bytes(read_back) == content(0), "and not before it was read"
        """
    )


def test_memory_whose_users_are_not_known_waits_for_the_whole_device(on_the_double):
    on_the_double(
        """
        make_files(2)
        for lend in ("__cuda_array_interface__", "ptr"):
            batch = next(iter(loader_of(batch_size=1)))
            before = cuda.double_calls(b"cuCtxSynchronize")
            getattr(batch[0], lend)
            del batch
            gc.collect()
            assert cuda.double_calls(b"cuCtxSynchronize") > before
        batch = next(iter(loader_of(batch_size=1)))
        batch.buffer.record_stream(0)
        before = cuda.double_calls(b"cuCtxSynchronize")
        del batch
        gc.collect()
        assert cuda.double_calls(b"cuCtxSynchronize") == before
        """
    )


def test_the_structures_of_other_libraries(on_the_double):
    on_the_double(
        """
        make_files(1)
        batch = next(iter(loader_of()))
        array = batch[0]
        size = len(content(0))
        assert array.__dlpack_device__() == batch.buffer.__dlpack_device__() == (2, 0)
        interface = array.__cuda_array_interface__
        assert interface == {"shape": (size,), "typestr": "|u1", "data": (array.ptr, False), "version": 3, "strides": None, "stream": batch.buffer.stream}
        for capsule, name, skip in ((array.__dlpack__(), b"dltensor", 0), (array.__dlpack__(stream=2, max_version=(1, 0)), b"dltensor_versioned", 32),
                                    (array.__dlpack__(stream=-1, dl_device=(2, 0), copy=False), b"dltensor", 0)):
            tensor, shape, strides = dltensor(capsule, name, skip)
            assert (tensor.data, tensor.kind, tensor.id, tensor.code, tensor.bits, tensor.lanes, shape, strides, tensor.offset) == (
                array.ptr, 2, 0, 1, 8, 1, [size], [1], 0)
        whole = batch.buffer.__cuda_array_interface__
        assert whole == interface
        tensor, shape, _ = dltensor(batch.buffer.__dlpack__(stream=1, max_version=(1, 1), dl_device=(2, 0), copy=None), b"dltensor_versioned", 32)
        assert (tensor.data, tensor.kind, shape) == (array.ptr, 2, [size])
        try: batch.buffer.__dlpack__(copy=True)
        except BufferError as error: assert "without a copy" in str(error), error
        else: raise AssertionError("no error")
        matrix = pinpool.DeviceArray(batch.buffer, 16, (3, 0, 5), "float16")
        assert dltensor(matrix.__dlpack__())[0].data is None
        matrix = pinpool.DeviceArray(batch.buffer, 16, (3, 4, 5), "bfloat16")
        tensor, shape, strides = dltensor(matrix.__dlpack__())
        assert (tensor.data, tensor.code, tensor.bits, shape, strides) == (array.ptr + 16, 4, 16, [3, 4, 5], [20, 5, 1])
        assert not hasattr(matrix, "__cuda_array_interface__") and len(matrix) == 3 and matrix.nbytes == 120
        assert pinpool.DeviceArray(batch.buffer, 0, (4,), "float32").__cuda_array_interface__["typestr"] == "<f4"
        for bad, kind, said in (({"stream": 0}, BufferError, "ambiguous"), ({"dl_device": (1, 0)}, BufferError, "cuda:0"),
                                ({"copy": True}, BufferError, "without a copy"), ({"stream": "main"}, TypeError, "no stream")):
            try: array.__dlpack__(**bad)
            except kind as error: assert said in str(error), error
            else: raise AssertionError(bad)
        """
    )


def test_the_end_of_an_import_keeps_the_memory_until_then(on_the_double):
    on_the_double(
        """
        make_files(1)
        batch = next(iter(loader_of()))
        capsule = batch[0].__dlpack__(stream=1)
        address = dltensor(capsule)[0].data
        del batch
        gc.collect()
        assert bytes(read(address, len(content(0)))) == content(0)
        del capsule
        gc.collect()
        """
    )


def test_tensors_are_imports_for_the_current_stream(on_the_double):
    on_the_double(
        """
        import sys, types
        class Tensor:
            def __init__(self, array):
                assert array.__dlpack_device__() == (2, 0)
                self.capsule = array.__dlpack__(stream=current, max_version=(1, 0))
                tensor, shape, _ = dltensor(self.capsule, b"dltensor_versioned", 32)
                self.whole = (tensor.data, shape[0])
            def __getitem__(self, part):
                assert 0 <= part.start <= part.stop <= self.whole[1]
                return read(self.whole[0] + part.start, part.stop - part.start, current)
        current = new_stream()
        torch = types.ModuleType("torch")
        torch.from_dlpack = Tensor
        make_files(7)
        for batch in loader_of():
            before = cuda.double_calls(b"cuStreamWaitEvent")
            sys.modules["torch"] = torch
            tensors = batch.tensors()
            del sys.modules["torch"]
            assert cuda.double_calls(b"cuStreamWaitEvent") > before
            synchronize(current)
            assert [bytes(tensor) for tensor in tensors] == [content(number) for number in batch.indices]
        """
    )


def test_states_breaks_and_empty_files(on_the_double):
    on_the_double(
        """
        make_files(9)
        (folder / "05").write_bytes(b"")
        loader = loader_of(batch_size=2)
        for batch in loader:
            if batch.index == 1: break
        state = loader.state()
        rest = [(batch.index, [bytes_of(array) for array in batch]) for batch in loader]
        assert [index for index, _ in rest] == [2, 3, 4] and rest[0][1] == [content(4), b""]
        assert [batch.index for batch in loader_of(batch_size=2, state=state)] == [2, 3, 4]
        for number in range(9): (folder / f"{number:02}").write_bytes(b"")
        [batch] = loader_of(batch_size=9)
        assert batch.nbytes == 0 and batch[0].__cuda_array_interface__["data"] == (0, False) and dltensor(batch[0].__dlpack__())[0].data is None
        """
    )


def test_labels_are_read_before_the_copy(on_the_double):
    on_the_double(
        """
        import io, tarfile
        with tarfile.open(folder / "a.tar.gz", "w:gz") as tar:
            for number in range(4):
                for field, data in (("jpg", content(number)), ("cls", b"%d" % (number * 3))):
                    info = tarfile.TarInfo(f"{number}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        [batch] = loader_of(batch_size=4, containers=True, labels="cls")
        assert batch.labels == [0, 3, 6, 9]
        assert [bytes_of(field) for field in batch.field("jpg")] == [content(number) for number in range(4)]
        """
    )


def test_a_small_pool_and_a_small_device(on_the_double):
    on_the_double(
        """
        make_files(12, 1_000_000)
        pool = pool_of(max_bytes="4MiB", preset="adaptive", poll=True)
        assert [bytes_of(batch[0]) for batch in loader_of(batch_size=1)] == [content(number, 1_000_000) for number in range(12)]
        cuda.double_fail(b"cuMemAllocAsync", 1, 1, 2)
        cuda.double_fail(b"cuMemAlloc_v2", 1, 1, 2)
        try: list(loader_of())
        except pinpool.LimitError as error: assert "cuda:0 has no room for" in str(error) and "smaller ones" in str(error), error
        else: raise AssertionError("no error")
        """
    )


def test_a_lost_device_is_an_error_that_names_it(on_the_double):
    on_the_double(
        """
        make_files(9)
        batches = iter(loader_of(batch_size=1, workers=1, prefetch=1))
        batch = next(batches)
        cuda.double_lose_device(719)
        try:
            for batch in batches: pass
        except pinpool.PinpoolError as error: assert isinstance(error, (pinpool.DeviceError, pinpool.BackendError)) and "cuda" in str(error).lower(), repr(error)
        else: raise AssertionError("no error")
        try: batch[0].__dlpack__(stream=1)
        except pinpool.PinpoolError as error: assert "cuda:0" in str(error), error
        else: raise AssertionError("no error")
        try: pinpool.Loader(folder, device="cuda:0", pool=pool)
        except pinpool.BackendError as error: assert "cuda:0" in str(error), error
        else: raise AssertionError("no error")
        """
    )


def test_a_device_that_is_not_there_is_named(on_the_double, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    on_the_double(
        """
        make_files(1)
        try: pinpool.Loader(folder, device="cuda:7", pool=pool)
        except pinpool.BackendError as error: assert "cuda:7" in str(error) and "no device 7, the driver sees 1" in str(error), error
        else: raise AssertionError("no error")
        """
    )
    if not os.path.exists("/dev/nvidiactl"):
        with pytest.raises(pinpool.BackendError, match="device cuda:0: .*no CUDA driver"):
            pinpool.Loader(tmp_path, device="cuda:0")
        with pytest.raises(pinpool.BackendError, match="device cuda:0: .*no CUDA driver"):
            pinpool.safetensors.load(tmp_path / "a", "cuda:0")


def test_the_context_of_the_calling_thread_stays(on_the_double):
    on_the_double(
        """
        make_files(4)
        def current():
            context = ctypes.c_void_p()
            driver("cuCtxGetCurrent", ctypes.byref(context))
            return context.value
        def load():
            before = current()
            loader = loader_of(batch_size=1)
            for batch in loader:
                batch[0].__dlpack__(stream=1)
                batch.buffer.record_stream(1)
                assert current() == before
            del loader, batch
            gc.collect()
            assert current() == before
            seen.append(before)
        seen = []
        load()
        driver("cuCtxSetCurrent", None)
        load()
        assert seen[0] is not None and seen[1] is None
        driver("cuCtxSetCurrent", context)
        """
    )


def test_a_child_of_fork_is_refused(on_the_double):
    on_the_double(
        """
        import warnings
        warnings.simplefilter("ignore")
        make_files(3)
        batch = next(iter(loader_of()))
        child = os.fork()
        if child == 0:
            try: batch[0].__dlpack__(stream=1)
            except pinpool.ForkError as error:
                del batch
                os._exit(7 if "spawn" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )


def weights(path, tensors, pad=0):
    """A file of these tensors: name, dtype, shape and bytes."""
    header, data = {}, b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("pad", range(3))
def test_weights_are_streamed_to_the_device(on_the_double, tmp_path, pad):
    tensors = [("w", "F32", [50, 40], os.urandom(8000)), ("h", "BF16", [30], os.urandom(60)), ("none", "F16", [0, 7], b""), ("b", "U8", [7], os.urandom(7))]
    weights(tmp_path / "aligned", tensors, pad)
    weights(tmp_path / "crooked", tensors[::-1], pad)
    expected = {name: (dtype, shape, content.hex()) for name, dtype, shape, content in tensors}
    on_the_double(
        f"""
        import pinpool.safetensors
        expected = {expected!r}
        names = {{"F32": "float32", "BF16": "bfloat16", "F16": "float16", "U8": "uint8"}}
        pinpool.safetensors._COPY_BYTES = 1000
        for path in ("aligned", "crooked"):
            tensors = pinpool.safetensors.load({str(tmp_path)!r} + "/" + path, "cuda:0", pool=pool, workers=3)
            assert set(tensors) == set(expected)
            for name, (dtype, shape, content) in expected.items():
                array = tensors[name]
                assert (array.dtype, array.shape) == (names[dtype], tuple(shape))
                tensor, of_shape, _ = dltensor(array.__dlpack__(stream=1))
                synchronize(array.buffer.stream)
                assert of_shape == shape and (tensor.data or 0) % 2 == 0 or dtype == "U8"
                assert bytes(read(tensor.data, array.nbytes)).hex() == content if array.nbytes else tensor.data is None
            w = np.frombuffer(bytes.fromhex(expected["w"][2]), np.float32).reshape(50, 40)[3:9, 4:]
            array = pinpool.safetensors.load({str(tmp_path)!r} + "/" + path, 0, names=["w"], slices={{"w": np.s_[3:9, 4:]}}, pool=pool)["w"]
            assert array.shape == w.shape and bytes_of(array) == w.tobytes()
            del array, tensors
            settled(pool, (0, 0, held_back(pool)[2]))
        """
    )


def test_weights_that_are_cut_off_leave_nothing_behind(on_the_double, tmp_path):
    weights(tmp_path / "a", [("w", "U8", [100_000], bytes(100_000))])
    on_the_double(
        f"""
        import pinpool.safetensors
        path = pathlib.Path({str(tmp_path / "a")!r})
        header = pinpool.safetensors.read_header
        def shorten(fd, name):
            tensors = header(fd, name)
            os.truncate(path, 50_000)
            return tensors
        pinpool.safetensors.read_header = shorten
        try: pinpool.safetensors.load(path, "cuda:0", pool=pool)
        except pinpool.LoadError as error: assert "truncated: it ended at byte 50000" in str(error), error
        else: raise AssertionError("no error")
        gc.collect()
        settled(pool, (0, 0, held_back(pool)[2]))
        """
    )


def test_the_interpreter_ends_with_batches_alive(on_the_double):
    on_the_double(
        """
        make_files(9)
        batches = iter(loader_of(batch_size=1))
        kept = [next(batches) for _ in range(3)]
        capsule = kept[0][0].__dlpack__(stream=new_stream())
        """
    )
