"""`SharedPool.collate`: compared with torch's `default_collate`, in worker processes, and for batches of any length."""

import collections
import dataclasses
import logging
import multiprocessing
import pathlib
import platform
import resource
import sys
import types
from types import MappingProxyType

import numpy as np
import pytest

import pinpool

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed: pip install torch")

Point = collections.namedtuple("Point", "x y")


class Chain(list):
    pass


class Fixed(collections.abc.Mapping):
    def __init__(self, items):
        self.items_of = dict(items)

    def __getitem__(self, key):
        return self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


@dataclasses.dataclass
class Box:
    x: int


def of_torch(name):
    """Tensors of the dtype with this name, with arbitrary bits."""
    return [torch.arange(i, i + 8, dtype=torch.uint8).view(getattr(torch, name)) for i in range(2)]


# Each creates two samples. The batch, or the error, is compared with torch's.
KINDS = {
    "uint8 arrays": lambda: [np.full((3, 4), i, np.uint8) for i in range(2)],
    "float32 arrays": lambda: [np.full((3,), i, np.float32) for i in range(2)],
    "uint16 arrays": lambda: [np.full((3,), i, np.uint16) for i in range(2)],
    "transposed arrays": lambda: [np.arange(12).reshape(3, 4).T + i for i in range(2)],
    "arrays without dimensions": lambda: [np.array(i, np.int16) for i in range(2)],
    "empty arrays": lambda: [np.empty((0, 4), np.float16) for _ in range(2)],
    "arrays of text": lambda: [np.array("a"), np.array("b")],
    "arrays of objects": lambda: [np.array([None, i], object) for i in range(2)],
    "arrays with fields": lambda: [np.zeros(2, "i4,f8") for _ in range(2)],
    "arrays of dates": lambda: [np.array(["2026-01-01"], "M8[D]") for _ in range(2)],
    "NumPy numbers": lambda: [np.float32(1.5), np.float32(2.5)],
    "NumPy float64": lambda: [np.float64(0.1), np.float64(0.2)],
    "NumPy bools": lambda: [np.True_, np.False_],
    "whole numbers": lambda: [1, 2],
    "floats": lambda: [0.1, 0.2],
    "bools": lambda: [True, False],
    "whole numbers and floats": lambda: [1, 0.5],
    "text": lambda: ["a", "b"],
    "bytes": lambda: [b"a", b"b"],
    "None": lambda: [None, None],
    "sets": lambda: [{1}, {2}],
    "data classes": lambda: [Box(1), Box(2)],
    "paths": lambda: [pathlib.Path("a"), pathlib.Path("b")],
    "images of no library": lambda: [object(), object()],
    "tuples": lambda: [(np.full(3, i), i, "a") for i in range(2)],
    "lists": lambda: [[i, float(i)] for i in range(2)],
    "lists of another class": lambda: [Chain([i, np.full(2, i)]) for i in range(2)],
    "lists of other lengths": lambda: [[1], [1, 2]],
    "named tuples": lambda: [Point(np.full(2, i), i) for i in range(2)],
    "dicts": lambda: [{"image": np.full((2, 2), i), "meta": {"id": i, "name": "n"}} for i in range(2)],
    "ordered dicts": lambda: [collections.OrderedDict(b=i, a=np.full(2, i)) for i in range(2)],
    "default dicts": lambda: [collections.defaultdict(list, a=np.full(2, i)) for i in range(2)],
    "read-only mappings": lambda: [Fixed({"a": np.full(2, i)}) for i in range(2)],
    "mapping proxies": lambda: [MappingProxyType({"a": i}) for i in range(2)],
    "dicts that lack a key": lambda: [{"a": 1}, {"b": 1}],
    "ranges": lambda: [range(3), range(3)],
    "tensors": lambda: [torch.full((2, 3), float(i)) for i in range(2)],
    "long arrays": lambda: [np.arange(1 << 16) + i for i in range(2)],
    "long arrays of dates": lambda: [np.arange(1 << 16).astype("M8[s]") for _ in range(2)],
    "long transposed arrays": lambda: [np.arange(1 << 16).reshape(256, 256).T + i for i in range(2)],
    "long tensors": lambda: [torch.arange(1 << 18, dtype=torch.bfloat16) + i for i in range(2)],
    "long conjugated tensors": lambda: [(torch.arange(1 << 16) * 1j + i).conj() for i in range(2)],
    "long transposed tensors": lambda: [torch.arange(1 << 16).reshape(256, 256).T + i for i in range(2)],
    "tensors without dimensions": lambda: [torch.tensor(i) for i in range(2)],
    "tensors and NumPy numbers": lambda: [{"image": torch.full((2,), i), "meta": np.float32(i)} for i in range(2)],
    "transposed tensors": lambda: [torch.arange(6).reshape(2, 3).T + i for i in range(2)],
    "tensors of other shapes": lambda: [torch.zeros(2), torch.zeros(3)],
    "tensors of other types": lambda: [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
    "conjugated tensors": lambda: [torch.tensor([1 + 2j]).conj() for _ in range(2)],
    "parameters": lambda: [torch.nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(2)],
    "sparse tensors": lambda: [torch.eye(3).to_sparse() for _ in range(2)],
    "nested tensors": lambda: [torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]) for _ in range(2)],
    **{
        name: lambda name=name: of_torch(name)
        for name in ("bfloat16", "float16", "complex32", "bool", "uint32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        + ("float8_e8m0fnu", "float4_e2m1fn_x2")
    },
}


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if theirs.numel():
            bits = [tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
            assert torch.equal(*bits)
    elif isinstance(theirs, collections.abc.Mapping):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            same(*pair)
    else:
        assert ours == theirs


@pytest.fixture
def shared(pool):
    with pinpool.SharedPool("1MiB", 2, pool=pool, library="torch") as shared:
        yield shared


@needs_torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_that_of_torchs_default_collate(shared, kind):
    try:
        theirs = torch.utils.data.default_collate(KINDS[kind]())
    except Exception as error:
        with pytest.raises(type(error)):
            shared.collate(KINDS[kind]())
    else:
        same(shared.unpack(shared.collate(KINDS[kind]())), theirs)
    assert shared.counts()["free"] == 2


@needs_torch
def test_a_torch_without_the_private_names_collates_with_one_more_copy(shared, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.data._utils.collate", None)
    samples = [(torch.full((4,), i), i, "text") for i in range(3)]
    same(shared.unpack(shared.collate(samples)), torch.utils.data.default_collate(samples))


@needs_torch
def test_stacked_tensors_are_in_the_shared_buffer_without_gradients(shared):
    packed = shared.collate([(torch.zeros(5, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)])
    assert [(leaf.offset, leaf.shape, leaf.dtype) for leaf in packed._tree] == [(0, (2, 5), "float32"), (64, (2, 3), "bfloat16")]
    zeros, ones = shared.unpack(packed)
    assert ones.untyped_storage().data_ptr() == zeros.untyped_storage().data_ptr() and not zeros.requires_grad
    assert shared.counts()["received"] == 1


@needs_torch
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_pack_keeps_torch_dtypes_that_numpy_lacks(shared):
    batch = {name: of_torch(name)[1] for name in ("bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2")}
    batch["ordered"] = collections.OrderedDict(a=np.float32(1), b=torch.tensor([1 + 2j]).conj())
    batch["sequence"] = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(1)])
    got = shared.unpack(shared.pack(batch))
    assert type(got["sequence"]) is type(batch["sequence"]) and got["sequence"].data.tolist() == [1, 0, 1, 1]
    for name in list(batch)[:3]:
        same(got[name], batch[name])
    assert type(got["ordered"]) is collections.OrderedDict and got["ordered"]["b"].tolist() == [1 - 2j]
    with pytest.raises(TypeError, match=r"a sparse_coo tensor is not stored as one dense array: convert it with to_dense\(\)"):
        shared.pack(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"a quantized tensor .*: convert it with dequantize\(\)"):
        shared.pack(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8))


