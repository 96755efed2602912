"""Passes log lines of the pool to the logger `pinpool`.

The pool never calls Python: its lines wait in a queue. A call on the main thread forwards the queued lines before it returns; a
thread of this module forwards the lines of other threads. Both end when the interpreter exits.
"""

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

# Held while lines are forwarded, so that they keep their order. No call waits for it.
_passing = threading.Lock()
_thread = None
_ended = False


def flush():
    """Forwards queued lines to the logger, unless another thread is doing so."""
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
            # A filter that raises must not lose later lines; its error is shown as `logging` shows errors of handlers.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()
    return bool(lines)


def _run():
    while _pinpool._next_lines():
        with _passing:
            _pass_on()


def start():
    """Starts forwarding. Each new pool calls it."""
    global _thread
    _pinpool._want_trace(logger.getEffectiveLevel() <= TRACE)
    if _thread is None and not _ended:
        thread = threading.Thread(target=_run, name="pinpool-log", daemon=True)
        # If no thread can be started, as in a sub-interpreter, there is none to join at the end.
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
