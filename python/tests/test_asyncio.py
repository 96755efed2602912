"""`Pool.aget`."""

import asyncio

import pytest

import pinpool
from helpers import heap, in_use


@pytest.fixture
def pool():
    return heap(wait="300s")  # Tasks need its maintenance thread.


def run(task):
    return asyncio.run(asyncio.wait_for(task, 300))


def test_an_awaited_request_gets_a_buffer(pool):
    async def task():
        async with asyncio.TaskGroup() as group:
            bufs = [group.create_task(pool.aget(1000)) for _ in range(10)]
        with bufs[0].result() as buf:
            return len(buf)

    assert run(task()) == 1000
    assert in_use(pool) == 0 and pool.stats()["requests"]["served"] == 10


def test_the_loop_runs_while_a_task_waits_and_a_return_wakes_it(pool):
    async def task():
        held = pool.get("60MiB")
        waiting = asyncio.ensure_future(pool.aget("32MiB", timeout=300))
        turns = 0
        while pool.stats()["requests"]["waiting"] == 0:
            await asyncio.sleep(0)
        for turns in range(100):
            await asyncio.sleep(0)
        assert not waiting.done() and turns == 99
        held.release()
        with await waiting as buf:
            return len(buf)

    assert run(task()) == 32 << 20
    assert in_use(pool) == 0


def test_an_awaited_request_that_times_out_raises_timeout_error(pool):
    held = pool.get("60MiB")
    with pytest.raises(pinpool.TimeoutError, match="limit of 64.0MiB"):
        run(pool.aget("32MiB", timeout=0.05))
    held.release()
    with pytest.raises(ValueError, match="0 or more"):
        run(pool.aget(-1))
    for size, timeout in (("1GiB", 300), ("32MiB", 0)):
        held = pool.get("60MiB")
        with pytest.raises(pinpool.LimitError) as caught:
            run(pool.aget(size, timeout=timeout))
        assert not isinstance(caught.value, pinpool.TimeoutError), "it did not wait"
        held.release()


def test_a_cancelled_request_leaves_the_queue_and_keeps_no_buffer(pool):
    async def task():
        held = pool.get("60MiB")
        waiting = [asyncio.ensure_future(pool.aget("32MiB", timeout=300)) for _ in range(5)]
        while pool.stats()["requests"]["waiting"] < 5:
            await asyncio.sleep(0)
        for each in waiting[:4]:
            each.cancel()
        # Served and cancelled before the loop runs again: the buffer is passed on to the last request.
        held.release()
        ended = await asyncio.gather(*waiting[:4], return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        with await waiting[4]:
            # The pool's thread may be about to drop a buffer that a cancelled request got; `run` bounds the wait.
            while pool.stats()["memory"]["in_use"] != 1:
                await asyncio.sleep(0)
        return pool.stats()["requests"]["waiting"]

    assert run(task()) == 0
    assert in_use(pool) == 0
    pool.get("60MiB").release()


def test_a_coroutine_that_is_never_awaited_uses_no_buffer(pool):
    pool.aget(1000).close()
    assert pool.stats()["requests"]["served"] == 0


def test_waking_a_request_that_has_ended_raises_no_sigpipe(run_in_subprocess):
    out, _ = run_in_subprocess("""
        import asyncio, signal, threading, pinpool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="8MiB")

        async def task():
            for step in range(200):
                held = pool.get("7MiB")
                gets = [asyncio.ensure_future(pool.aget("6MiB", timeout=300)) for _ in range(4)]
                while pool.stats()["requests"]["waiting"] < 4:
                    await asyncio.sleep(0)
                put = threading.Thread(target=held.release)
                put.start()
                for get in gets:
                    get.cancel()
                await asyncio.gather(*gets, return_exceptions=True)
                put.join()
                del gets, get

        asyncio.run(task())
        print(pool.stats()["memory"]["in_use"], pool.stats()["requests"]["waiting"])
    """)
    assert out == "0 0\n"
