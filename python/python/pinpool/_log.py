"""Forwards log lines of pools to the logger `pinpool`.

Pools never call Python, so their lines wait in a queue. Most calls on the main thread forward the queued lines before they return, and a
thread of this module forwards the lines of other threads, until the interpreter exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback

from . import _pinpool

#: The level of trace lines.
TRACE = 5

logger = logging.getLogger("pinpool")

# Held while lines are forwarded, so that they keep their order. Only the thread of this module waits for this lock.
_forwarding = threading.Lock()
_thread: threading.Thread | None = None
_is_stopped = False


def flush() -> None:
    """Forwards queued lines to the logger, unless another thread is doing so."""
    while _forwarding.acquire(blocking=False):
        try:
            if not _forward():
                return
        finally:
            _forwarding.release()


def _forward() -> bool:
    lines = _pinpool._take_lines()
    for level, text in lines:
        try:
            logger.log(level, "%s", text)
        except Exception:
            # A filter's exception is printed, as `logging` prints a handler's exception, and later lines are still forwarded.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()
    return bool(lines)


def _run() -> None:
    while _pinpool._wait_for_lines():
        with _forwarding:
            _forward()


def start() -> None:
    """Starts forwarding. Every new pool calls it."""
    global _thread
    _pinpool._set_keeps_trace(logger.getEffectiveLevel() <= TRACE)
    if _thread is None and not _is_stopped:
        thread = threading.Thread(target=_run, name="pinpool-log", daemon=True)
        # This raises an error in a sub-interpreter. `_thread` then stays None, so no thread is joined at exit.
        thread.start()
        _thread = thread


def _stop() -> None:
    global _is_stopped
    _is_stopped = True
    flush()
    _pinpool._stop_lines()
    if _thread is not None:
        _thread.join(timeout=1)


def _after_fork() -> None:
    global _thread, _forwarding
    _thread, _forwarding = None, threading.Lock()


atexit.register(_stop)
os.register_at_fork(after_in_child=_after_fork)
