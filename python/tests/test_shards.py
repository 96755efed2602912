"""Shards: samples with fields, and labels in them."""

import gzip
import json
import pickle

import pytest

import pinpool
import pinpool_loader
from helpers import in_use, write_tar


def image(shard, number):
    return b"picture%d/%d " % (shard, number) * (number + 1)


def members(shard, samples):
    for number in range(samples):
        yield f"train/{shard}-{number:03}.JPG", image(shard, number)
        yield f"train/{shard}-{number:03}.seg.png", b"mask"
        yield f"train/{shard}-{number:03}.cls", b" %d\n" % (number * 10 + shard)


@pytest.fixture
def shards(tmp_path):
    """Four shards of five samples."""
    return [write_tar(tmp_path / f"{shard}.tar", members(shard, 5)) for shard in range(4)]


def names_of(shard):
    return [f"train/{shard}-{number:03}" for number in range(5)]


def test_samples_of_shards_have_names_fields_and_labels_in_order(shards, pool):
    for shard, path in enumerate(shards):
        batches = list(pinpool_loader.Loader(path, batch_size=3, label_field="cls", pool=pool))
        assert [len(batch) for batch in batches] == [3, 2]
        assert [label for batch in batches for label in batch.labels] == [shard + 10 * number for number in range(5)]
        assert [name for batch in batches for name in batch.names] == [f"{path}!{name}" for name in names_of(shard)]
        fields = [fields for batch in batches for fields in batch.samples]
        for number, sample in enumerate(fields):
            assert list(sample) == ["jpg", "seg.png", "cls"]
            assert {name: view.tobytes() for name, view in sample.items()} == {
                "jpg": image(shard, number),
                "seg.png": b"mask",
                "cls": b" %d\n" % (number * 10 + shard),
            }
        assert [view.tobytes() for view in batches[1].field("jpg")] == [image(shard, 3), image(shard, 4)]


def test_missing_fields_are_named(shards, tmp_path, pool):
    [batch] = pinpool_loader.Loader(shards[0], pool=pool)
    assert batch.labels == names_of(0), "without label_field= the label is the name"
    assert [field.tobytes() for field in batch.field(".JPG")] == [field.tobytes() for field in batch.field("jpg")]
    with pytest.raises(TypeError, match=r"a field name must be a str, such as 'jpg', not 3"):
        batch.field(3)
    with pytest.raises(KeyError, match=r"0.tar!train/0-000 has no field 'txt': it has jpg, seg.png, cls"):
        batch.field("txt")
    assert batch.field("txt", None) == [None] * len(batch)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x.jpg").write_bytes(b"x")
    [plain] = pinpool_loader.Loader(tmp_path / "plain", pool=pool)
    assert plain.samples == [{}]
    twice = write_tar(tmp_path / "twice.tar", [("a.jpg", b"1"), ("a.JPG", b"2")])
    [batch] = pinpool_loader.Loader(twice, pool=pool)
    assert batch[0].tobytes() == b"12"
    for read in (lambda: batch.samples, lambda: batch.field("jpg")):
        with pytest.raises(ValueError, match="twice.tar!a has two members named 'jpg'"):
            read()


def test_a_field_makes_no_views_of_other_fields(shards, pool, monkeypatch):
    made, view = [], pinpool_loader.Batch._view
    monkeypatch.setattr(pinpool_loader.Batch, "_view", lambda batch, *span: made.append(span) or view(batch, *span))
    [batch] = pinpool_loader.Loader(shards[0], pool=pool)
    assert [bytes(text) for text in batch.field("cls")] == [b" %d\n" % (number * 10) for number in range(5)] and len(made) == 5


def test_fields_of_a_sample_in_parts_are_refused(shards, pool):
    [first, *_] = pinpool_loader.Loader(shards[0], batch_bytes=12, pool=pool)
    for read in (lambda: first.samples, lambda: first.field("jpg")):
        with pytest.raises(ValueError, match="longer than batch_bytes"):
            read()
    with pytest.raises(pinpool.LoadError, match="needs the whole sample"):
        list(pinpool_loader.Loader(shards[0], batch_bytes=12, label_field="cls", pool=pool))


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (b"cat", 'its field "cls", "cat", is not a label: invalid literal for int'),
        (b"", "is not a label: invalid"),
        (b"1.5", "is not a label"),
        (b"\xff", "is not text"),
        (None, 'no field "cls" .* it has jpg'),
    ],
)
def test_invalid_labels_are_named(tmp_path, pool, label, said):
    bad = [("1.jpg", b"b")] + ([("1.cls", label)] if label is not None else [])
    path = write_tar(tmp_path / "a.tar", [("0.jpg", b"a"), ("0.cls", b"-7"), *bad, ("2.jpg", b"c"), ("2.cls", b"3")])
    with pytest.raises(pinpool.LoadError, match=f"a.tar!1: .*{said}"):
        list(pinpool_loader.Loader(path, label_field=".CLS", pool=pool))
    [batch] = pinpool_loader.Loader(path, label_field="cls", on_error="skip", pool=pool)
    assert batch.labels == [-7, 3] and [name[-2:] for name in batch.names] == ["!0", "!2"]
    assert [sample.tobytes() for sample in batch] == [b"a-7", b"c3"] and len(batch.failures) == 1


