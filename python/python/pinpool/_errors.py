"""Exceptions of the package."""

import builtins


class PinpoolError(Exception):
    """Base class of the errors of this package."""

    def __init__(self, text: object = "", report: str | None = None) -> None:
        super().__init__(text)
        self._details = "" if report == str(text) else (report or "").partition("\n")[2].rstrip("\n")
        if self._details:
            self.add_note(self._details)  # Tracebacks show notes.

    def report(self) -> str:
        """Returns the text, followed by who holds the memory, if a request failed for lack of it."""
        return f"{self}\n{self._details}" if self._details else str(self)


class LimitError(PinpoolError, MemoryError):
    """The request exceeds the limit (`max_bytes`), or the pool is full."""


class TimeoutError(LimitError, builtins.TimeoutError):
    """The pool was full until the timeout."""


class BackendError(PinpoolError, RuntimeError):
    """The driver or the kernel refused a call, a backend is not available, or this torch cannot use a pool."""


class AlreadyInstalledError(PinpoolError, RuntimeError):
    """A pool or another allocator already serves the pinned memory of torch or CuPy, or tensors still use the last pool."""


class DeviceError(PinpoolError, RuntimeError):
    """The device failed, the driver refuses the stream, or the stream is capturing a graph.

    It is unknown when the work completes, so the memory is never reused.
    """


class ForkError(PinpoolError, RuntimeError):
    """The pool or shared pool belongs to another process, the parent of this forked or spawned one: create a pool in this process."""


class LoadError(PinpoolError, OSError):
    """A file cannot be read or decoded, has changed its length since it was listed, or is an invalid archive."""


class ReleasedError(PinpoolError, ValueError):
    """The buffer was released, or sent to the trainer."""


class ClosedError(PinpoolError, ValueError):
    """The pool or shared pool was closed."""


class RequestError(PinpoolError, ValueError):
    """A length, a time or a stream is invalid."""


class SharedError(PinpoolError, OSError):
    """Shared memory is invalid or not available."""


class TicketError(PinpoolError, ValueError):
    """The ticket is invalid: its buffer was received before, or belongs to another shared pool."""


class TrainerUnavailableError(PinpoolError, ConnectionError):
    """The trainer has ended, has closed the shared pool, or is ending its workers."""


class SettingError(PinpoolError, ValueError):
    """A setting is invalid, or two settings contradict each other."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, PinpoolError):
        _error.__module__ = "pinpool"
