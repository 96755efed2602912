"""Compressed shards, samples with fields, labels in them, and the progress of a load."""

import gzip
import io
import json
import os
import pickle
import pty
import subprocess
import sys
import tarfile
import textwrap

import numpy as np
import pytest

import pinpool
from conftest import in_use

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed") if sys.version_info < (3, 14) else None


def zstd(data):
    if zstandard is not None:
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    from compression import zstd

    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


def tar(members):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return whole.getvalue()


def image(shard, number):
    return b"picture%d/%d " % (shard, number) * (number + 1)


def members(shard, samples):
    for number in range(samples):
        yield f"train/{shard}-{number:03}.JPG", image(shard, number)
        yield f"train/{shard}-{number:03}.seg.png", b"mask"
        yield f"train/{shard}-{number:03}.cls", b" %d\n" % (number * 10 + shard)


@pytest.fixture
def shards(tmp_path):
    """Four shards of five samples, one of each kind."""
    paths = []
    for shard, (name, compress) in enumerate([("a.tar", bytes), ("b.tar.gz", gzip.compress), ("c.tgz", gzip.compress), ("d.tar.zst", zstd)]):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(compress(tar(members(shard, 5))))
    return paths


def keys_of(shard):
    return [f"train/{shard}-{number:03}" for number in range(5)]


def test_samples_of_compressed_shards_have_keys_fields_and_labels_in_order(shards, pool):
    for shard, path in enumerate(shards):
        batches = list(pinpool.Loader(path, batch_size=3, labels="cls", pool=pool))
        assert [len(batch) for batch in batches] == [3, 2]
        assert [label for batch in batches for label in batch.labels] == [shard + 10 * number for number in range(5)]
        assert [key for batch in batches for key in batch.keys] == [f"{path}!{key}" for key in keys_of(shard)]
        fields = [fields for batch in batches for fields in batch.fields]
        for number, sample in enumerate(fields):
            assert list(sample) == ["jpg", "seg.png", "cls"]
            assert {name: view.tobytes() for name, view in sample.items()} == {
                "jpg": image(shard, number),
                "seg.png": b"mask",
                "cls": b" %d\n" % (number * 10 + shard),
            }
        assert [view.tobytes() for view in batches[1].field("jpg")] == [image(shard, 3), image(shard, 4)]


def test_fields_are_views_that_keep_the_memory(shards, pool):
    batch = next(iter(pinpool.Loader(shards[1], batch_size=2, pool=pool)))
    field = batch.fields[1]["jpg"]
    assert field.ctypes.data == batch.buffer.ptr + batch.offsets[1] and field.base is not None
    del batch
    assert in_use(pool) == 1 and field.tobytes() == image(1, 1)
    del field
    assert in_use(pool) == 0


def test_without_labels_the_label_is_the_key(shards, pool):
    [batch] = pinpool.Loader(shards[0], pool=pool)
    assert batch.labels == keys_of(0)


def test_fields_that_are_not_there_are_named(shards, tmp_path, pool):
    [batch] = pinpool.Loader(shards[0], pool=pool)
    with pytest.raises(KeyError, match=r"a.tar!train/0-000 has no field 'txt': it has jpg, seg.png, cls"):
        batch.field("txt")
    assert batch.field("txt", None) == [None] * len(batch)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x.jpg").write_bytes(b"x")
    [plain] = pinpool.Loader(tmp_path / "plain", pool=pool)
    assert plain.fields == [{}]
    twice = tmp_path / "twice.tar"
    twice.write_bytes(tar([("a.jpg", b"1"), ("a.JPG", b"2")]))
    [batch] = pinpool.Loader(twice, pool=pool)
    assert batch[0].tobytes() == b"12"
    with pytest.raises(ValueError, match="twice.tar!a: two members of the sample are named 'jpg'"):
        batch.fields