@needs_torch
def test_tensors_become_arrays_with_library_numpy(pool):
    with pinpool.SharedPool(1000, 2, pool=pool, library="numpy") as shared:
        got = shared.unpack(shared.collate([(torch.full((2,), i), i) for i in range(3)]))
        assert [type(array) for array in got] == [np.ndarray] * 2 and got[0].tolist() == [[0, 0], [1, 1], [2, 2]]
        with pytest.raises(TypeError, match="bfloat16.*library='torch' keeps it"):
            shared.collate([torch.zeros(2, dtype=torch.bfloat16)] * 2)


# The module of the dataset does not import torch.
OF_THE_TRAINER = """
    import sys
    {before}
    import multiprocessing, pinpool, pinpool_samples
    if __name__ == "__main__":
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="64MiB")
        for context in ("fork", "spawn", "forkserver"):
            with pinpool.SharedPool("4KiB", 2, pool=pool) as shared, multiprocessing.get_context(context).Pool(1) as workers:
                packed = workers.apply(pinpool_samples.batch, (shared,))
                kinds = {{type(value).__module__.partition(".")[0] for value in shared.unpack(packed).values()}}
                print(context, sorted(kinds))
"""


@needs_torch
@pytest.mark.parametrize(("before", "kind"), [("import torch", "torch"), ("", "torch"), ("import sys; sys.modules['torch'] = None", "numpy")])
def test_the_trainer_determines_the_library_of_batches(run_in_subprocess, tmp_path, monkeypatch, before, kind):
    (tmp_path / "pinpool_samples.py").write_text(
        "import numpy as np\n"
        "def batch(shared):\n"
        "    return shared.collate([{'x': np.ones(3), 'y': index, 'z': 0.5, 'n': np.float32(1)} for index in range(2)])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    out, _ = run_in_subprocess(OF_THE_TRAINER.format(before=before))
    assert out.splitlines() == [f"{context} ['{kind}']" for context in ("fork", "spawn", "forkserver")]


@pytest.mark.parametrize(("entry", "library"), [(types.ModuleType("torch"), "torch"), (None, "numpy"), ("folder", "numpy")])
def test_only_a_package_is_torch(monkeypatch, tmp_path, entry, library):
    (tmp_path / "torch").mkdir()  # Data, not a package.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "torch", entry)
    if entry == "folder":
        monkeypatch.delitem(sys.modules, "torch")
    assert pinpool._layout.choose_library(None) == library


class Growing:
    """Sample i has 10 ** i numbers."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full(10**index, index, np.uint8)


@needs_torch
def test_batches_longer_than_a_buffer_arrive_with_a_warning(pool, caplog):
    with caplog.at_level(logging.WARNING, "pinpool"):
        with pinpool.SharedPool(1, 4, pool=pool, library="numpy") as shared:
            loader = torch.utils.data.DataLoader(Growing(), 1, num_workers=1, collate_fn=shared.collate)
            got = [np.array(batch) for batch in shared.batches(loader)]
            assert [array.shape for array in got] == [(1, 10**index) for index in range(5)]
            assert all((array == index).all() for index, array in enumerate(got))
            assert shared.counts()["free"] == shared.num_buffers
    assert [record.message for record in caplog.records if "large_batch" in record.message] == [
        "pool[shared] large_batch: a batch is larger than a shared buffer, so it is pickled and copied; set buffer_bytes=10 (now 1)"
    ]
    with pytest.raises(pinpool.RequestError, match="2000"):
        pinpool.SharedPool(1000, 1, pool=pool).get(2000)


def test_batches_in_reference_cycles_are_collected(pool):
    with pinpool.SharedPool(100, 5, pool=pool, library="numpy") as shared:
        for batch in shared.batches(shared.collate([np.zeros(3)]) for _ in range(40)):
            circle = [batch]
            circle.append(circle)
            del batch, circle


def test_a_second_loop_over_a_shared_pool_ends_the_first(pool):
    with pinpool.SharedPool(100, 4, pool=pool, library="numpy") as shared:
        loop = iter(shared.batches(shared.collate([number]) for number in range(3)))
        assert next(loop).tolist() == [0]
        assert [batch.tolist() for batch in shared.batches([shared.collate([7])])] == [[7]]
        with pytest.raises(RuntimeError, match="another loop over this SharedPool has begun: create one SharedPool for each loop"):
            next(loop)
        nested = (list(shared.batches([shared.collate([number])])) for number in range(3))
        with pytest.raises(RuntimeError, match="another thread or the loader runs a loop over this SharedPool: create one"):
            list(shared.batches(nested))
        assert next(iter(shared.batches([shared.collate([8])]))).tolist() == [8]  # Dropped before its end.
        assert [batch.tolist() for batch in shared.batches([shared.collate([9])])] == [[9]]


@needs_torch
def test_a_new_loop_ends_the_workers_of_a_kept_loop(pool):
    with pinpool.SharedPool(100, 5, pool=pool, library="numpy") as shared:
        loader = torch.utils.data.DataLoader(range(3), 1, num_workers=1, collate_fn=shared.collate)
        check = iter(shared.batches(loader))
        kept = [next(check) for _ in range(2)]
        workers = multiprocessing.active_children()
        assert len(workers) == 1
        assert [batch.tolist() for batch in shared.batches(loader)] == [[0], [1], [2]] and [batch.tolist() for batch in kept] == [[0], [1]]
        assert not workers[0].is_alive()


def test_a_batch_without_a_ticket_is_an_error_and_not_the_end(pool):
    with pinpool.SharedPool(100, 2, pool=pool, library="numpy") as shared:
        for item in (None, [1, 2]):
            with pytest.raises(TypeError, match=f"a {type(item).__name__} is not a batch of a shared pool: pass collate_fn=shared.collate"):
                list(shared.batches([item]))


def test_a_dropped_packed_batch_frees_its_buffer(pool):
    with pinpool.SharedPool(1000, 2, pool=pool, library="numpy") as shared, pinpool.SharedPool(1000, 1, pool=pool) as _other:
        packed = shared.collate([1, 2])
        assert "shared.batches(loader)" in repr(packed) and shared.counts()["sent"] == 1
        del packed
        assert shared.counts() == {"free": 2, "filling": 0, "sent": 0, "received": 0}
        packed = shared.collate([1, 2])
        array = shared.unpack(packed)
        del packed
        assert array.tolist() == [1, 2] and shared.counts()["received"] == 1


class Fresh:
    """Samples in new memory, each with the process's page-fault count so far."""

    def __len__(self):
        return 60 * 8

    def __getitem__(self, index):
        return np.full(1 << 19, index % 256, np.uint8), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@needs_torch
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, whose malloc is told to keep memory")
def test_a_worker_keeps_the_memory_of_its_samples_from_batch_to_batch(pool):
    with pinpool.SharedPool("5MiB", 4, pool=pool, library="numpy") as shared:
        loader = torch.utils.data.DataLoader(Fresh(), 8, num_workers=1, collate_fn=shared.collate)
        faults = [int(pages[0]) for _samples, pages in shared.batches(loader)]
    # A batch has 1,024 pages. The memory of the first batches is always new.
    assert faults[-1] - faults[20] < 39 * 1024 // 4
