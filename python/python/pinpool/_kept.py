"""Memory that outlives its process, held by `pinpool keep`."""

from __future__ import annotations

from typing import NamedTuple

from . import _log, _pinpool
from ._pool import Pool

__all__ = ["Kept", "kept"]


class _Mark(NamedTuple):
    label: str
    nbytes: int
    #: Of the process that marked it.
    generation: int


class Kept:
    """The memory of a keeper in the process that holds it, page-locked. `pinpool.kept` makes it."""

    def __init__(self, name: str, nbytes: int | str, pool: Pool | None = None) -> None:
        _log.start()
        self.name = name
        self._memory = _pinpool.KeptMemory(Pool(name="kept") if pool is None else pool, name, nbytes)

    @property
    def generation(self) -> int:
        """How many processes held it before this one."""
        return self._memory.generation()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes()

    @property
    def page_lock(self) -> str:
        """What page-locks the memory: "register", "mlock" or "none"."""
        return self._memory.page_lock()

    @property
    def completed(self) -> _Mark | None:
        """What was last marked as complete: its label, its bytes, the generation that marked it. None while nothing is."""
        mark = self._memory.completed()
        return None if mark is None else _Mark(*mark)

    def begin(self) -> None:
        """From now on nothing is complete: to be called before bytes are changed that were."""
        self._memory.begin()

    def complete(self, label: str, nbytes: int | str | None = None) -> None:
        """Marks the first `nbytes` bytes, by default all, as complete."""
        self._memory.complete(label, self.nbytes if nbytes is None else nbytes)

    def buffer(self, offset: int | str = 0, n: int | str | None = None) -> _pinpool.Buffer:
        """`n` bytes from `offset` on, by default all that follow, as a `pinpool.Buffer`. No byte is in two buffers at a time."""
        if n is None:
            n = max(self.nbytes - _pinpool._parse_bytes(str(offset)), 0)
        return self._memory.get(offset, n)

    def close(self) -> None:
        """Gives it up. Buffers stay usable; the next process can hold it once they and their copies are gone."""
        self._memory.close()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def kept(name: str, nbytes: int | str, *, pool: Pool | None = None) -> Kept:
    """Takes the memory that `pinpool keep NAME --bytes NBYTES` holds, with the bytes of the process that held it before.

    It is page-locked as the memory of `pool` is, by default of a pool with the settings of the PINPOOL_ variables, and counts under its
    ceiling. One process holds it at a time.
    """
    return Kept(name, nbytes, pool)