def test_fields_of_a_sample_in_parts_are_refused(shards, pool):
    [first, *_] = pinpool.Loader(shards[0], batch_bytes=12, pool=pool)
    with pytest.raises(ValueError, match="longer than batch_bytes"):
        first.fields
    with pytest.raises(pinpool.LoadError, match="needs the whole sample"):
        list(pinpool.Loader(shards[0], batch_bytes=12, labels="cls", pool=pool))


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (b"cat", 'its field "cls", "cat", is no label: invalid literal for int'),
        (b"", "is no label: invalid"),
        (b"1.5", "is no label"),
        (b"\xff", "is no text"),
        (None, 'no field "cls" .* it has jpg'),
    ],
)
def test_labels_that_are_no_numbers_are_named(tmp_path, pool, label, said):
    path = tmp_path / "a.tar"
    bad = [("1.jpg", b"b")] + ([("1.cls", label)] if label is not None else [])
    path.write_bytes(tar([("0.jpg", b"a"), ("0.cls", b"-7"), *bad, ("2.jpg", b"c"), ("2.cls", b"3")]))
    with pytest.raises(pinpool.LoadError, match=f"a.tar!1: .*{said}"):
        list(pinpool.Loader(path, labels=".CLS", pool=pool))
    [batch] = pinpool.Loader(path, labels="cls", on_error="skip", pool=pool)
    assert batch.labels == [-7, 3] and [key[-2:] for key in batch.keys] == ["!0", "!2"]
    assert [sample.tobytes() for sample in batch] == [b"a-7", b"c3"] and len(batch.failures) == 1


def test_labels_are_what_a_function_makes_of_the_text(tmp_path, pool):
    path = tmp_path / "a.tar"
    fields = {"cls": ["1", "2.5"], "txt": ["a cat\n", "Käse"], "json": ['{"boxes": [1, 2]}', "[]"]}
    path.write_bytes(tar([(f"{at}.{name}", texts[at].encode()) for at in (0, 1) for name, texts in fields.items()]))

    def labels(name, label_type):
        [batch] = pinpool.Loader(path, labels=name, label_type=label_type, pool=pool)
        return batch.labels

    assert labels("cls", float) == [1.0, 2.5] and labels("txt", str) == fields["txt"]
    assert labels("json", json.loads) == [{"boxes": [1, 2]}, []]
    with pytest.raises(pinpool.LoadError, match='a.tar!0: its field "txt", "a cat.n", is no label: Expecting value'):
        labels("txt", json.loads)
    with pytest.raises(KeyboardInterrupt):
        labels("txt", interrupted)
    loading = pinpool.Loader(path, labels="cls", label_type=lambda text: loading.close() or text, pool=pool)
    assert list(loading) == [], "the function may use the loader: this one ends the loop"


def interrupted(_text):
    raise KeyboardInterrupt


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_single_compressed_file_is_one_sample(tmp_path, pool, compress):
    data = np.random.default_rng(1).integers(0, 9, 1_000_000, np.uint8).tobytes()
    path = tmp_path / ("x.bin.gz" if compress is gzip.compress else "x.bin.zst")
    path.write_bytes(compress(data))
    [batch] = pinpool.Loader(path, pool=pool)
    assert batch[0].tobytes() == data and batch.keys == [str(path)]
    parts = list(pinpool.Loader(path, batch_bytes=100_001, pool=pool))
    assert b"".join(part[0].tobytes() for part in parts) == data
    [stored] = pinpool.Loader(tmp_path, pool=pool)
    assert stored[0].tobytes() == path.read_bytes(), "found in a directory it is a plain file"


def test_empty_linked_and_repeated_files_and_one_that_grows(tmp_path, pool):
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "several.json.gz").write_bytes(gzip.compress(b"{}") * 3)
    [batch] = pinpool.Loader(tmp_path, containers=True, pool=pool)
    assert [sample.tobytes() for sample in batch] == [b"", b"{}{}{}"] and batch.fields == [{}, {}]
    path = tmp_path / "link.gz"
    path.symlink_to(tmp_path / "several.json.gz")
    loader = pinpool.Loader([path] * 3, batch_size=2, shuffle=True, epochs=2, pool=pool)
    assert [sample.tobytes() for batch in loader for sample in batch] == [b"{}{}{}"] * 6
    path.write_bytes(gzip.compress(b"{}") * 3 + gzip.compress(b"more"))
    with pytest.raises(pinpool.LoadError, match="link.gz: grew: 6 bytes when it was listed, 10 when it was read"):
        list(loader)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty", "tail"])
