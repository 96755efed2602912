"""Decoded images compared with Pillow's, failures, and paths with braces and patterns."""

import io
import pickle

import numpy as np
import pytest

import pinpool
import pinpool_loader
from helpers import heap, write_tar
from pinpool_loader import _paths

PIL = pytest.importorskip("PIL.Image")
from PIL import ImageOps  # noqa: E402

#: Pillow's decoder rounds differently, most at half color resolution: differences of 0.44 and 4 were measured.
MEAN_DIFFERENCE, MOST_DIFFERENCE = 0.6, 6


def photo(width, height, mode="RGB", seed=0):
    """An image with soft shapes, as in a photo."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (7, 9, 3), np.uint8)
    return PIL.fromarray(small).resize((width, height), PIL.BICUBIC).convert(mode)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(files, folder, decoder, **settings):
    for name, data in files.items():
        (folder / name).write_bytes(data)
    loader = pinpool_loader.Loader(folder, batch_size=64, pool=heap(), decode={"jpg;png": decoder}, **settings)
    (batch,) = loader
    return batch


def close_to(found, expected):
    assert found.shape == expected.shape
    difference = np.abs(found.astype(int) - np.asarray(expected).astype(int))
    return difference.mean() <= MEAN_DIFFERENCE and difference.max() <= MOST_DIFFERENCE


FILES = {
    "half_colors.jpg": (photo(200, 150), "JPEG", {"quality": 90}),
    "full_colors.jpg": (photo(333, 77, seed=1), "JPEG", {"quality": 95, "subsampling": 0}),
    "progressive.jpg": (photo(150, 200, seed=2), "JPEG", {"progressive": True}),
    "gray.jpg": (photo(100, 100, "L"), "JPEG", {}),
    "smaller.jpg": (photo(31, 17), "JPEG", {}),
    "rgb.png": (photo(120, 130), "PNG", {}),
    "transparent.png": (photo(90, 60, "RGBA"), "PNG", {}),
    "palette.png": (photo(64, 64).quantize(16), "PNG", {}),
    "gray.png": (photo(64, 48, "L"), "PNG", {}),
    "of_the_size.png": (photo(80, 64), "PNG", {}),
}


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_pixels_equal_those_of_pillow(tmp_path, layout, fit):
    files = {name: encoded(image, kind, **options) for name, (image, kind, options) in FILES.items()}
    batch = decoded(files, tmp_path, pinpool_loader.ImageDecoder(64, 80, layout=layout, fit=fit))
    images = batch.field("jpg")
    assert images.shape == (len(files), *((3, 64, 80) if layout == "CHW" else (64, 80, 3))) and images.dtype == np.uint8
    for name, image in zip((name.rpartition("/")[2] for name in batch.names), images, strict=True):
        opened = PIL.open(io.BytesIO(files[name])).convert("RGB")
        expected = opened.resize((80, 64), PIL.BILINEAR) if fit == "stretch" else ImageOps.fit(opened, (80, 64), PIL.BILINEAR)
        expected = np.asarray(expected)
        assert close_to(image.transpose(1, 2, 0) if layout == "CHW" else image, expected), name
        if name == "of_the_size.png":
            assert (image == (expected.transpose(2, 0, 1) if layout == "CHW" else expected)).all()


def test_a_sample_of_a_shard_has_arrays_labels_and_its_other_fields(tmp_path):
    members, images = {}, []
    for index in range(5):
        image = photo(40, 40, seed=index)
        images.append(np.asarray(image))
        members |= {
            f"{index}.cls": str(index * 10).encode(),
            f"{index}.png": encoded(image, "PNG"),
            f"{index}.txt": b"word" * index,
        }
    write_tar(tmp_path / "shard.tar", members.items())
    decode = {"jpg;png": pinpool_loader.ImageDecoder(40, 40)}
    settings = {"batch_size": 4, "label_field": "cls", "num_threads": 2, "decode": decode}
    batches = list(pinpool_loader.Loader(tmp_path / "shard.tar", pool=heap(), **settings))
    assert [len(batch) for batch in batches] == [4, 1]
    for batch in batches:
        numbers = [label // 10 for label in batch.labels]
        assert (batch.field("jpg;png") == np.stack([images[number] for number in numbers])).all()
        assert (batch.field("png") == batch.field("jpg")).all() and (batch["png"] == batch.field("png")).all()
        assert batch["labels"] == batch.labels == batch.label_array.tolist() and batch.label_array.dtype == np.int64
        assert [bytes(text) for text in batch.field("txt")] == [b"word" * number for number in numbers]
        sample = batch[0]
        assert sorted(sample) == ["cls", "jpg", "png", "txt"]
        assert (sample["jpg"] == images[numbers[0]]).all() and sample["png"] is sample["jpg"] and list(batch)[0].keys() == sample.keys()
        assert batch.is_whole(0) and batch.nbytes > 4800
        with pytest.raises(TypeError, match="the samples are decoded"):
            batch.tensors()
    again = pinpool_loader.Loader(tmp_path / "shard.tar", pool=heap(), **settings)
    assert [batch.labels for batch in again] == [batch.labels for batch in batches]


@pytest.mark.parametrize("lost", [(), (0,), (2,), (1, 2, 4), (0, 1, 2, 3, 4)])
def test_a_sample_without_a_label_leaves_no_row(tmp_path, lost):
    members = {}
    for index in range(5):
        members |= {f"{index}.cls": b"cat" if index in lost else b"%d" % index, f"{index}.txt": b"%d" % index}
        members |= {f"{index}.{name}": encoded(PIL.new("L", (4, 4), index), "PNG") for name in ("png", "y.png")}
    write_tar(tmp_path / "a.tar", members.items())
    decode = {"png": pinpool_loader.ImageDecoder(2, 2), "y.png": pinpool_loader.ImageDecoder(4, 4, layout="CHW")}
    [batch] = pinpool_loader.Loader(tmp_path / "a.tar", batch_size=5, label_field="cls", decode=decode, on_error="skip", pool=heap())
    kept = [index for index in range(5) if index not in lost]
    assert batch.labels == kept == [int(bytes(text)) for text in batch.field("txt")]
    for name, shape in (("png", (2, 2, 3)), ("y.png", (3, 4, 4))):
        assert batch.field(name).shape == (len(kept), *shape)
        assert [row.flat[0] for row in batch.field(name)] == kept
    assert len(batch.failures) == len(lost)


def test_a_damaged_image_is_named_and_skipped_or_raises(tmp_path):
    whole = encoded(photo(100, 100), "JPEG")
    files = {"a.jpg": whole, "b.jpg": whole[: len(whole) // 2], "c.jpg": b"", "d.png": b"no image", "e.jpg": whole}
    batch = decoded(files, tmp_path, pinpool_loader.ImageDecoder(32, 32), on_error="skip", label_field=None)
    assert [name.rpartition("/")[2] for name in batch.names] == ["a.jpg", "e.jpg"]
    assert batch.field("jpg").shape == (2, 32, 32, 3) and (batch.field("jpg")[0] == batch.field("jpg")[1]).all()
    told = "\n".join(batch.failures)
    assert all(word in told for word in ("b.jpg: its jpg;png cannot be decoded", "c.jpg", "d.png", "neither a JPEG nor a PNG"))
    with pytest.raises(pinpool.LoadError, match="cannot be decoded"):
        decoded(files, tmp_path, pinpool_loader.ImageDecoder(32, 32))
    with pytest.raises(pinpool.LoadError, match=r"no field npy to decode: it has .jpg."):
        next(iter(pinpool_loader.Loader(tmp_path, batch_size=1, pool=heap(), decode={"npy": pinpool_loader.ImageDecoder(1, 1)})))


@pytest.mark.parametrize("stray", ["notes.txt", ".DS_Store"])
def test_a_stray_file_is_named_with_the_pattern_that_avoids_it(tmp_path, stray):
    (tmp_path / "a.jpg").write_bytes(encoded(photo(8, 8), "JPEG"))
    (tmp_path / stray).write_bytes(b"")
    decode = {"jpg": pinpool_loader.ImageDecoder(8, 8)}
    with pytest.raises(pinpool.LoadError, match=rf"{stray}: no field jpg to decode.*by a pattern, as in 'photos/\*\*/\*.jpg'"):
        pinpool_loader.Loader(tmp_path, batch_size=2, decode=decode, pool=heap())
    [batch] = pinpool_loader.Loader(f"{tmp_path}/**/*.jpg", batch_size=2, decode=decode, pool=heap())
    assert len(batch) == 1
    [batch] = pinpool_loader.Loader(tmp_path, batch_size=2, decode=decode, pool=heap(), on_error="skip")
    assert len(batch) == 1 and stray in batch.failures[0]


def test_16_bit_images_are_scaled_and_exif_rotation_is_ignored(tmp_path):
    """As `ImageDecoder` documents: Pillow clips 16-bit values, and ignores EXIF too unless it is told to."""
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    file = io.BytesIO()
    PIL.fromarray(values).save(file, "PNG")
    exif = PIL.Exif()
    exif[0x0112] = 6
    files = {"deep.png": file.getvalue(), "turned.jpg": encoded(photo(8, 8), "JPEG", exif=exif), "plain.jpg": encoded(photo(8, 8), "JPEG")}
    deep, plain, turned = decoded(files, tmp_path, pinpool_loader.ImageDecoder(8, 8)).field("jpg")
    assert np.abs(deep[..., 0].astype(int) - values / 257).max() <= 1 and (plain == turned).all()


def test_braces_and_patterns_name_files_in_order(tmp_path):
    for number in range(12):
        write_tar(tmp_path / f"train-{number:03}.tar", [(f"{number}.txt", b"%d" % number)])
    (tmp_path / "literal{1,2}.txt").write_bytes(b"")

    def names(*paths):
        loader = pinpool_loader.Loader([str(tmp_path / path) for path in paths], batch_size=100, pool=heap())
        return [name.rpartition("/")[2] for batch in loader for name in batch.names]

    assert names("train-{008..011}.tar") == [f"train-{number:03}.tar!{number}" for number in (8, 9, 10, 11)]
    assert names("train-0{10..11}.tar") == names("train-{010..011}.tar")
    assert names("train-00{0..9}.tar") == [f"train-{number:03}.tar!{number}" for number in range(10)]
    assert names("train-00{5..3}.tar") == [f"train-{number:03}.tar!{number}" for number in (5, 4, 3)]
    assert _paths.expand([str(tmp_path / "none-{0..10}.bin")])[-2:] == [str(tmp_path / f"none-{number}.bin") for number in (9, 10)]
    assert names("train-00{3,1}.tar") == ["train-003.tar!3", "train-001.tar!1"]
    assert len(names("train-*.tar")) == 12 and names("train-00[01].tar") == names("train-{000..001}.tar")
    assert names("literal{1,2}.txt") == ["literal{1,2}.txt"]
    for path, words in [("none-*.tar", "no file matches"), ("train-{0..9999999}.tar", "more than"), ("{0..2000}{0..2000}", "more than")]:
        with pytest.raises(ValueError, match=words):
            names(path)
    with pytest.raises(pinpool.LoadError, match=r"train-012\.tar"):
        names("train-{011..012}.tar")
    for url in ("https://host/train.tar", "s3://bucket/{0..3}.tar", "pipe:cat a.tar"):
        with pytest.raises(ValueError, match="is a URL: the loader reads files"):
            pinpool_loader.Loader(url, batch_size=1)


def test_a_directory_of_only_shards_is_opened(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", [(f"{number}{sample}.txt", b"x") for sample in range(4)])
    assert pinpool_loader.Loader(tmp_path, batch_size=1, pool=heap()).num_samples == 12
    (tmp_path / "README").write_bytes(b"about the shards")
    said = r"0\.tar \(and 2 more\) is in a directory with other files: name the archives, as in '.*/\*\.tar', pass open_archives=True .*=False"
    with pytest.raises(ValueError, match=said):
        pinpool_loader.Loader(tmp_path, batch_size=1, pool=heap())
    for open_archives, samples in ((False, 4), (True, 13)):
        assert pinpool_loader.Loader(tmp_path, batch_size=1, pool=heap(), open_archives=open_archives).num_samples == samples
    assert pinpool_loader.Loader(f"{tmp_path}/*.tar", batch_size=1, pool=heap()).num_samples == 12
    (tmp_path / "texts").mkdir()
    for name in ("a.json.gz", "b.txt"):
        (tmp_path / "texts" / name).write_bytes(b"x")
    assert pinpool_loader.Loader(tmp_path / "texts", batch_size=1, pool=heap()).num_samples == 2, "not an archive"
    (tmp_path / "texts" / "c.TAR.GZ").write_bytes(b"x")
    with pytest.raises(ValueError, match="c.TAR.GZ: compressed files are not supported"):
        pinpool_loader.Loader(tmp_path / "texts", batch_size=1, pool=heap())


def test_to_device_copies_decoded_fields_and_labels_that_are_numbers_and_refuses_other_fields(tmp_path):
    fields = {"0.cls": b"7", "0.png": encoded(PIL.new("L", (4, 4), 3), "PNG")}
    write_tar(tmp_path / "a.tar", fields.items())
    write_tar(tmp_path / "b.tar", [*fields.items(), ("0.txt", b"text")])
    settings = {"batch_size": 1, "label_field": ".CLS", "decode": {"png": pinpool_loader.ImageDecoder(2, 2)}}

    def copied(archive, **changes):
        [batch] = pinpool_loader.Loader(tmp_path / archive, pool=heap(), **settings | changes)
        return {names: array.tolist() for names, array in pickle.loads(pickle.dumps(batch))._pinpool_arrays().items()}

    assert copied("a.tar") == {("png",): [[[[3] * 3] * 2] * 2], ("labels",): [7]}
    assert copied("a.tar", label_function=lambda text: int(text) / 2)[("labels",)] == [3.5]
    assert list(copied("a.tar", label_function=str)) == [("png",)]
    [of_text] = pinpool_loader.Loader(tmp_path / "a.tar", pool=heap(), **settings, label_function=str)
    with pytest.raises(TypeError, match="the label '7' is not a number: use batch.labels"):
        _ = of_text.label_array
    with pytest.raises(TypeError, match="the field 'txt' of this Batch is not decoded: .* in map="):
        copied("b.tar")
    with pytest.raises(TypeError, match="the field 'cls' of this Batch is not decoded"):
        copied("a.tar", label_field=None)
    write_tar(tmp_path / "c.tar", [("0.cls", b"7"), ("0.labels", fields["0.png"])])
    with pytest.raises(ValueError, match="the decoded field 'labels' of this Batch is named like its labels"):
        copied("c.tar", decode={"labels": pinpool_loader.ImageDecoder(2, 2)})
    assert copied("c.tar", decode={"png;labels": pinpool_loader.ImageDecoder(2, 2)}).keys() == {("png", "labels"), ("labels",)}


def test_on_the_cpu_to_device_returns_tensors_over_the_memory_of_the_batch(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    PIL.new("RGB", (4, 4), (3, 3, 3)).save(tmp_path / "0.png")
    [batch] = pinpool_loader.Loader(tmp_path, batch_size=1, pool=heap(), decode={"png": pinpool_loader.ImageDecoder(2, 2)})
    without_gpu = {} if not torch.cuda.is_available() else {"device": "cpu"}
    for moved in (batch.to("cpu"), batch.to(torch.device("cpu"), non_blocking=False), pinpool.torch.to_device(batch, **without_gpu)):
        assert moved["png"].data_ptr() == batch["png"].ctypes.data and moved["labels"].tolist() == [0]
    tensor = torch.ones(3)
    assert pinpool.torch.to_device({"x": [tensor, "text"]}, "cpu")["x"][0] is tensor
    with pytest.raises(TypeError, match="neither a tensor nor a numeric array is in this list"):
        pinpool.torch.to_device(["text"], "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "device", lambda device: 1 / 0)  # A torch without CUDA refuses `torch.device(0)`.
    with pytest.raises(pinpool.BackendError, match="torch finds none"):
        pinpool.torch.to_device(tensor, 0)
