"""`Pool.aget`: requests of asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from . import _pinpool

if TYPE_CHECKING:
    from ._settings import Size, Time


async def get(pool: _pinpool.PoolCore, nbytes: Size, timeout: Time | None) -> _pinpool.Buffer:
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
