"""Checks and conversions of arguments."""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def hide_unknown_parameter(constructor: C) -> C:
    """Hides the last parameter, the unknown arguments (for an error with a hint), from `help` and from notebooks."""
    signature = inspect.signature(constructor)
    constructor.__signature__ = signature.replace(parameters=list(signature.parameters.values())[:-1])  # type: ignore[attr-defined]
    return constructor


def checked_int(name: str, value: Any, minimum: int, maximum: int = (1 << 63) - 1) -> int:
    """Returns `value` as an int from `minimum` to `maximum`, or raises an error that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not minimum <= number <= maximum:
        limit = f"{minimum} or more" if number < minimum else f"at most {maximum}"
        raise ValueError(f"{name} must be {limit}, not {number}")
    return number


def checked_bool(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool, or raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def setting_text(name: str, value: Any) -> str | None:
    """Returns the value of a setting as text, as its variable would contain it, or None if the setting counts as omitted."""
    # "cuda" without an index counts as omitted: by default a pool uses the current GPU, as torch does.
    if value is None or (name == "device" and str(value) == "cuda"):
        return None
    if isinstance(value, bool):
        # A bool is not converted to 1 or 0, because settings other than switches must refuse bools.
        return "on" if value else "off"
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, float):
        # Sizes and times have no exponent.
        if value == float("inf"):
            return "none"
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(float(value))):f}"
    with contextlib.suppress(TypeError):  # NumPy integers have `__index__`, floats do not.
        value = operator.index(value)
    # A device's type is identified by its module, because torch may not be installed.
    if isinstance(value, (str, int)) or (name == "device" and type(value).__module__ == "torch"):
        return str(value).removeprefix("cuda:") if name == "device" else str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise TypeError(f"{name} must be a str, a number, a bool, a path or a timedelta, not a {type(value).__name__}")
