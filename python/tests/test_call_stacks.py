"""Gets that keep the Python code that they came from."""

import asyncio
import gc
from pathlib import Path

import pytest

import pinpool


def collate(pool):
    return pool.get(4096)


def collate_tagged(pool):
    return pool.tagged("labels").get(4096, align=8192)


def collate_array(pool):
    return pool.empty((3, 500), dtype="uint8")


def collate_idle(pool):
    collate(pool)
    return pool.try_get(4096)


def collate_in_task(pool):
    async def task():
        return await pool.aget(4096)

    return asyncio.run(task())


WAYS = [collate, collate_tagged, collate_array, collate_idle, collate_in_task]


def recorded(path, every, get):
    pool = pinpool.Pool(env=False, backend="heap", max_bytes="64MiB", call_stacks=every, trace=path)
    for _ in range(3):
        get(pool)
    del pool
    gc.collect()
    return path.read_bytes()


@pytest.mark.parametrize("get", WAYS)
def test_a_recording_has_the_python_functions_of_a_get_without_those_of_the_package(tmp_path, get):
    data = recorded(tmp_path / "t.trace", 1, get)
    assert get.__name__.encode() in data and __file__.encode() in data
    assert str(Path(pinpool.__file__).parent).encode() not in data


def test_a_place_is_recorded_once(tmp_path):
    data = recorded(tmp_path / "t.trace", 1, collate)
    assert data.count(__file__.encode() + bytes([collate.__code__.co_firstlineno + 1])) == 1, data


def test_without_the_setting_nothing_is_kept(tmp_path):
    assert b"collate" not in recorded(tmp_path / "t.trace", 0, collate)
