"""Applies the function `map=` to batches on threads, ahead of the loop and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Time between two checks for a result while the next item is read.
POLL_SECONDS = 0.005
# Result of `take` if there is no item within the timeout.
TIMED_OUT: Any = object()


class MapRunner(Generic[T, R]):
    """Yields `function(item)` for each item of `take(timeout)`. The threads work on at most `num_threads` items ahead of the loop.

    `take` returns `TIMED_OUT` after the timeout and None at the end. Not a generator, because a generator keeps a reference to the last
    yielded value.
    """

    def __init__(self, function: Callable[[T], R], take: Callable[[float | None], T | None], num_threads: int) -> None:
        self._function, self._take, self._max_ahead = function, take, num_threads
        self._executor = ThreadPoolExecutor(num_threads, "pinpool-map")
        self._running: deque[Future[R]] = deque()
        # The exception that ends the loop: StopIteration after the last item, or a failure.
        self._end: Exception | None = None

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        while self._end is None and len(self._running) <= self._max_ahead:
            try:
                # If there is a result, `take` does not wait: reading the next item may need memory that the loop keeps until it gets the
                # result.
                has_result = bool(self._running) and self._running[0].done()
                wait = POLL_SECONDS if self._running else None
                item = self._take(0 if has_result else wait)
                if item is None:
                    self._end = StopIteration()
                elif item is not TIMED_OUT:
                    self._running.append(self._executor.submit(self._apply, item))
                elif has_result:
                    break
            except Exception as failure:
                # Like the end, it is raised after the results of the earlier items. Its traceback refers to this frame, so `item` would
                # keep the previous item.
                item = None
                self._end = failure
        if not self._running:
            assert self._end is not None
            raise self._end
        return self._running.popleft().result()

    def _apply(self, item: T) -> R:
        try:
            return self._function(item)
        except StopIteration as error:
            # A StopIteration would end the loop as if the epoch had ended.
            raise RuntimeError("map= raised StopIteration") from error

    def close(self) -> None:
        """Ends the threads after their current items; results and queued items are dropped."""
        self._running.clear()
        self._end = None  # Its traceback refers to this object and to the frames of the loop.
        self._executor.shutdown(cancel_futures=True)
