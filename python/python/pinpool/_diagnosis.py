"""The class `Diagnosis`."""

from __future__ import annotations

from typing import Any, Self


class Diagnosis(str):
    """The text that `Pool.diagnose` returns: the main cause of lost time, what was measured, and what to do.

        diagnosis = pool.diagnose()
        if diagnosis.is_alarm:
            alert(diagnosis.cause, str(diagnosis))

    Attributes:
        cause: name of the cause, such as "pool_full" or "limit_too_small"; "healthy" if little time is lost.
        is_alarm: whether the cause is a problem.
        seconds_lost: time that all threads together have spent in waits and driver calls, in the window that the text names.
        setting: the argument of `Pool` that helps and its value, such as `("max_bytes", "16777216")`, or None.
    """

    cause: str
    is_alarm: bool
    seconds_lost: float
    setting: tuple[str, str] | None

    def __new__(cls, text: str, cause: str, is_alarm: bool, seconds_lost: float, setting: tuple[str, str] | None) -> Self:
        self = super().__new__(cls, text)
        self.cause, self.is_alarm, self.seconds_lost, self.setting = cause, is_alarm, seconds_lost, setting
        return self

    def __getnewargs__(self) -> Any:
        return str(self), self.cause, self.is_alarm, self.seconds_lost, self.setting


Diagnosis.__module__ = "pinpool"
