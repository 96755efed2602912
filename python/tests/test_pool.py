"""Pools: settings, requests, statistics, errors."""

import datetime
import gc
import threading

import numpy as np
import pytest

import pinpool
from conftest import in_use, until

MIB = 1 << 20


def test_settings_have_the_names_of_the_variables(tmp_path):
    pool = pinpool.Pool(
        env=False,
        name="loader",
        backend="heap",
        max_bytes=8 * MIB,
        wait=datetime.timedelta(milliseconds=20),
        idle_timeout="2min",
        background_thread=False,
        trace=tmp_path / "t.trace",
        pool_size_limit=None,
    )
    stats = pool.stats()
    assert (stats["limits"]["max_bytes"], stats["backend"], stats["name"], stats["preset"]) == (8 * MIB, "heap", "loader", "adaptive")
    assert repr(pool) == '<pinpool.Pool "loader" preset=adaptive backend=heap max_bytes=8MiB held=0B in_use=0>'
    assert pool.name == "loader" and pool.tag is None
    assert pinpool.Pool(env=False, backend="heap", preset="tensorflow").stats()["limits"]["max_bytes"] is None


def test_a_retired_setting_is_a_warning_that_names_what_replaces_it(caplog):
    with caplog.at_level("WARNING"):
        pinpool.Pool(env=False, backend="heap", stuck_after=5)
    text = "PINPOOL_STUCK_AFTER=5: retired and ignored; a copy in flight for 30s is reported as stuck"
    assert any(record.getMessage().endswith(text) for record in caplog.records)


def test_invalid_settings_are_named_with_a_remedy():
    with pytest.raises(TypeError, match=r'"purple" is not a setting of a pool; they are name, env, max_bytes, .*zero,'):
        pinpool.Pool(purple="1GiB")
    with pytest.raises(pinpool.SettingError, match="PINPOOL_MAX_BYTES=lots: .*like 2GiB"):
        pinpool.Pool(max_bytes="lots")
    for name, value, problem in [
        ("max_bytes", 0, "PINPOOL_MAX_BYTES=0: not a limit"),
        ("pool_size_limit", -1, "PINPOOL_POOL_SIZE_LIMIT=-1"),
        ("zero", "ture", "PINPOOL_ZERO=ture: neither 0 "),
        ("on_full", "auto", "PINPOOL_ON_FULL=auto: not a value of PINPOOL_ON_FULL"),
        ("wait", "soon", "PINPOOL_WAIT=soon: not a time"),
        ("socket", "x", "PINPOOL_SOCKET=x: not a path with a slash"),
    ]:
        with pytest.raises(pinpool.SettingError, match=problem):
            pinpool.Pool(env=False, backend="heap", **{name: value})
    for values in [{"wait": float("inf"), "idle_timeout": "none", "log_every": None}, {"socket": 0, "reserve": "none", "zero": "no"}]:
        pinpool.Pool(env=False, backend="heap", **values).get(1)
    with pytest.raises(ValueError, match="PINPOOL_RESERVE=2KiB: exceeds PINPOOL_MAX_BYTES=1KiB"):
        pinpool.Pool(backend="heap", max_bytes=1024, reserve=2048)
    with pytest.raises(TypeError, match="wait must be a str, a number, .* not a list"):
        pinpool.Pool(wait=[])
    with pytest.raises(TypeError):
        pinpool.Pool("64MiB")


def test_an_invalid_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("PINPOOL_ZERO", "ture")
    with pytest.raises(pinpool.SettingError, match="PINPOOL_ZERO=ture: neither 0 .*leave it out for the default 0"):
        pinpool.Pool(backend="heap")
    pinpool.Pool(backend="heap", zero=True).get(1)


def test_variables_apply_unless_code_sets_them(monkeypatch):
    monkeypatch.setenv("PINPOOL_BACKEND", "heap")
    monkeypatch.setenv("PINPOOL_MAX_BYTES", "4MiB")
    assert pinpool.Pool().stats()["limits"]["max_bytes"] == 4 * MIB
    assert pinpool.Pool(max_bytes="8MiB").stats()["limits"]["max_bytes"] == 8 * MIB
    assert pinpool.Pool(env=False, backend="heap").stats()["limits"]["max_bytes"] != 4 * MIB


@pytest.mark.parametrize("size", [-1, np.int64(-5)])
def test_a_negative_size_is_named(pool, size):
    for call in (pool.get, pool.try_get, pool.reserve, pool.trim):
        with pytest.raises(ValueError, match=f"invalid size (n|to_bytes)={int(size)}: must be 0 or more"):
            call(size)


@pytest.mark.parametrize("size", [2**63, 2**64, 2**200, "17179869183GiB"])
def test_an_impossible_size_is_named(pool, size):
    with pytest.raises(pinpool.RequestError, match="(invalid size n=.*: must be|cannot allocate .*: a buffer holds) at most"):
        pool.get(size)


