"""The end of the interpreter, and fork."""

import pytest


def test_the_interpreter_ends_with_buffers_views_and_pools_alive(alone):
    out, err = alone(
        """
        import logging, numpy as np, pinpool
        logging.basicConfig(level=logging.DEBUG)
        pool = pinpool.Pool(env=False, backend="heap")
        buf, array, tensor = pool.get(100), pool.empty(100), np.from_dlpack(pool.get(100))
        pool.tagged("loader").get(10)
        keep = [pool, buf, array, tensor]
        keep.append(keep)  # A reference cycle, which the interpreter breaks in any order at its end.
        del pool
        print("ended")
        """
    )
    assert out == "ended\n" and "Traceback" not in err


@pytest.mark.parametrize("attempt", range(5))
def test_the_interpreter_ends_while_threads_wait_and_use_the_pool(alone, attempt):
    out, _ = alone(
        """
        import threading, time, pinpool
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="8MiB")
        held = pool.get("7MiB")
        def wait():
            try: pool.get("6MiB", timeout=100)
            except pinpool.LimitError: pass
        def use():
            while True:
                with pool.get(1000): pass
                try: pool.get("6MiB", timeout=0.002)
                except pinpool.LimitError: pass
                pool.stats(), pool.empty(10)
        for target in (wait, wait, use, use):
            threading.Thread(target=target, daemon=True).start()
        while pool.stats()["requests"]["waiting"] < 2: time.sleep(0.001)
        print("ended")
        """
    )
    assert out == "ended\n"


def test_an_uncaught_exception_ends_the_program_normally(alone):
    _, err = alone(
        """
        import pinpool
        pool = pinpool.Pool(env=False, backend="heap")
        with pool.get(10) as buf:
            raise SystemExit(3)
        """,
        expect=3,
    )
    assert err == ""


def test_ctrl_c_ends_a_wait(alone):
    out, _ = alone(
        """
        import os, signal, threading, time, pinpool
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="8MiB")
        held = pool.get("7MiB")
        def interrupt():
            while pool.stats()["requests"]["waiting"] == 0: time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            pool.get("6MiB", timeout=1000)
        except KeyboardInterrupt:
            print("interrupted", pool.stats()["requests"]["waiting"])
        held.release()
        print(len(pool.get("6MiB")))
        """
    )
    assert out == f"interrupted 0\n{6 << 20}\n"


FORK = """
    import logging, multiprocessing, os, sys, warnings, pinpool
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    pool = pinpool.Pool(env=False, backend="heap", name="parent")
    buf, idle = pool.get(100), pool.get(5000)
    memoryview(buf)[:3] = b"abc"
    idle.release()
"""


def test_the_parents_pool_raises_fork_error_in_a_child(alone):
    out, err = alone(
        FORK
        + """
    def child():
        for use in (lambda: pool.get(5000), lambda: pool.get(100, timeout=5), lambda: pool.tagged("x").get(1),
                    lambda: pool.reserve(10), lambda: pool.empty(10), lambda: pool.set_max_bytes(10)):
            try: use()
            except pinpool.ForkError as error: assert "build a new pool after the fork" in str(error), error
            else: raise SystemExit("no error")
        import asyncio
        try: asyncio.run(pool.aget(10))
        except pinpool.ForkError: pass
        assert pool.stats()["memory"]["in_use"] == 0
        print("copy of the parent's bytes:", bytes(buf)[:3].decode(), flush=True)
        buf.release()
        own = pinpool.Pool(env=False, backend="heap", name="child")
        print(len(own.get(10)), flush=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start(); process.join(300)
    print("status", process.exitcode)
    memoryview(buf)[:3] = b"xyz"
    print(bytes(buf)[:3].decode(), pool.stats()["memory"]["in_use"], len(pool.get(5000)))
    """
    )
    assert out == "copy of the parent's bytes: abc\n10\nstatus 0\nxyz 1 5000\n", err
    assert "pool[child] created: preset=adaptive" in err, "log lines come in the child as well"


def test_a_child_that_is_forked_while_threads_use_the_pool_ends(alone):
    out, _ = alone(
        FORK
        + """
    import threading
    stop = threading.Event()
    def use():
        while not stop.is_set():
            with pool.get(1000): pass
            pool.stats()
    threads = [threading.Thread(target=use) for _ in range(3)]
    [thread.start() for thread in threads]
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try: pool.get(1000)
            except pinpool.ForkError: os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stop.set(); [thread.join() for thread in threads]
    print("ended")
    """
    )
    assert out == "ended\n"


def test_children_forked_while_threads_wait_use_new_pools(alone):
    out, _ = alone(
        """
    import multiprocessing, os, threading, warnings, pinpool
    warnings.simplefilter("ignore")
    def narrow():
        return pinpool.Pool(env=False, backend="heap", max_bytes="8MiB", wait=0.2)
    pool, stop = narrow(), threading.Event()
    def use(pool, times):
        while times and not stop.is_set():
            times -= 1
            try:
                with pool.get(3 << 20): pass
            except pinpool.LimitError: pass
    def child():
        own = narrow()
        threads = [threading.Thread(target=use, args=(own, 50)) for _ in range(4)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        os._exit(7 if own.stats()["memory"]["in_use"] == 0 else 1)
    threads = [threading.Thread(target=use, args=(pool, -1)) for _ in range(4)]
    [thread.start() for thread in threads]
    context = multiprocessing.get_context("fork")
    for _ in range(30):
        process = context.Process(target=child)
        process.start(); process.join(300)
        assert process.exitcode == 7, process.exitcode
    stop.set(); [thread.join() for thread in threads]
    print("ended")
    """
    )
    assert out == "ended\n"
