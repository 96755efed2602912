"""Weights of safetensors files in pinned memory."""

import json
import sys

import numpy as np
import pytest

import pinpool
import pinpool.safetensors
from conftest import in_use


def file_of(path, entries, data, more=None):
    """A file with these header entries and this data."""
    header = json.dumps({**(more or {}), **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def weights(tmp_path):
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = np.array([1, -2, 3], np.int8)
    entries = {"b": entry("I8", [3], 48, 51), "w": entry("F32", [3, 4], 0, 48), "none": entry("F16", [0, 7], 51, 51)}
    file = file_of(tmp_path / "a.safetensors", entries, w.tobytes() + b.tobytes(), {"__metadata__": {"format": "pt"}})
    return file, {"w": w, "b": b, "none": np.empty((0, 7), np.float16)}


def test_tensors_are_views_of_one_buffer(weights, pool):
    path, expected = weights
    tensors = pinpool.safetensors.load(path, pool=pool)
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
        assert (tensors[name] == array).all() and tensors[name].ctypes.data % 64 == 0 or not array.size
    assert in_use(pool) == 1
    b = tensors["b"]
    del tensors
    assert in_use(pool) == 1 and b.tolist() == [1, -2, 3]
    del b
    assert in_use(pool) == 0


def test_a_long_tensor_is_read_in_pieces_by_many_threads(tmp_path, monkeypatch, pool):
    monkeypatch.setattr(pinpool.safetensors, "_PIECE_BYTES", 1000)
    data = np.random.default_rng(1).integers(0, 256, 100_003, np.uint8)
    entries = {"x": entry("U8", [100_000], 0, 100_000), "y": entry("U8", [3], 100_000, 100_003)}
    path = file_of(tmp_path / "a", entries, data.tobytes())
    for workers in (1, 7):
        tensors = pinpool.safetensors.load(path, pool=pool, workers=workers)
        assert (np.concatenate([tensors["x"], tensors["y"]]) == data).all()


def test_torch_has_dtypes_that_numpy_has_not(tmp_path, pool, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # It cannot be imported.
    path = file_of(tmp_path / "a", {"w": entry("BF16", [2], 0, 4)}, b"\x80\x3f\x00\xc0")
    with pytest.raises(TypeError, match="w has the dtype BF16, which NumPy has not: use library='torch'"):
        pinpool.safetensors.load(path, pool=pool)
    torch = pytest.importorskip("torch")
    tensors = pinpool.safetensors.load(path, library="torch", pool=pool)
    assert tensors["w"].dtype == torch.bfloat16 and tensors["w"].tolist() == [1.0, -2.0]
    assert in_use(pool) == 1
    del tensors
    assert in_use(pool) == 0


W = entry("U8", [4], 0, 4)


@pytest.mark.parametrize(
    ("entries", "data", "said"),
    [
        ({"w": W}, b"123", "tensors end at byte .*, the file at"),
        ({"w": W}, b"12345", "tensors end at byte .*, the file at"),
        ({"w": entry("U8", [5], 0, 4)}, b"1234", "w has 4 B, but 5 B by its shape"),
        ({"w": entry("U8", [-4], 0, 4)}, b"1234", "w has 4 B"),
        ({"w": entry("U9", [4], 0, 4)}, b"1234", "w has the dtype U9, which is unknown here: known are BOOL"),
        ({"w": W, "v": entry("U8", [2], 3, 5)}, b"12345", "v begins at byte 3 of the data, where byte 4 is the next"),
        ({"w": entry("U8", [4], 4, 0)}, b"1234", "w has -4 B"),
        ({"w": {"dtype": "U8"}}, b"", "KeyError: 'data_offsets'"),
        ({"w": [1]}, b"", "TypeError"),
        ({"w": entry([], [4], 0, 4)}, b"1234", "which is unknown here"),
        ({"w": entry("U8", [4.0], 0, 4)}, b"1234", "TypeError"),
        ({"w": entry("U8", [4], 0, float("inf"))}, b"1234", "TypeError"),
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(tmp_path, pool, entries, data, said):
    with pytest.raises(pinpool.LoadError, match=f"a: (broken safetensors: )?.*{said}"):
        pinpool.safetensors.load(file_of(tmp_path / "a", entries, data), pool=pool)
    assert in_use(pool) == 0


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{x"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, pool, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(pinpool.LoadError, match="broken safetensors"):
        pinpool.safetensors.load(path, pool=pool)


def test_bad_requests_are_named(tmp_path, weights, pool):
    with pytest.raises(FileNotFoundError, match="missing"):
        pinpool.safetensors.load(tmp_path / "missing", pool=pool)
    with pytest.raises(ValueError, match="library='jax'"):
        pinpool.safetensors.load(weights[0], library="jax", pool=pool)
    with pytest.raises(ValueError, match="workers=0"):
        pinpool.safetensors.load(weights[0], workers=0, pool=pool)
    small = pinpool.Pool(env=False, backend="heap", max_bytes="2MiB")
    big = file_of(tmp_path / "big", {"w": entry("U8", [3 << 20], 0, 3 << 20)}, bytes(3 << 20))
    with pytest.raises(pinpool.LimitError):
        pinpool.safetensors.load(big, pool=small)


def test_the_same_as_the_reference(tmp_path, pool):
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {f"t{number}": np.random.default_rng(number).random((number, 3)) for number in range(1, 9)}
    reference.save_file(arrays, tmp_path / "a.safetensors")
    tensors = pinpool.safetensors.load(tmp_path / "a.safetensors", pool=pool)
    assert set(tensors) == set(arrays) and all((tensors[name] == array).all() for name, array in arrays.items())


def test_every_dtype_of_the_format_is_loaded_where_the_library_has_it(tmp_path, pool):
    dtypes = pinpool.safetensors.DTYPES
    assert len(dtypes) == 22
    entries, place = {}, 0
    for name, (bits, *_) in dtypes.items():
        entries[name] = entry(name, [2, 4], place, place + bits)
        place += bits
    data = bytes(range(1, 256)) * 2
    path = file_of(tmp_path / "a", entries, data[:place])
    header = pinpool.safetensors.header(path)
    assert [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in header.tensors.values()] == [
        (name, (2, 4), bits) for name, (bits, *_) in dtypes.items()
    ]
    of_numpy = [name for name, (_, in_numpy, _) in dtypes.items() if in_numpy]
    for name, array in pinpool.safetensors.load(path, names=of_numpy, pool=pool).items():
        begin, end = entries[name]["data_offsets"]
        assert array.dtype.name == dtypes[name][1] and array.shape == (2, 4) and array.tobytes() == data[begin:end]
    with pytest.raises(TypeError, match="F6_E2M3 has the dtype F6_E2M3, which NumPy has not"):
        pinpool.safetensors.load(path, names=["F6_E2M3"], pool=pool)
    torch = pytest.importorskip("torch")
    of_torch = [name for name, (*_, in_torch) in dtypes.items() if in_torch]
    for name, tensor in pinpool.safetensors.load(path, names=of_torch, pool=pool, library="torch").items():
        begin, end = entries[name]["data_offsets"]
        assert str(tensor.dtype) == "torch." + dtypes[name][2] and tensor.shape == ((2, 2) if name == "F4" else (2, 4))
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == data[begin:end]
    with pytest.raises(TypeError, match="F6_E3M2, which torch .* has not"):
        pinpool.safetensors.load(path, names=["F6_E3M2"], pool=pool, library="torch")
    del tensor, array
    assert in_use(pool) == 0


@pytest.fixture
def sharded(tmp_path):
    arrays = {f"layer.{number}": np.arange(60, dtype=np.int32).reshape(3, 4, 5) + number for number in range(4)}
    for shard in range(2):
        its = {name: array for name, array in arrays.items() if int(name[-1]) % 2 == shard}
        entries = {name: entry("I32", [3, 4, 5], 240 * at, 240 * at + 240) for at, name in enumerate(its)}
        file_of(tmp_path / f"model-{shard}", entries, b"".join(map(np.ndarray.tobytes, its.values())), {"__metadata__": {"format": "np"}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 960}, "weight_map": {name: f"model-{int(name[-1]) % 2}" for name in arrays}}))
    return index, arrays


def test_an_index_names_the_files_and_names_choose_among_them(sharded, pool):
    index, arrays = sharded
    header = pinpool.safetensors.header(index)
    assert header.metadata == {"format": "np", "total_size": 960} and set(header.tensors) == set(arrays)
    for names in (None, ["layer.3", "layer.0"], ["layer.2"], []):
        tensors = pinpool.safetensors.load(index, names=names, pool=pool)
        assert set(tensors) == set(arrays if names is None else names)
        assert all((tensors[name] == arrays[name]).all() for name in tensors)
        assert in_use(pool) == len({int(name[-1]) % 2 for name in tensors}), "a buffer for each file that is needed"
    (index.parent / "model-1").unlink()
    assert set(pinpool.safetensors.load(index, names=["layer.2"], pool=pool)) == {"layer.2"}
    with pytest.raises(FileNotFoundError, match="model-1"):
        pinpool.safetensors.load(index, pool=pool)
    for path, arguments in ((index, {"names": ["layer.4"]}), (index.parent / "model-0", {"slices": {"layer.1": slice(1)}})):
        with pytest.raises(KeyError, match="has no tensor 'layer"):
            pinpool.safetensors.load(path, pool=pool, **arguments)
    index.write_text('{"weight_map": {"w": "model-0"}}')
    with pytest.raises(pinpool.LoadError, match="model-0: no tensor 'w', which the index says is there"):
        pinpool.safetensors.load(index, pool=pool)
    index.write_text("{}")
    with pytest.raises(pinpool.LoadError, match="no index of safetensors files .*weight_map"):
        pinpool.safetensors.header(index)


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize(
    "slices",
    [np.s_[1:], np.s_[-1:], np.s_[:, 1:3], np.s_[0:2, 2:, :4], np.s_[:, :, 4:], np.s_[2:2], np.s_[:, 3:9], np.s_[5:], (), np.s_[:, :, :]],
    ids=str,
)
def test_a_part_of_a_tensor_is_what_its_slices_give(sharded, pool, monkeypatch, slices, piece):
    monkeypatch.setattr(pinpool.safetensors, "_PIECE_BYTES", piece)
    index, arrays = sharded
    tensors = pinpool.safetensors.load(index, names=["layer.0", "layer.2"], slices={"layer.2": slices}, pool=pool)
    expected = arrays["layer.2"][slices]
    assert tensors["layer.2"].shape == expected.shape and (tensors["layer.2"] == expected).all()
    assert (tensors["layer.0"] == arrays["layer.0"]).all()


def test_slices_that_cannot_be_are_named(sharded, tmp_path, pool):
    for slices in (np.s_[::2], np.s_[0], np.s_[:, :, :, :], "ab"):
        with pytest.raises(ValueError, match=r"slices of layer.0.*shape \(3, 4, 5\)"):
            pinpool.safetensors.load(sharded[0], slices={"layer.0": slices}, pool=pool)
    path = file_of(tmp_path / "a", {"w": entry("F4", [2, 2], 0, 2)}, b"12")
    with pytest.raises(ValueError, match="F4 has elements of 4 bits"):
        pinpool.safetensors.load(path, slices={"w": np.s_[1:]}, pool=pool)