def test_sizes_are_integers_or_text(pool):
    assert len(pool.get("64KiB")) == 64 * 1024 and len(pool.get(np.int32(7))) == 7
    with pytest.raises(pinpool.RequestError, match="not a size"):
        pool.get("many")
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must be 0 or more seconds, not "):
            pool.get(1, timeout=wrong)
    with pytest.raises(pinpool.SettingError, match="timeout: `soon` is not a time"):
        pool.get(1, timeout="soon")
    with pytest.raises(pinpool.LimitError):
        pool.get("60MiB", timeout=datetime.timedelta(milliseconds=1)), pool.get("60MiB", timeout=datetime.timedelta(milliseconds=1))
    assert pool.wait_reserved(datetime.timedelta())


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
    pool.get("32MiB", timeout=float("inf"))


def test_an_unavailable_backend_is_named():
    with pytest.raises(pinpool.PinpoolError, match="cuda|CUDA|driver"):
        pinpool.Pool(env=False, backend="vmm").get(1)


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
    while not seen.is_set() and thread.is_alive():  # The other thread may get no processor during one wait.
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


def test_reserve_trim_clear_and_limit(pool):
    pool.reserve("8MiB")
    assert pool.stats()["memory"]["reserve_bytes"] == pool.stats()["memory"]["held_bytes"] == 8 * MIB
    pool.get("16MiB").release()
    assert pool.stats()["memory"]["held_bytes"] > 8 * MIB
    pool.trim()
    assert pool.stats()["memory"]["held_bytes"] == 8 * MIB
    pool.get(100).release()
    assert pool.stats()["memory"]["idle"] == 1
    pool.clear()
    pool.maintain()
    assert pool.stats()["memory"]["idle"] == 0
    pool.set_max_bytes("16MiB")
    assert pool.stats()["limits"]["max_bytes"] == 16 * MIB
    pool.set_max_bytes("none")
    assert pool.stats()["limits"]["max_bytes"] is None
    with pytest.raises(pinpool.RequestError, match="not a size"):
        pool.set_max_bytes("some")


def test_a_tag_is_named(pool):
    images = pool.tagged("loader/images")
    buf = images.get(1000)
    assert (images.tag, images.name) == ("loader/images", pool.name)
    assert "loader/images (1 buffer" in pool.dump() and pool.stats()["memory"]["in_use"] == 1
    assert images.empty(3).size == 3
    buf.release()
    assert len(images.try_get(1000)) == 1000
    assert 'tag="loader/images"' in repr(images)


def test_try_get_returns_only_idle_buffers(pool):
    assert pool.try_get(1000) is None
    pool.get(1000).release()
    assert len(pool.try_get(1000)) == 1000
    assert pool.stats()["requests"]["misses"] == 1


def test_threads_share_a_pool_but_no_bytes(pool):
    failures = []

    def work(number):
        try:
            for step in range(300):
                size = 1 + (number * 7919 + step * 104729) % 200_000
                with pool.get(size) as buf:
                    array = np.frombuffer(buf, np.uint8)
                    array[:] = number
                    other = pool.empty(100, np.uint8)
                    other[:] = 255 - number
                    if not (array == number).all() or not (other == 255 - number).all():
                        failures.append((number, step))
                    del array, other
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert failures == [] and in_use(pool) == 0
    stats = pool.stats()
    assert stats["requests"]["served"] == stats["requests"]["returned"] == 8 * 300 * 2


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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert failures == [] and in_use(pool) == 0
    stats = pool.stats()
    assert stats["requests"]["served"] == stats["requests"]["returned"] == 6 * 200


def test_all_errors_have_one_base():
    for name in pinpool.__all__:
        kind = getattr(pinpool, name)
        if name.endswith("Error"):
            assert issubclass(kind, pinpool.PinpoolError) and kind.__module__ == "pinpool", name


def test_a_reserve_in_the_background_is_pinned_while_the_program_runs():
    pool = pinpool.Pool(env=False, backend="heap", max_bytes="128MiB", reserve="64MiB", reserve_wait=False)
    first = pool.get(1 << 20)
    assert 0 < pool.reserve_fraction <= 1
    assert pool.wait_reserved(timeout=300)
    assert pool.reserve_fraction == 1
    assert pool.stats()["memory"]["reserve_bytes"] == pool.stats()["memory"]["reserve_target_bytes"] == 64 << 20
    assert pool.wait_reserved() and first.nbytes == 1 << 20
    by_hand = pinpool.Pool(env=False, backend="heap", max_bytes="128MiB", reserve="64MiB", reserve_wait=0, background_thread=0)
    before = by_hand.reserve_fraction
    assert before < 1
    by_hand.maintain()
    assert before < by_hand.reserve_fraction < 1
    assert by_hand.wait_reserved(300)


def test_the_module_diagnoses_each_pool():
    one, other = pinpool.Pool(name="why-a", backend="heap"), pinpool.Pool(name="why-b", backend="heap")
    for _ in range(30):
        one.get(4096).release()
    said = pinpool.diagnose()
    assert f"why-a: {one.diagnose().splitlines()[0]}" in said
    assert said.index("why-a: ") < said.index("why-b: ")
    del other
    gc.collect()
    assert "why-b" not in pinpool.diagnose()