def test_damaged_shards_are_named_with_the_place_and_the_rest_is_loaded(tmp_path, pool, compress, damage):
    good, bad = tmp_path / "good.tar.gz", tmp_path / ("bad.tar.gz" if compress is gzip.compress else "bad.tar.zst")
    good.write_bytes(gzip.compress(tar(members(0, 5))))
    whole = compress(tar([("0.bin", np.random.default_rng(2).bytes(50_000)), ("1.bin", b"x")]))
    middle = len(whole) // 2
    bad.write_bytes(
        {
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 9]) + whole[middle + 9 :],
            "other": b"no such data" * 10,
            "empty": b"",
            "tail": whole + b"more",
        }[damage]
    )
    said = {"cut": f"cut off after byte {middle}", "empty": "cut off after byte 0"}.get(damage, "(damaged|cut off)")
    with pytest.raises(pinpool.LoadError, match=rf"{bad.name}: .*{said}.*byte [0-9]+.*on_error='skip'|{bad.name}: .*{said}"):
        pinpool.Loader([good, bad], pool=pool)
    loader = pinpool.Loader([good, bad], on_error="skip", pool=pool)
    assert len(loader.failures) == 1 and bad.name in loader.failures[0]
    assert sum(len(batch) for batch in loader) == 5


def test_shuffled_shards_are_mixed_and_a_state_goes_on_in_the_middle(shards, pool):
    settings = {"batch_size": 3, "shuffle": True, "seed": 4, "epochs": 2, "labels": "cls", "pool": pool}
    whole = [batch.labels for batch in pinpool.Loader(shards, **settings)]
    assert len(whole) == 14 and sorted(sum(whole[:7], [])) == sorted(sum(whole[7:], [])) == sorted(10 * n + s for n in range(5) for s in range(4))
    assert whole[:7] != whole[7:]
    loader = pinpool.Loader(shards, **settings)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert [batch.labels for batch in pinpool.Loader(shards, state=loader.state(), **settings)] == whole[4:]


def test_a_rank_takes_whole_compressed_shards(shards, pool):
    ranks = [pinpool.Loader(shards[1:], rank=rank, world=2, labels="cls", pool=pool) for rank in range(2)]
    labels = [sorted({label % 10 for batch in loader for label in batch.labels}) for loader in ranks]
    assert labels == [[1, 3], [2]]


def test_small_pools_and_long_data(tmp_path):
    path = tmp_path / "zeros.tar.zst"
    path.write_bytes(zstd(tar([("0.bin", bytes(40 << 20))])))
    pool = pinpool.Pool(env=False, backend="heap", max_bytes="8MiB", wait="100ms")
    assert sum(batch.nbytes for batch in pinpool.Loader(path, batch_bytes="1MiB", pool=pool)) == 40 << 20
    with pytest.raises(pinpool.LimitError, match="PINPOOL_MAX_BYTES"):
        list(pinpool.Loader(path, batch_size=1, pool=pool))


def test_nothing_to_load_says_why(tmp_path, pool):
    (tmp_path / "empty.tar.gz").write_bytes(gzip.compress(tar([])))
    with pytest.raises(ValueError, match="only archives without a member"):
        pinpool.Loader(tmp_path / "empty.tar.gz", pool=pool)
    (tmp_path / "bad.tgz").write_bytes(b"bad")
    with pytest.raises(ValueError, match="nothing that can be read: .*bad.tgz: "):
        pinpool.Loader(tmp_path / "bad.tgz", on_error="skip", pool=pool)
    (tmp_path / "good.tgz").write_bytes(gzip.compress(tar(members(0, 3))))
    assert len(pinpool.Loader(tmp_path / "good.tgz", rank=0, world=2, pool=pool)) == 1
    with pytest.raises(ValueError, match="rank=1 of world=2 has nothing to load: a compressed archive goes to one rank"):
        pinpool.Loader(tmp_path / "good.tgz", rank=1, world=2, pool=pool)


def test_names_of_fields_are_taken_with_a_dot_and_in_any_case(shards, pool):
    batch = next(iter(pinpool.Loader(shards[0], pool=pool)))
    assert [field.tobytes() for field in batch.field(".JPG")] == [field.tobytes() for field in batch.field("jpg")]
    with pytest.raises(TypeError, match=r"field\(3\)"):
        batch.field(3)


