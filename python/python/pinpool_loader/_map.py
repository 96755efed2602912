"""A user's function over batches, by threads, ahead of the loop and in the order of the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Mapped(Generic[T, R]):
    """What `function` makes of each of `items`. One item for each thread is ahead of the one that is handed out, at most.

    An iterator and no generator, since a generator keeps what it hands out until the next one is asked for.
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
                # The end too. It comes at its place, behind the items before it.
                self._failure = failure
        if not self._running:
            assert self._failure is not None
            raise self._failure
        return self._running.popleft().result()

    def close(self) -> None:
        """Ends the threads. What they are in the middle of is waited for, what they have not begun is not done."""
        self._executor.shutdown(cancel_futures=True)
        self._running.clear()
