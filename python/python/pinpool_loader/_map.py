"""Applies the function `map=` to batches on threads, ahead of the loop and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class MapRunner(Generic[T, R]):
    """Iterates over `function(item)` for each item of `items`, at most one item per thread ahead.

    Not a generator, because a generator keeps a reference to the last yielded value.
    """

    def __init__(self, function: Callable[[T], R], items: Iterator[T], threads: int) -> None:
        self._function, self._items, self._ahead = function, items, threads
        self._executor = ThreadPoolExecutor(threads, "pinpool-map")
        self._running: deque[Future[R]] = deque()
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        while self._failure is None and len(self._running) <= self._ahead:
            try:
                self._running.append(self._executor.submit(self._function, next(self._items)))
            except Exception as failure:
                # Also StopIteration. It is raised after the results of the earlier items.
                self._failure = failure
        if not self._running:
            assert self._failure is not None
            raise self._failure
        return self._running.popleft().result()

    def close(self) -> None:
        """Ends the threads after their current items; queued items are dropped."""
        self._executor.shutdown(cancel_futures=True)
        self._running.clear()
