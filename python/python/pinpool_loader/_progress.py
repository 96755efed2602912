"""The position of a loader in its epochs."""

from __future__ import annotations

from typing import TypeAlias

#: The epoch, `index_in_epoch` and `index_overall` of the next batch.
Position: TypeAlias = tuple[int, int, int]
POSITION_KEYS = ("epoch", "index_in_epoch", "index_overall")


class Progress:
    """The position of a loader, and the epochs of its loops.

    Attributes:
        position: position after the last batch that the program received.
        first_epoch: epoch in which the current loop began; None outside loops.
    """

    def __init__(self, epochs_per_loop: int) -> None:
        self._epochs_per_loop = epochs_per_loop
        self.position: Position = (0, 0, 0)
        self.first_epoch: int | None = None
        self._is_resumed = False

    def epochs_of_loop(self) -> range:
        """Returns the epochs of the current or next loop, from the first one, even if the loop resumes in a later one."""
        epoch = self.first_epoch
        if epoch is None:
            epoch = self.position[0] if self._is_resumed else self._next_epoch()
        begin = epoch // self._epochs_per_loop * self._epochs_per_loop
        return range(begin, begin + self._epochs_per_loop)

    def _next_epoch(self) -> int:
        """Returns the first epoch of the loop after the current or unfinished loop."""
        epoch, index_in_epoch, _ = self.position
        return -(-(epoch + (index_in_epoch > 0)) // self._epochs_per_loop) * self._epochs_per_loop

    def begin_loop(self) -> range:
        """Moves to the first batch of the next loop, or stays at a position from `resume`, and returns the epochs of the loop."""
        if not self._is_resumed:
            self.position = (self._next_epoch(), 0, self.position[2])
        self.first_epoch, self._is_resumed = self.position[0], False
        return self.epochs_of_loop()

    def advance(self, position: Position, epochs: range) -> None:
        """Moves to the position after a batch of the loop over `epochs`."""
        self.position = position
        if position[0] >= epochs.stop:
            self.first_epoch = None

    def resume(self, position: Position) -> None:
        """Makes the next loop begin at `position`."""
        self.position, self._is_resumed = position, True