def test_ctrl_c_ends_the_listing_of_a_long_file(tmp_path):
    """The data is a gigabyte; the interrupt comes at once, and is seen before the end of the listing."""
    path = tmp_path / "long.tar.zst"
    compressor = zstandard.ZstdCompressor().compressobj() if zstandard is not None else None
    if compressor is None:
        pytest.skip("needs zstandard")
    with open(path, "wb") as file:
        header = tarfile.TarInfo("0.bin")
        header.size = 1000 << 20
        file.write(compressor.compress(header.tobuf()))
        for _ in range(1000):
            file.write(compressor.compress(bytes(1 << 20)))
        file.write(compressor.compress(bytes(1024)) + compressor.flush())
    code = f"""
        import os, signal, threading, time
        import pinpool
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="64MiB")
        def interrupt():
            while not any(open(f"/proc/self/task/{{task}}/comm").read() == "pinpool-list\\n" for task in os.listdir("/proc/self/task")):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            pinpool.Loader({str(path)!r}, pool=pool)
        except KeyboardInterrupt:
            print("interrupted")
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"labels": 3}, TypeError, "labels=3: the name of a field"),
        ({"labels": ""}, TypeError, "labels=''"),
        ({"progress": "yes"}, ValueError, "progress='yes': True, False or 'always'"),
        ({"device": "gpu"}, ValueError, "device='gpu': 'cuda:0'"),
        ({"device": -1}, ValueError, "device=-1: 'cuda:0'"),
        ({"device": "cuda:-1"}, ValueError, "device='cuda:-1'"),
    ],
)
def test_bad_settings_are_named(shards, pool, settings, kind, said):
    with pytest.raises(kind, match=said):
        pinpool.Loader(shards, **{"pool": pool, **settings})


LOAD = """
    import sys
    {before}
    import pinpool
    pool = pinpool.Pool(env=False, backend="heap", max_bytes="64MiB")
    loader = pinpool.Loader({paths!r}, batch_size=1, progress={progress!r}, pool=pool)
    for batch in loader:
        pass
"""


def load_shown(shards, progress, before="", stderr=subprocess.PIPE):
    code = textwrap.dedent(LOAD.format(before=before, paths=list(map(str, shards)), progress=progress))
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=300, stdout=subprocess.PIPE, stderr=stderr)


NO_TQDM = "sys.modules['tqdm'] = None"


@pytest.mark.parametrize("before", ["", NO_TQDM], ids=["tqdm", "lines"])
def test_progress_is_shown_where_it_is_asked_for(shards, before):
    for progress in (False, True):
        done = load_shown(shards, progress, before)
        assert (done.stdout, done.stderr) == (b"", b""), "stderr is no terminal"
    done = load_shown(shards, "always", before)
    if before == "":
        pytest.importorskip("tqdm", reason="tqdm is not installed")
    assert done.stdout == b"" and b"samples/s" in done.stderr and b"GB/s" in done.stderr
    assert (b"batch 20 of 20" if before else b"20/20") in done.stderr


def test_progress_is_shown_on_a_terminal(shards):
    ours, theirs = pty.openpty()
    try:
        load_shown(shards, True, NO_TQDM, stderr=theirs)
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"batch 20 of 20" in shown and b"samples/s" in shown


def test_progress_counts_from_the_state(shards, pool, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    loader = pinpool.Loader(shards, batch_size=1, epochs=2, progress="always", pool=pool)
    for batch in loader:
        if batch.number == 24:
            break
    assert "batch 25 of 40" in capsys.readouterr().err
    list(loader)
    assert "batch 40 of 40" in capsys.readouterr().err
    next(iter(loader))
    assert "batch 1 of 40" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [None, "cls"])
def test_a_pickled_batch_has_all_that_the_batch_has_in_memory_of_its_own(shards, pool, labels):
    with pinpool.Loader(shards, batch_size=7, pool=pool, labels=labels) as loader:
        for batch in loader:
            copied = pickle.loads(pickle.dumps(batch))
            for name in ("keys", "labels", "indices", "starts", "offsets", "epoch", "index", "number", "failures", "nbytes"):
                assert getattr(copied, name) == getattr(batch, name), name
            assert [bytes(view) for view in copied] == [bytes(view) for view in batch]
            assert [sorted(fields) for fields in copied.fields] == [sorted(fields) for fields in batch.fields]
            assert [bytes(view) for view in copied.field("jpg")] == [bytes(view) for view in batch.field("jpg")]
            assert copied.is_whole(-1) and repr(pickle.loads(pickle.dumps(copied))) == repr(batch)
            del batch
            assert isinstance(copied.buffer, bytearray)
    assert in_use(pool) == 0