def test_label_function_converts_the_text(tmp_path, pool):
    fields = {"cls": ["1", "2.5"], "txt": ["a cat\n", "Käse"], "json": ['{"boxes": [1, 2]}', "[]"]}
    path = write_tar(tmp_path / "a.tar", [(f"{at}.{name}", texts[at].encode()) for at in (0, 1) for name, texts in fields.items()])

    def labels(name, label_function):
        [batch] = pinpool_loader.Loader(path, label_field=name, label_function=label_function, pool=pool)
        return batch.labels

    assert labels("cls", float) == [1.0, 2.5] and labels("txt", str) == fields["txt"]
    assert labels("json", json.loads) == [{"boxes": [1, 2]}, []]
    with pytest.raises(pinpool.LoadError, match='a.tar!0: its field "txt", "a cat.n", is not a label: Expecting value'):
        labels("txt", json.loads)
    with pytest.raises(KeyboardInterrupt):
        labels("txt", interrupted)
    loading = pinpool_loader.Loader(path, label_field="cls", label_function=lambda text: loading.close() or text, pool=pool)
    assert list(loading) == [], "the function may use the loader: this one ends the loop"


def test_paths_with_archives_have_no_labels_of_directories(shards, tmp_path, pool):
    with pytest.raises(ValueError, match="label_function= needs label_field=, because samples in archives"):
        pinpool_loader.Loader(shards, label_function=str, pool=pool)
    (tmp_path / "x.bin").write_bytes(b"x")
    [batch] = pinpool_loader.Loader([shards[0], tmp_path / "x.bin"], pool=pool)
    for each in (batch, pickle.loads(pickle.dumps(batch))):
        with pytest.raises(ValueError, match="no label for both archives and plain files: pass label_field="):
            each.labels


def interrupted(_text):
    raise KeyboardInterrupt


@pytest.mark.parametrize("labels", [None, "cls"])
def test_a_pickled_batch_is_a_full_copy(shards, pool, labels):
    with pinpool_loader.Loader(shards, batch_size=7, pool=pool, label_field=labels) as loader:
        for batch in loader:
            copied = pickle.loads(pickle.dumps(batch))
            for name in (
                "names",
                "labels",
                "sample_indices",
                "sample_offsets",
                "buffer_offsets",
                "epoch",
                "index_in_epoch",
                "index_overall",
                "failures",
                "nbytes",
            ):
                assert getattr(copied, name) == getattr(batch, name), name
            assert [bytes(view) for view in copied] == [bytes(view) for view in batch]
            assert [sorted(fields) for fields in copied.samples] == [sorted(fields) for fields in batch.samples]
            assert [bytes(view) for view in copied.field("jpg")] == [bytes(view) for view in batch.field("jpg")]
            assert copied.is_whole(-1) and repr(pickle.loads(pickle.dumps(copied))) == repr(batch)
            del batch
            assert isinstance(copied.buffer, bytearray)
    assert in_use(pool) == 0


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "a.bin.gz"])
def test_compressed_files_are_refused_by_name_and_with_a_remedy(tmp_path, pool, name):
    archive = write_tar(tmp_path / "archive", members(0, 2))
    (tmp_path / name).write_bytes(gzip.compress(archive.read_bytes()) if name.endswith("gz") else b"")
    archive.unlink()
    with pytest.raises(
        ValueError, match=f"{name}: compressed files are not supported, because .* cannot be split among ranks: decompress them first"
    ):
        pinpool_loader.Loader(tmp_path / name, pool=pool)
    if name == "a.tar.gz":
        with pytest.raises(ValueError, match="compressed files are not supported"):
            pinpool_loader.Loader(tmp_path, open_archives=True, pool=pool)
        (tmp_path / "README").write_text("an ordinary file")
        with pytest.raises(ValueError, match=f"{name}: compressed files are not supported"):
            pinpool_loader.Loader(tmp_path, pool=pool)


def test_archives_without_a_member_are_named(tmp_path, pool):
    with pytest.raises(ValueError, match="contain only empty archives"):
        pinpool_loader.Loader(write_tar(tmp_path / "empty.tar", []), pool=pool)
