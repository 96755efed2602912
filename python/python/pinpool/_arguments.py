"""Checks of arguments."""

from __future__ import annotations

import operator
from typing import Any


def checked_int(name: str, value: Any, least: int, most: int = (1 << 63) - 1) -> int:
    """Returns `value` as an int from `least` to `most`, or raises an error that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if not least <= number <= most:
        limit = f"{least} or more" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, not {number}")
    return number


def checked_bool(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool, or raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value
