"""Log lines of the pool, on their way to the logger `pinpool`.

The pool never calls Python: its lines wait in a queue. A call on the first thread passes on what waits before it returns; lines
of other threads are passed on by a thread of this module. At the interpreter's exit both end.
"""

import atexit
import logging
import os
import sys
import threading
import traceback

from . import _pinpool

#: Lines of the level trace have this level.
TRACE = 5

logger = logging.getLogger("pinpool")

# Held while lines are passed on, so that they keep their order. Nobody waits for it.
_passing = threading.Lock()
_thread = None
_ended = False


def flush():
    """Passes the lines that wait to the logger, unless another thread is doing that."""
    while _passing.acquire(blocking=False):
        try:
            if not _pass_on():
                return
        finally:
            _passing.release()


def _pass_on():
    lines = _pinpool._take_lines()
    for level, text in lines:
        try:
            logger.log(level, "%s", text)
        except Exception:
            # A filter that raises keeps no later line; it is shown as `logging` shows a handler that does.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()
    return bool(lines)


def _run():
    while _pinpool._next_lines():
        with _passing:
            _pass_on()


def start():
    """Begins to pass lines on. Each new pool calls it."""
    global _thread
    _pinpool._want_trace(logger.getEffectiveLevel() <= TRACE)
    if _thread is None and not _ended:
        thread = threading.Thread(target=_run, name="pinpool-log", daemon=True)
        # Where no thread can be started, as in a sub-interpreter, there is none to wait for at the end.
        thread.start()
        _thread = thread


def _end():
    global _ended
    _ended = True
    flush()
    _pinpool._stop_lines()
    if _thread is not None:
        _thread.join(timeout=1)


def _after_fork():
    global _thread, _passing
    _thread, _passing = None, threading.Lock()
    _pinpool._lines_after_fork()


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
