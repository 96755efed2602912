"""`Loader(map=)`: order, threads, states, failures and memory."""

import contextlib
import gc
import threading
import time
import weakref

import pytest

import pinpool
import pinpool_loader
from helpers import heap, until


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number]) * 100)
    return tmp_path


def loader(folder, function, **settings):
    return pinpool_loader.Loader(folder, **{"batch_size": 4, "pool": heap(), "map": function, **settings})


def first_bytes(batch):
    return [int(sample[0]) for sample in batch]


def test_results_come_in_order_from_several_threads(folder):
    threads, both = set(), threading.Barrier(2, timeout=300)

    def function(batch):
        threads.add(threading.current_thread().name)
        if batch.index_overall < 2:
            both.wait()  # Returns only if two threads run.
        time.sleep(0.01 if batch.index_overall % 2 else 0)
        return first_bytes(batch)

    assert sum(loader(folder, function), []) == list(range(40))
    assert len(threads) == 2 and all(name.startswith("pinpool-map") for name in threads)
    assert not any(thread.name.startswith("pinpool-map") for thread in threading.enumerate())


def test_the_state_follows_the_loop_and_not_the_read_ahead(folder):
    begun = []
    loading = loader(folder, lambda batch: begun.append(batch.index_overall) or first_bytes(batch), num_map_threads=3, shuffle=True)
    plain = [first_bytes(batch) for batch in loader(folder, None, shuffle=True)]
    for number, result in enumerate(loading):
        assert result == plain[number]
        if number == 4:
            break
    assert len(begun) > 5
    assert list(loader(folder, first_bytes, shuffle=True, state=loading.state_dict())) == plain[5:]


def test_a_state_loaded_in_the_loop_applies_to_the_next_one(folder):
    loading = loader(folder, first_bytes)
    plain = list(loading)
    loading.load_state_dict(loader(folder, None).state_dict())
    for result in loading:
        middle = loading.state_dict()
        break
    for result in loading:
        loading.load_state_dict(middle)
    assert result == plain[0] and loading.state_dict() == middle
    first = iter(loading)
    assert next(first) == plain[1]
    second = iter(loading)
    assert next(second) == plain[0]
    first.close()
    second.close()
    assert list(loading) == plain, "a finished loop does not affect the next one"


def test_a_failure_keeps_its_position_and_the_state_before_it(folder):
    def function(batch):
        if batch.index_overall == 3:
            raise KeyError("three")
        return batch.index_overall

    loading, seen = loader(folder, function), []
    with pytest.raises(KeyError, match="three"):
        seen.extend(loading)
    assert seen == [0, 1, 2]
    assert [first_bytes(batch)[0] for batch in loader(folder, None, state=loading.state_dict())][0] == 12

    (folder / "20.bin").unlink()
    loading = loader(folder, function)
    (folder / "06.bin").unlink()
    seen = []
    with pytest.raises(pinpool.LoadError, match="06.bin"):
        for number in loading:
            seen.append(number)
    assert seen == [0]


def test_memory_returns_with_the_result(folder):
    loading = loader(folder, lambda batch: batch, num_map_threads=1, read_ahead=1, num_threads=1)
    pool = loading.pool
    results = iter(loading)
    held = next(results)
    alive = weakref.ref(held)
    del held
    gc.collect()
    assert alive() is None
    results.close()
    gc.collect()
    assert pool.stats()["memory"]["in_use"] == 0


def test_a_failure_keeps_no_batch(folder):
    loading = loader(folder, first_bytes, num_threads=1)
    (folder / "06.bin").unlink()
    gc.collect()
    gc.disable()  # The memory must return without a collection of reference cycles.
    try:
        with contextlib.suppress(pinpool.LoadError):
            list(loading)
        assert loading.pool.stats()["requests"]["served"] > 1 and loading.pool.stats()["memory"]["in_use"] == 0
    finally:
        gc.enable()


def test_a_function_that_raises_stop_iteration_fails_and_does_not_end_the_epoch(folder):
    captions, seen = iter(range(5)), []
    with pytest.raises(RuntimeError, match="StopIteration"):
        seen.extend(loader(folder, lambda batch: next(captions)))
    assert seen == list(range(5))


def test_a_pool_of_two_batches_serves_a_loop_that_keeps_one(folder):
    # 10 batches of 4 KiB; two of them fit.
    for number in range(40):
        (folder / f"{number:02}.bin").write_bytes(bytes([number]) * 1024)
    pool = heap(max_bytes="8KiB", wait="300s")
    loading = loader(folder, lambda batch: batch, pool=pool, num_threads=1, num_map_threads=2)
    assert sum((first_bytes(batch) for batch in loading), []) == list(range(40))


def test_a_break_frees_the_memory_that_the_function_waits_for(folder):
    for path in folder.iterdir():
        path.write_bytes(bytes(16_384))  # A batch is as long as the function's array, so each can reuse the other's memory.
    pool, refused = heap(max_bytes="192KiB", wait="20s"), []
    has_begun = threading.Event()

    def is_full():
        # Three batches fit. That a fourth was served means that the first has ended, and that the loader has read ahead.
        return pool.stats()["requests"]["served"] >= 4

    def function(batch):
        if batch.index_overall == 0:
            assert has_begun.wait(300)
            return None
        has_begun.set()
        until(is_full)
        try:
            return pool.empty(65_536, "uint8")
        except pinpool.LimitError as error:
            refused.append(error)
            raise

    for _ in loader(folder, function, pool=pool, num_threads=1, read_ahead=2, num_map_threads=2):
        until(is_full)
        break
    assert not refused
