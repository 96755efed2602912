"""What can go wrong. Each text names the request, the value, the limit and the remedy."""

import builtins


class PinpoolError(Exception):
    """Base of all errors of this package."""

    def __init__(self, text: object = "", report: str | None = None) -> None:
        super().__init__(text)
        self._report = report

    def report(self) -> str:
        """The text, and below it who holds the memory if a request found none."""
        return self._report or str(self)


class LimitError(PinpoolError, MemoryError):
    """The request does not fit under the ceiling (`max_bytes`), or not before the gets that wait for memory."""


class TimeoutError(LimitError, builtins.TimeoutError):
    """The same, after a wait of `timeout` seconds."""


class BackendError(PinpoolError, RuntimeError):
    """The driver or the kernel refused, or the backend that was set is not available."""


class DeviceError(PinpoolError, RuntimeError):
    """The device failed: whether its work is over is unknown, and the memory is never used again."""


class ForkError(PinpoolError, RuntimeError):
    """The pool was made in a parent of this process: build one after the fork."""


class LoadError(PinpoolError, OSError):
    """A file could not be read, is not as long as it was when it was listed, or is no container of its format."""


class ReleasedError(PinpoolError, ValueError):
    """The buffer was released, or what gives it was closed."""


class RequestError(PinpoolError, ValueError):
    """A length, an alignment or a copy is out of range."""


class SharedError(PinpoolError, OSError):
    """Memory of another process is not what is expected, or cannot be had."""


class TicketError(PinpoolError, ValueError):
    """The ticket stands for no buffer that waits to be received: it was received before, or is of another pool."""


class PeerError(PinpoolError, ConnectionError):
    """The process at the other end is gone, or was never there."""


class SettingError(PinpoolError, ValueError):
    """A setting cannot be read, or two contradict each other."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, PinpoolError):
        _error.__module__ = "pinpool"
