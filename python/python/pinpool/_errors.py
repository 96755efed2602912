"""Exceptions. Each text names the request, the value, the limit and a remedy."""

import builtins


class PinpoolError(Exception):
    """Base of all errors of this package."""

    def __init__(self, text: object = "", report: str | None = None) -> None:
        super().__init__(text)
        self._report = report

    def report(self) -> str:
        """The text; for a request that found no memory, followed by the holders of the memory."""
        return self._report or str(self)


class LimitError(PinpoolError, MemoryError):
    """The request does not fit within the limit (`max_bytes`), or earlier requests wait for memory."""


class TimeoutError(LimitError, builtins.TimeoutError):
    """A `LimitError` after a wait of `timeout` seconds."""


class BackendError(PinpoolError, RuntimeError):
    """The driver or the kernel refused, or the selected backend is unavailable."""


class DeviceError(PinpoolError, RuntimeError):
    """The device failed: it is unknown whether its work has completed, so the memory is never reused."""


class ForkError(PinpoolError, RuntimeError):
    """The pool was created in a parent of this process: create one after the fork."""


class LoadError(PinpoolError, OSError):
    """A file could not be read, has changed its length since it was listed, or is an invalid container."""


class ReleasedError(PinpoolError, ValueError):
    """The buffer was released, or its pool was closed."""


class RequestError(PinpoolError, ValueError):
    """A length, an alignment or a copy is out of range."""


class SharedError(PinpoolError, OSError):
    """Shared memory is invalid or unavailable."""


class TicketError(PinpoolError, ValueError):
    """The ticket names no buffer to receive: it was received before, or belongs to another pool."""


class PeerError(PinpoolError, ConnectionError):
    """The process at the other end has ended, or never existed."""


class SettingError(PinpoolError, ValueError):
    """A setting is invalid, or two settings contradict each other."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, PinpoolError):
        _error.__module__ = "pinpool"
