"""The class `Diagnosis`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `Pool.diagnose` returns: the main cause of lost time, what was measured, and what to do. `str(diagnosis)` is `text`.

        diagnosis = pool.diagnose()
        if diagnosis.is_alarm:
            alert(diagnosis.cause, diagnosis.text)

    Attributes:
        text: all of it for a person. The first line is the cause, the measured times and the recommendation.
        cause: name of the cause, such as "pool_full" or "limit_too_small"; "healthy" if little time is lost.
        is_alarm: whether the cause is a problem.
        seconds_lost: time that all threads together have spent in waits and driver calls, in the window that the text names.
        setting: the argument of `Pool` that helps and its value, such as `("max_bytes", 16777216)`, or None.
    """

    text: str
    cause: str
    is_alarm: bool
    seconds_lost: float
    setting: tuple[str, int | str] | None

    def __str__(self) -> str:
        return self.text


Diagnosis.__module__ = "pinpool"
