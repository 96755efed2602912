"""Pools: settings, requests, statistics, errors."""

import asyncio
import dataclasses
import datetime
import functools
import gc
import inspect
import os
import pickle
import re
import sys
import threading
import time

import numpy as np
import pytest

import pinpool
from helpers import heap, in_use, run_threads, until

MIB = 1 << 20


def test_settings_have_the_names_of_the_variables(tmp_path):
    pool = pinpool.Pool(
        env=False,
        name="loader",
        backend="heap",
        max_bytes=8 * MIB,
        wait=datetime.timedelta(milliseconds=20),
        idle_timeout="2min",
        maintenance_thread=False,
        trace=tmp_path / "t.trace",
        pool_size_limit=None,
    )
    stats = pool.stats()
    assert (stats["limits"]["max_bytes"], stats["backend"], stats["name"], stats["preset"]) == (8 * MIB, "heap", "loader", "adaptive")
    assert repr(pool) == '<pinpool.Pool "loader" preset=adaptive backend=heap max_bytes=8MiB held=0B in_use=0>'
    assert pool.name == "loader" and pool.tag is None
    assert pinpool.Pool(env=False, backend="heap", preset="tensorflow").stats()["limits"]["max_bytes"] is None


def test_variables_apply_unless_code_sets_them(monkeypatch):
    monkeypatch.setenv("PINPOOL_BACKEND", "heap")
    monkeypatch.setenv("PINPOOL_MAX_BYTES", "4MiB")
    assert pinpool.Pool().stats()["limits"]["max_bytes"] == 4 * MIB
    assert pinpool.Pool(max_bytes="8MiB").stats()["limits"]["max_bytes"] == 8 * MIB
    assert pinpool.Pool(env=False, backend="heap").stats()["limits"]["max_bytes"] != 4 * MIB


def test_a_request_over_the_limit_names_request_limit_and_remedy(pool):
    with pytest.raises(pinpool.LimitError, match="cannot allocate 1.0GiB.*limit of 64.0MiB.*raise PINPOOL_MAX_BYTES") as caught:
        pool.get("1GiB")
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, pinpool.PinpoolError)
    assert not isinstance(caught.value, TimeoutError), "it can never fit, so it does not wait"


def test_a_request_that_times_out_raises_timeout_error(pool):
    held = pool.get("60MiB")
    for timeout in (0.01, "20ms", 0.3):
        with pytest.raises(pinpool.TimeoutError, match="limit of 64.0MiB") as caught:
            pool.get("32MiB", timeout=timeout)
        assert isinstance(caught.value, (pinpool.LimitError)) and isinstance(caught.value, TimeoutError)
    with pytest.raises(pinpool.LimitError) as caught:
        pool.get("32MiB", timeout=0)
    assert not isinstance(caught.value, pinpool.TimeoutError)
    held.release()
    for timeout in (float("inf"), " None ", None):
        pool.get("32MiB", timeout=timeout)


@pytest.mark.parametrize("ranks, divisor", [("1", 1), ("4", 4), ("many", 1), ("0", 1)])
def test_the_default_limit_is_divided_among_the_ranks_of_the_host(run_in_subprocess, ranks, divisor):
    code = """
        import pinpool
        print(pinpool.Pool(backend="heap", env=False).max_bytes, pinpool._pinpool._host_memory()[0])
        shared = pinpool.Pool(backend="heap", env=False, ledger="python-ranks")
        print(shared.max_bytes)
    """
    out, _ = run_in_subprocess(code, env=os.environ | {"LOCAL_WORLD_SIZE": ranks})
    limit, total, shared = map(int, out.split())
    # Less if less is free.
    assert limit <= total // 4 // divisor and shared <= total // 4
    assert divisor == 1 or limit < shared


def test_none_waits_without_limit_and_wait_selects_the_setting():
    pool, got = heap(wait="20ms"), []
    held = pool.get("60MiB")
    thread = threading.Thread(target=lambda: got.append(pool.get("32MiB", timeout=None)))
    thread.start()
    until(lambda: pool.stats()["requests"]["waiting"] == 1)
    for timeout in ({}, {"timeout": "wait"}):
        for request in (pool.get, lambda nbytes, **timeout: pool.empty(nbytes, "uint8", **timeout)):
            with pytest.raises(pinpool.TimeoutError):
                request(32 * MIB, **timeout)
        with pytest.raises(pinpool.TimeoutError):
            asyncio.run(pool.aget(32 * MIB, **timeout))
    assert thread.is_alive() and not got
    held.release()
    thread.join(300)
    assert len(got) == 1


def test_other_threads_run_while_one_waits_at_the_limit(pool):
    """A waiting thread does not hold the interpreter's lock: this thread releases the memory that the other one waits for."""
    held, got = pool.get("60MiB"), []
    thread = threading.Thread(target=lambda: got.append(pool.get("32MiB", timeout=300)))
    thread.start()
    until(lambda: pool.stats()["requests"]["waiting"] == 1)
    assert thread.is_alive() and not got
    held.release()
    thread.join(300)
    assert len(got) == 1


