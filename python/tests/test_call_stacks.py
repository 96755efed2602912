"""Gets that keep the Python code that they came from."""

import gc
import logging

import pinpool
from conftest import until


def collate(pool, size=4096):
    return pool.get(size)


def sampling(every, **settings):
    return pinpool.Pool(env=False, backend="heap", max_bytes="64MiB", call_stacks=every, **settings)


def still_out(caplog):
    """What the pool that ended has listed, a line for each buffer."""
    until(lambda: any("still out" in text for text in caplog.messages))
    (text,) = [text for text in caplog.messages if "still out" in text]
    return [line.strip() for line in text.splitlines()[1:]]


def test_what_is_still_out_is_named_by_its_line(caplog):
    caplog.set_level(logging.WARNING, logger="pinpool")
    pool = sampling(1)
    held = [collate(pool), collate(pool.tagged("labels"), 8192), pool.empty((3, 5000), dtype="uint8")]
    del pool
    gc.collect()
    lines = still_out(caplog)
    line = collate.__code__.co_firstlineno + 1
    own = f"test_call_stacks.py:{line} collate"
    assert [text.endswith(own) for text in lines].count(True) == 2, lines
    here = "test_what_is_still_out_is_named_by_its_line"
    assert any("bytes of (untagged)" in text and text.endswith(here) for text in lines), lines
    assert len(lines) == 3 and any("8192 bytes of labels" in text and own in text for text in lines), lines
    del held


def test_a_recording_has_the_python_functions_of_hits_and_misses(tmp_path):
    path = tmp_path / "t.trace"
    pool = sampling(1, trace=path)
    for _ in range(3):
        collate(pool)
    del pool
    gc.collect()
    data = path.read_bytes()
    assert data.count(b"collate") == 1 and b"test_call_stacks.py" in data, data


def test_without_the_setting_nothing_is_kept(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="pinpool")
    path = tmp_path / "t.trace"
    pool = sampling(0, trace=path)
    held = collate(pool)
    del pool
    gc.collect()
    assert still_out(caplog) == ["1 of no tag (Pool::tagged), 4096 bytes"]
    del held
    assert b"collate" not in path.read_bytes()
