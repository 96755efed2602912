"""How far a load is: a bar of tqdm, or plain lines."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

# Seconds between two lines.
_EVERY = 5.0


class Progress(Protocol):
    """What shows the progress of one `for`."""

    def add(self, samples: int, nbytes: int) -> None:
        """A batch was handed out."""

    def close(self) -> None:
        """The loop is over."""


class _Silent:
    def add(self, samples: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, tqdm: Any, batches: int, done: int) -> None:
        self._bar = tqdm(total=batches, initial=done, unit="batch", desc="pinpool", file=sys.stderr)
        self._begun, self._samples, self._nbytes = time.monotonic(), 0, 0

    def add(self, samples: int, nbytes: int) -> None:
        self._samples += samples
        self._nbytes += nbytes
        self._bar.set_postfix_str(_rates(self._samples, self._nbytes, time.monotonic() - self._begun), refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def disable(self) -> None:
        # Its own end would write again.
        self._bar.disable = True


class _Lines:
    def __init__(self, batches: int, done: int) -> None:
        self._batches, self._before, self._done = batches, done, done
        self._begun = self._last = time.monotonic()
        self._samples = self._nbytes = 0

    def add(self, samples: int, nbytes: int) -> None:
        self._done += 1
        self._samples += samples
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last = now
            self._print(now)

    def _print(self, now: float) -> None:
        seconds = now - self._begun
        line = f"pinpool: batch {self._done} of {self._batches}"
        left = self._batches - self._done
        if left > 0:
            line += f", {seconds * left / (self._done - self._before):.0f} s left"
        print(f"{line}, {_rates(self._samples, self._nbytes, seconds)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._done > self._before:
            self._print(time.monotonic())


def _rates(samples: int, nbytes: int, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    return f"{samples / seconds:,.0f} samples/s, {nbytes / seconds / 1e9:.2f} GB/s"


class _Guarded:
    """Shows no more once stderr cannot be written to: a load goes on without its bar."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def add(self, samples: int, nbytes: int) -> None:
        try:
            self._shown.add(samples, nbytes)
        except (OSError, ValueError):
            self._end()

    def close(self) -> None:
        try:
            self._shown.close()
        except (OSError, ValueError):
            self._end()

    def _end(self) -> None:
        if isinstance(self._shown, _Bar):
            self._shown.disable()
        self._shown = _Silent()


def progress_of(wanted: bool | str, batches: int, done: int) -> Progress:
    """What shows the progress: nothing for False, and for True where stderr is no terminal; "always" asks for it there too.

    A stderr that cannot be written to shows nothing.
    """
    try:
        if not wanted or sys.stderr is None or (wanted != "always" and not sys.stderr.isatty()):
            return _Silent()
        return _Guarded(_made(batches, done))
    except (OSError, ValueError):
        return _Silent()


def _made(batches: int, done: int) -> Progress:
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines(batches, done)
    return _Bar(tqdm, batches, done)