def test_other_threads_run_during_a_wait_too_short_to_check_for_signals(pool):
    held, seen = pool.get("60MiB"), threading.Event()
    thread = threading.Thread(target=lambda: (until(lambda: pool.stats()["requests"]["waiting"]), seen.set()))
    thread.start()
    while not seen.is_set() and thread.is_alive():  # The other thread may not be scheduled during one wait.
        with pytest.raises(pinpool.TimeoutError):
            pool.get("32MiB", timeout=0.09)
    held.release()
    thread.join()
    assert seen.is_set()


def test_statistics_have_the_keys_of_the_json(pool):
    with pool.get(1000):
        stats = pool.stats()
    assert (stats["requests"]["served"], stats["requests"]["misses"], stats["requests"]["hits"], stats["memory"]["in_use"]) == (1, 1, 0, 1)
    assert stats["requests"]["miss_reasons"]["first_of_size"] == 1
    assert stats["requests"]["wait_time"]["p99_seconds"] == 0.0 and stats["memory"]["pin"]["count"] == 1
    pool.get(1000)
    assert pool.stats()["requests"]["hits"] == 1


def test_the_documented_statistics_exist(pool):
    documented = re.findall(r"^ +((?:requests|memory|copies|limits)\.[a-z_.]+)  ", pinpool.Pool.stats.__doc__, re.MULTILINE)
    assert len(documented) == 10
    described = pinpool.Pool.describe_stats()
    assert described["memory.idle"] == "Idle buffers." and all(described.values())
    for path in {*documented, *described}:
        functools.reduce(lambda part, key: part[key], path.split("."), pool.stats())


def test_reserve_trim_and_limit(pool):
    pool.reserve("8MiB")
    assert pool.stats()["memory"]["reserve_bytes"] == pool.stats()["memory"]["held_bytes"] == 8 * MIB
    pool.get("16MiB").release()
    assert pool.stats()["memory"]["held_bytes"] > 8 * MIB
    assert inspect.signature(pool.trim).parameters["to_bytes"].default == 0
    pool.trim()
    assert pool.stats()["memory"]["held_bytes"] == 8 * MIB
    pool.get(100).release()
    assert pool.stats()["memory"]["idle"] == 1
    pool.trim(0)
    pool.maintain()
    assert pool.stats()["memory"]["idle"] == 0
    assert (pool.backend, pool.pinned_by) == ("heap", None)
    pool.set_max_bytes("16MiB")
    assert pool.stats()["limits"]["max_bytes"] == pool.max_bytes == 16 * MIB
    pool.set_max_bytes(" None ")
    assert pool.stats()["limits"]["max_bytes"] is pool.max_bytes is None
    with pytest.raises(pinpool.RequestError, match="not a size"):
        pool.set_max_bytes("some")


def test_a_closed_pool_fails_requests_and_keeps_buffers_valid(pool):
    errors = []

    def wait():
        with pytest.raises(pinpool.ClosedError, match="the pool or partition was closed") as caught:
            pool.get("32MiB")
        errors.append(caught.value)

    async def close_while_a_task_waits():
        waiting = asyncio.ensure_future(pool.aget("32MiB"))
        while pool.stats()["requests"]["waiting"] < 2:
            await asyncio.sleep(0.001)
        pool.get(1000).release()
        pool.close()
        await waiting

    with pool as entered:
        assert entered is pool
        held = pool.empty(60 * MIB, np.uint8)
        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(pinpool.ClosedError):
            asyncio.run(close_while_a_task_waits())
        thread.join(300)
    assert len(errors) == 1 and isinstance(errors[0], pinpool.ClosedError) and isinstance(errors[0], ValueError)
    images = pool.tagged("images")
    assert type(images) is pinpool.Pool
    for request in (pool.get, pool.try_get, pool.empty, pool.reserve, images.get):
        with pytest.raises(pinpool.ClosedError):
            request(1000)
    held[:] = 7
    assert held[-1] == 7 and pool.stats()["memory"]["idle"] == 0 and in_use(pool) == 1
    del held
    pool.trim()
    assert in_use(pool) == 0 and pool.stats()["memory"]["held_bytes"] == 0


def test_a_with_block_closes_the_pool_also_after_an_exception():
    with pytest.raises(KeyError), heap() as pool:
        raise KeyError
    with pytest.raises(pinpool.ClosedError):
        pool.get(1)


def test_a_tag_is_named(pool):
    images = pool.tagged("loader/images")
    buf = images.get(1000)
    assert (images.tag, images.name) == ("loader/images", pool.name)
    assert "loader/images (1 buffer" in pool.report() and pool.stats()["memory"]["in_use"] == 1
    assert images.empty(3).size == 3
    buf.release()
    assert len(images.try_get(1000)) == 1000
    assert 'tag="loader/images"' in repr(images)


