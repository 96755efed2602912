"""Expands braces and patterns in paths."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

#: The innermost braces: `{000000..000005}`, `{train,val}`.
_BRACES = re.compile(r"\{([^{}]*(?:\.\.|,)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
#: Maximum number of names that the braces of a path expand to; more are refused.
_MAX_PATHS = 1_000_000


def expand(paths: Any) -> list[str]:
    """Expands one path or several. An existing path is not expanded.

    Raises ValueError for a pattern without matches and for a URL.
    """
    if isinstance(paths, bytes) or not isinstance(paths, (str, os.PathLike, Iterable)):
        raise TypeError(f"paths must be a str or os.PathLike, or several, not {paths!r}")
    path_list = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    for path in path_list:
        if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
            remedy = f", such as os.fsdecode({path!r})" if isinstance(path, bytes) else ""
            raise TypeError(f"each of paths must be a str or os.PathLike{remedy}, not {path!r}")
    return [name for path in path_list for name in _expand(os.fspath(path))]


def find_compressed(paths: list[str]) -> str | None:
    """Returns the first path with the suffix of a compressed file."""
    return next((path for path in paths if path.lower().endswith((".gz", ".tgz", ".zst", ".tzst"))), None)


def _expand(path: str) -> list[str]:
    if os.path.lexists(path):
        return [path]
    if re.match(r"(?:[A-Za-z][A-Za-z0-9+.-]+://|pipe:)", path):
        raise ValueError(f"paths: {path!r} is a URL: the loader reads files; mount or fetch it first")
    names: list[str] = []
    for name in _expand_braces(path):
        if len(names) >= _MAX_PATHS:
            raise ValueError(f"paths: {path!r} names more than {_MAX_PATHS} files: name their directory")
        if not glob.has_magic(name) or os.path.lexists(name):
            names.append(name)
            continue
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise ValueError(f"paths: no file matches {name!r}")
        names += matches
    return names


def _expand_braces(path: str) -> Iterator[str]:
    """Yields the expansions of the braces in order."""
    braces = _BRACES.search(path)
    if braces is None:
        yield path
        return
    inner, numbers = braces[1], _RANGE.fullmatch(braces[1])
    if numbers is None:
        words = inner.split(",")
    else:
        first, last = int(numbers[1]), int(numbers[2])
        if abs(last - first) >= _MAX_PATHS:
            raise ValueError(f"paths: {braces[0]!r} expands to more than {_MAX_PATHS} names")
        # As in a shell, leading zeros of either end pad all names, and the numbers may descend.
        has_zeros = any(len(end) > 1 and end.startswith("0") for end in numbers.groups())
        width = max(map(len, numbers.groups())) if has_zeros else 0
        step = 1 if first <= last else -1
        words = [str(number).zfill(width) for number in range(first, last + step, step)]
    for word in words:
        yield from _expand_braces(path[: braces.start()] + word + path[braces.end() :])
