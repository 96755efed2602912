"""The end of the interpreter, and fork."""

import pytest


def test_the_interpreter_ends_with_buffers_views_and_pools_alive(run_in_subprocess):
    out, err = run_in_subprocess("""
        import logging, numpy as np, pinpool
        logging.basicConfig(level=logging.DEBUG)
        pool = pinpool.Pool(env=False, backend="heap")
        buf, array, tensor = pool.get(100), pool.empty(100), np.from_dlpack(pool.get(100))
        pool.tagged("loader").get(10)
        keep = [pool, buf, array, tensor]
        keep.append(keep)  # A reference cycle, which the interpreter breaks in any order at its end.
        del pool
        print("ended")
    """)
    assert out == "ended\n" and "Traceback" not in err


def test_the_interpreter_ends_with_an_unfinished_loop_over_a_closed_shared_pool(run_in_subprocess):
    _, err = run_in_subprocess("""
        import pinpool
        pool = pinpool.Pool(env=False, backend="heap")
        shared = pinpool.SharedPool(100, 4, pool=pool, library="numpy")
        loop = iter(shared.batches(shared.collate([number]) for number in range(3)))
        next(loop)
        shared.close()
    """)
    assert not err  # The loop's end raises ClosedError when nothing can be imported any more.


@pytest.mark.parametrize("attempt", range(5))
def test_the_interpreter_ends_while_threads_wait_and_use_the_pool(run_in_subprocess, attempt):
    out, _ = run_in_subprocess("""
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
    """)
    assert out == "ended\n"


@pytest.mark.parametrize(
    ("lock", "call"), [("pinpool._shared._attaching", "shared.get(10).release()"), ("pinpool.torch._lock", "pinpool.torch.uninstall()")]
)
def test_a_fork_while_another_thread_holds_a_lock_does_not_block_the_child(lock, call, run_in_subprocess):
    run_in_subprocess(f"""
        import os, signal, threading, pinpool, pinpool.torch
        shared = pinpool.SharedPool(1000, 2, pool=pinpool.Pool(env=False, backend="heap"))
        is_locked, may_end = threading.Event(), threading.Event()
        def attach():
            with {lock}:
                is_locked.set()
                may_end.wait()
        threading.Thread(target=attach).start()
        is_locked.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # Only bounds a hang.
            {call}
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        may_end.set()
        assert status == 0, status
    """)


FORK = """
    import logging, multiprocessing, os, sys, warnings, pinpool
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    pool = pinpool.Pool(env=False, backend="heap", name="parent")
    buf, idle = pool.get(100), pool.get(5000)
    memoryview(buf)[:3] = b"abc"
    idle.release()
"""


def test_the_parents_pool_raises_fork_error_in_a_child(run_in_subprocess):
    out, err = run_in_subprocess(
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