def test_try_get_returns_only_idle_buffers(pool):
    assert pool.try_get(1000) is None
    pool.get(1000).release()
    assert len(pool.try_get(1000)) == 1000
    assert pool.stats()["requests"]["misses"] == 1


def test_threads_export_and_release_in_every_way(pool):
    failures = []

    def work(number):
        try:
            for step in range(200):
                buf = pool.get(1 + (number * 31 + step * 977) % 50_000)
                match step % 5:
                    case 0:
                        views = [np.frombuffer(buf, np.uint8), memoryview(buf)[:1], np.from_dlpack(buf)]
                        with pytest.raises(BufferError):
                            buf.release()
                        del views
                        buf.release()
                    case 1:
                        with buf:
                            late = np.from_dlpack(buf)
                        late[:] = number
                        del late
                    case 2:
                        circle = [buf, np.asarray(buf)]
                        circle.append(circle)
                        del circle
                    case 3:
                        late = memoryview(buf.__dlpack__() and buf)
                        del buf
                        late.release()
                    case 4:
                        other = threading.Thread(target=buf.release)
                        other.start()
                        buf.release()
                        other.join()
        except Exception as error:
            failures.append(error)

    run_threads(*[functools.partial(work, number) for number in range(6)])
    assert failures == [] and in_use(pool) == 0
    stats = pool.stats()
    assert stats["requests"]["served"] == stats["requests"]["returned"] == 6 * 200


def test_all_errors_have_one_base():
    assert "TimeoutError" not in pinpool.__all__, "a star import keeps the builtin exception"
    for name in [*pinpool.__all__, "TimeoutError"]:
        kind = getattr(pinpool, name)
        if name.endswith("Error"):
            assert issubclass(kind, pinpool.PinpoolError) and kind.__module__ == "pinpool", name


def test_a_reserve_in_the_background_is_pinned_while_the_program_runs():
    pool = heap(max_bytes="128MiB", reserve="64MiB", reserve_wait=False)
    first = pool.get(1 << 20)
    assert 0 < pool.reserve_fraction <= 1
    assert pool.wait_for_reserve(timeout=300)
    assert pool.reserve_fraction == 1
    assert pool.stats()["memory"]["reserve_bytes"] == pool.stats()["memory"]["reserve_target_bytes"] == 64 << 20
    assert pool.wait_for_reserve() and first.nbytes == 1 << 20
    by_hand = heap(max_bytes="128MiB", reserve="64MiB", reserve_wait=0, maintenance_thread=0)
    before = by_hand.reserve_fraction
    assert before < 1
    by_hand.maintain()
    assert before < by_hand.reserve_fraction < 1
    assert by_hand.wait_for_reserve(timeout=300)


def test_the_module_diagnoses_each_pool():
    one, other, third, unnamed = (pinpool.Pool(name=name, backend="heap") for name in ("why-a", "why-b", "why-a", None))
    for _ in range(30):
        one.get(4096).release()
    by_name = pinpool.diagnose()
    assert by_name["why-a"].text.splitlines()[0] == one.diagnose().text.splitlines()[0] and by_name["why-b"].cause == other.diagnose().cause
    assert [name for name in by_name if name.startswith("why-")] == ["why-a", "why-b", "why-a 2"] and "unnamed" in by_name
    del other, third, unnamed
    gc.collect()
    assert "why-b" not in pinpool.diagnose()


def test_pools_may_be_created_while_all_are_diagnosed():
    pools = [heap(name=f"kept-{number}") for number in range(3)]

    def create(*_event):  # Called before each line of Python, as if a thread had run between two lines.
        pools.append(heap())
        return create

    before = sys.gettrace()
    sys.settrace(create)
    try:
        by_name = pinpool.diagnose()
    finally:
        sys.settrace(before)
    assert sum(name.startswith("kept-") for name in by_name) == 3 and len(pools) > 6


def test_a_diagnosis_has_a_text_its_cause_and_the_setting():
    small = heap(preset="tensorflow", max_bytes="4MiB", wait="300s")

    def use():
        for _ in range(30):
            with small.get("2MiB"):
                time.sleep(0.003)

    run_threads(use, use, use, use)
    diagnosis = small.diagnose()
    assert diagnosis == pickle.loads(pickle.dumps(diagnosis)) != dataclasses.replace(diagnosis, cause="healthy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.cause = "healthy"
    for diagnosis in (diagnosis, pickle.loads(pickle.dumps(diagnosis))):
        assert isinstance(diagnosis, pinpool.Diagnosis) and f"{diagnosis}" == str(diagnosis) == diagnosis.text
        assert diagnosis.text.startswith("limit_too_small: ")
        assert diagnosis.cause == "limit_too_small" and diagnosis.is_alarm and diagnosis.seconds_lost > 0
        name, value = diagnosis.setting
        assert name == "max_bytes" and value > 4 * MIB and f"PINPOOL_MAX_BYTES={value}" in diagnosis.text
    healthy = heap().diagnose()
    assert healthy.cause in ("healthy", "warming_up") and not healthy.is_alarm and healthy.setting is None
