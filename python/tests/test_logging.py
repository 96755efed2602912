"""Log lines through Python's `logging`."""

import logging
import pickle

import pytest

import pinpool
from helpers import heap, run_threads, until


def test_lines_reach_the_logger_before_the_call_returns(caplog):
    with caplog.at_level(logging.DEBUG, "pinpool"):
        heap(name="100%s", max_bytes="8MiB").get(100)  # A percent sign is not a format specifier.
        until(lambda: any("acquired:" in text for text in caplog.messages))
    records = [record for record in caplog.records if record.name == "pinpool"]
    start = next(record for record in records if " created: " in record.getMessage())
    assert start.levelno == logging.INFO and start.getMessage().startswith("pool[100%s] ")
    assert next(r for r in records if "acquired:" in r.getMessage()).levelno == logging.DEBUG


def test_a_warning_has_its_level(caplog):
    # The name looks like the start of a record with another level.
    pool = pinpool.Pool(env=False, backend="mlock", max_bytes="4MiB", on_full="pageable", wait=0, name="a] out_of_memory: b")
    held = pool.get("3MiB"), pool.get("3MiB")
    assert pool.stats()["requests"]["pageable"] == 1
    assert not held[0].is_pinned  # The kernel has locked it, not a driver.
    until(lambda: any(" pageable: " in text for text in caplog.messages))
    assert [r.levelno for r in caplog.records if " pageable: " in r.getMessage()] == [logging.WARNING]


def test_a_raised_error_is_short_and_not_logged(caplog):
    pool = heap(max_bytes="8MiB", name="small", maintenance_thread=False)
    held = pool.tagged("loader").get("5MiB")
    for request in (lambda: pool.get("1GiB"), lambda: pool.get("5MiB", timeout=0.01)):
        with caplog.at_level(logging.INFO, "pinpool"), pytest.raises(pinpool.LimitError) as caught:
            request()
        assert "\n" not in str(caught.value) and "PINPOOL_MAX_BYTES" in str(caught.value)
        report = caught.value.report()
        assert report.startswith(str(caught.value)) and "loader (1 buffer" in report and len(report.splitlines()) > 4
        assert "\n".join([str(caught.value), *caught.value.__notes__]) == report.rstrip("\n")
        copied = pickle.loads(pickle.dumps(caught.value))
        assert copied.report() == report and copied.__notes__ == caught.value.__notes__
    pool.stats()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "[small]" in record.getMessage()]
    assert pinpool.RequestError("x").report() == "x" and not hasattr(pinpool.RequestError("x", "x"), "__notes__") and len(held) == 5 << 20


def test_a_handler_may_use_the_pool_and_lines_of_other_threads_arrive():
    """The pool holds no lock while it calls Python, so nothing here deadlocks."""
    seen, pool = [], heap(max_bytes="8MiB", name="handled")

    class Uses(logging.Handler):
        def emit(self, record):
            with pool.get(1000):
                seen.append(record.getMessage())
            pool.stats()

    handler, logger = Uses(), logging.getLogger("pinpool")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(5)
    try:
        heap(name="traced")

        def work():
            for step in range(200):
                size = 1000 * (1 + step % 50)
                try:
                    pool.get(size, timeout=0.001)
                except pinpool.LimitError:
                    pass

        run_threads(*[work] * 4)
        until(lambda: any("[handled]" in line for line in seen))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        heap()


def test_a_handler_that_raises_breaks_no_call(run_in_subprocess):
    out, err = run_in_subprocess("""
        import logging, pinpool
        class Raises(logging.Filter):
            def filter(self, record): raise RuntimeError("the filter raises")
        logging.getLogger("pinpool").addFilter(Raises())
        logging.basicConfig(level=logging.INFO)
        pool = pinpool.Pool(env=False, backend="heap")
        print(len(pool.get(10)))
    """)
    assert out == "10\n" and "the filter raises" in err


def test_queued_lines_are_forwarded_at_exit(run_in_subprocess):
    _, err = run_in_subprocess("""
        import logging, pinpool
        logging.basicConfig(level=logging.INFO)
        pool = pinpool.Pool(env=False, backend="heap", name="last")
    """)
    assert "INFO:pinpool:pool[last] created: preset=adaptive" in err
