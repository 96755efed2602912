"""`Pool.aget`: requests of asyncio tasks."""

import asyncio

from . import _pinpool


async def get(pool, nbytes, timeout):
    waiting = pool._begin_get(nbytes, timeout)
    if isinstance(waiting, _pinpool.Buffer):
        return waiting
    try:
        buf = waiting.poll()
        if buf is not None:
            return buf
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        descriptor = waiting.fileno()
        loop.add_reader(descriptor, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                buf = waiting.poll()
                if buf is not None:
                    return buf
        finally:
            loop.remove_reader(descriptor)
    finally:
        # A cancelled request leaves the wait queue. If it has already received a buffer, the next request gets this buffer.
        waiting.close()
