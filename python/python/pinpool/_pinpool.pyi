from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, Unpack, final

from ._errors import PinpoolError
from ._settings import PoolSettings, Size, Time

__version__: str

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _AcceleratorStream(Protocol):
    @property
    def native_handle(self) -> int: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...
    def synchronize(self) -> Any: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _NumbaStream(Protocol):
    @property
    def handle(self) -> Any: ...

_Stream: TypeAlias = int | _TorchStream | _AcceleratorStream | _CupyStream | _CudaStream | _NumbaStream

@final
class Buffer:
    """Bytes in pinned memory, from `Pool.get`.

        array = np.asarray(buf).view(np.float32)    # also np.frombuffer(buf, np.float32) and memoryview(buf)
        tensor = torch.from_dlpack(buf)             # uint8, one dimension

    These are writable views without a copy. The memory returns to the pool after `release()`, at the end of `with`, or when the
    object is garbage-collected, but never before the last view is gone and the work on the recorded streams has completed.

    `np.ndarray(shape, buffer=buf)` and `torch.frombuffer(buf)` make views that the pool cannot count: after `release()`, the
    memory is reused under them, without an error. Pass `memoryview(buf)` instead. A buffer cannot be pickled.
    """

    def __len__(self) -> int:
        """Length in bytes."""
    @property
    def nbytes(self) -> int:
        """Length in bytes."""
    @property
    def ptr(self) -> int:
        """Address of the first byte, aligned to a page. The pool cannot track copies started from it: call `record_stream`."""
    @property
    def is_pinned(self) -> bool:
        """True if the driver pinned the memory, so that copies can be asynchronous. True on the backends vmm, register and cuda,
        except for empty and pageable buffers (`on_full="pageable"`). torch's method `is_pinned()` returns the same value.
        """
    @property
    def numa_node(self) -> int | None:
        """NUMA node of the memory, or None if there is only one or it is unknown."""
    @property
    def is_released(self) -> bool:
        """True if the buffer was released and can no longer be used."""
    @property
    def num_views(self) -> int:
        """Number of existing memoryviews, arrays and tensors that were made directly from the buffer, by the buffer protocol or
        DLPack.
        """
    def release(self, stream: _Stream | None = None) -> None:
        """Releases the buffer. Its memory returns to the pool once the work already enqueued on `stream` and on the recorded streams
        has completed.

        A second call does nothing.

        Args:
            stream: as for `record_stream`.

        Raises:
            BufferError: the buffer has views. It is not released.
            TypeError, BackendError, DeviceError, RequestError: as for `record_stream`. The buffer is not released.
        """
    def record_stream(self, stream: _Stream) -> None:
        """Delays the reuse of the memory until all work enqueued on `stream` so far has completed. The buffer stays in use.

        Call it after each asynchronous copy that another library starts from the buffer. Unlike torch's `Tensor.record_stream`,
        it covers only the work that is already enqueued, so a call before the copy does not protect the memory.

        Args:
            stream: a stream of torch, CuPy or Numba, an object with `__cuda_stream__`, or a CUDA stream handle as an int. Handles
                0 and 1 (legacy) belong to the current context, and 2 also to the calling thread, so call on the thread that
                enqueued the copy.

        Raises:
            TypeError, RequestError: `stream` is not a stream, or an int that cannot be a handle. The call has no effect.
            BackendError: there is no CUDA driver, so no copy can run on a stream.
            DeviceError: the driver refuses the stream or its handle, or the stream captures a graph. The end of its work is
                unknown, so the memory is never reused, even if a later call with the same stream succeeds. Once the buffer is
                released, the memory is counted in `stats()["memory"]["quarantined"]`.
            ReleasedError: the buffer was released.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class PoolCore:
    """The methods of `Pool` that are written in Rust."""

    def __new__(cls, *, _core: PoolCore | None = None, **settings: Unpack[PoolSettings]) -> Self: ...
    def get(self, nbytes: Size, *, timeout: Time | None = "wait") -> Buffer:
        """Returns a buffer: reuses pinned memory, or pins more. When the pool is full, waits for a release.

        Args:
            nbytes: length in bytes, or text such as "64MiB".
            timeout: maximum wait for memory: seconds, a timedelta, text such as "500ms", None for no limit, or "wait" for the
                setting `wait` of the pool. With 0 the call may still wait for other threads' driver calls (up to 0.1 s).

        Raises:
            TimeoutError: the pool was full until the timeout.
            LimitError: the pool is full and the timeout is 0, or the request exceeds the limit (`max_bytes`).
            RequestError: the length or `timeout` is invalid.
            TypeError: `nbytes` or `timeout` has a wrong type.
            BackendError: the driver or the kernel refused to pin memory.
            ForkError: the pool belongs to the parent of this process.
            ClosedError: the pool was closed.
        """
    def try_get(self, nbytes: Size) -> Buffer | None:
        """Returns an idle buffer of `nbytes` bytes, or None if there is none. Pins nothing and does not wait for room. Raises
        RequestError, TypeError, ForkError and ClosedError as `get` does.
        """
    @staticmethod
    def describe_stats() -> dict[str, str]:
        """Returns the meaning of each statistic in `stats` by its path, such as "memory.in_use_bytes"."""
    def report(self) -> str:
        """Returns a report of the pool's memory: the largest holders by tag, the bytes by state, the limit, and, if memory is
        short, the likely cause.
        """
    def reserve(self, nbytes: Size) -> None:
        """Pins `nbytes` more bytes and keeps them; with `reserve_wait=False`, most of them in the background. If the driver or the
        kernel refuses a part, the pool warns and keeps the smaller reserve.

        Raises:
            SettingError: the preset is "tensorflow".
            LimitError: the bytes exceed the limit (`max_bytes`), or leave no room for a waiting request.
            BackendError: the driver or the kernel refused to pin any of them.
            ForkError, ClosedError: as for `get`.
        """
    def wait_for_reserve(self, *, timeout: Time | None = None) -> bool:
        """Waits until the whole reserve is pinned, for a pool with `reserve_wait=False`.

        Args:
            timeout: maximum wait: seconds, a timedelta, text such as "500ms", or None for no limit.

        Returns:
            True, or False after the timeout.

        Raises:
            BackendError: the driver or the kernel refused a part, so the rest of the reserve was abandoned.
            ForkError: as for `get`.
        """
    @property
    def reserve_fraction(self) -> float:
        """Fraction of the reserve that is pinned, from 0.0 to 1.0."""
    def trim(self, to_bytes: Size = 0) -> None:
        """Releases idle memory to the system until at most `to_bytes` are held or nothing is idle. Keeps reserves. On register and
        cuda, waits for all work on the device.
        """
    def close(self) -> None:
        """Makes waiting and later requests fail with ClosedError, and releases idle memory except reserves. Buffers in use stay
        valid; after their release, `trim()` releases their memory. On register and cuda, waits for all work on the device. A `with`
        block closes the pool at its end.
        """
    def maintain(self) -> None:
        """Detects completed copies and releases idle memory that is due, as the maintenance thread does."""
    @property
    def backend(self) -> str:
        """Source of the memory: "vmm", "register", "cuda", "mlock" or "heap"."""
    @property
    def pinned_by(self) -> str | None:
        """What pins the memory: "driver", "kernel" (`mlock`) or None."""
    @property
    def max_bytes(self) -> int | None:
        """Limit on the bytes held, or None if unlimited."""
    def set_max_bytes(self, max_bytes: Size) -> None:
        """Changes the limit: a size, "auto", or "none" for no limit. With 0 the pool pins nothing more. Buffers in use stay valid.

        Raises:
            RequestError, TypeError: the limit is invalid.
            ForkError: as for `get`.
        """
    def _tagged(self, tag: str) -> PoolCore: ...
    @property
    def name(self) -> str | None:
        """Name of the pool, or None."""
    @property
    def tag(self) -> str | None:
        """Tag of this handle, or None."""
    def _begin_get(self, nbytes: Size, timeout: Time | None) -> Buffer | PendingRequest: ...
    def _stats_json(self) -> str: ...
    def _diagnosis(self) -> tuple[str, str, bool, float, tuple[str, str] | None]: ...
    @staticmethod
    def _setting_names() -> list[str]: ...

@final
class PendingRequest:
    def poll(self) -> Buffer | None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class SharedBuffer:
    """A buffer of a `SharedPool` that this process fills, from `SharedPool.get`.

    `memoryview(buf)` and `np.frombuffer(buf)` are writable views. `np.ndarray(shape, buffer=buf)` and `torch.frombuffer(buf)`
    make views that are not counted and can overwrite the bytes after `send()`: pass `memoryview(buf)` to them. `send()` passes
    the buffer to the trainer and returns its ticket. A buffer that is not sent becomes free when it and its views are gone.
    Pickling a buffer, or copying it with the module `copy`, sends it; the receiver unpickles its ticket.
    """

    def __len__(self) -> int:
        """Length in bytes."""
    @property
    def nbytes(self) -> int:
        """Length in bytes."""
    def send(self, user_data: int = 0) -> bytes:
        """Passes the buffer to the trainer and returns its ticket: 40 bytes, for `SharedPool.receive`.

        Args:
            user_data: an int from 0 to 2**64 - 1 with any meaning; `SharedPool.receive_next` returns it with the buffer.

        Raises:
            BufferError: the buffer has views, which could change what the trainer reads.
            ReleasedError: the buffer was sent or released before.
            TrainerUnavailableError: the trainer has ended, has closed the shared pool, or is ending a loop over `batches`. The
                buffer becomes free.
        """
    def release(self) -> None:
        """Makes the buffer free without sending it. Raises BufferError while it has views."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class SharedWorker:
    def __new__(cls, descriptor: int) -> Self: ...
    def get(self, n: Size, timeout: Time | None = None) -> SharedBuffer: ...
    def size(self) -> tuple[int, int]: ...

@final
class SharedPoolCore:
    def __new__(cls, pool: PoolCore, buffer_bytes: Size, num_buffers: int, hugetlb: bool | None) -> Self: ...
    def fileno(self) -> int: ...
    def receive(self, ticket: bytes) -> Buffer: ...
    def receive_next(self, timeout: Time | None = None) -> tuple[int, Buffer] | None: ...
    def receive_from_dead_worker(self) -> tuple[int, Buffer] | None: ...
    def recover(self) -> int: ...
    def refuse_workers(self, is_refusing: bool) -> None: ...
    def counts(self) -> tuple[int, int, int, int, int, int]: ...
    def size(self) -> tuple[int, int]: ...
    def pages(self) -> tuple[str | None, bool]: ...
    def close(self) -> None: ...

_Failed: TypeAlias = tuple[str, PinpoolError | None]
_Part: TypeAlias = tuple[int, int, int, int]
_RawBatch: TypeAlias = tuple[int, int, int, Any, list[_Part], list[int], list[Any] | None, list[_Failed]]

def _size(name: str, value: Size) -> int: ...
def _seconds(time: Time | None) -> float: ...
def _record_stream(address: int, stream: _Stream) -> int | None: ...
def _take_lines() -> list[tuple[int, str]]: ...
def _wait_for_lines() -> bool: ...
def _set_keeps_trace(keeps_trace: bool) -> None: ...
def _stop_lines() -> None: ...
def _default_threads() -> int: ...
def _host_memory() -> tuple[int, str] | None: ...
def _torch_functions(pool: PoolCore) -> int: ...
def _free_torch_functions(address: int) -> None: ...

@final
class Decoder:
    @staticmethod
    def image(height: int, width: int, is_chw: bool, is_cropped: bool, max_pixels: int | None) -> Decoder | None: ...

@final
class SampleCatalog:
    def __new__(
        cls,
        pool: PoolCore,
        paths: list[str],
        open_archives: bool,
        batch_size: int,
        batch_bytes: int,
        num_threads: int,
        read_ahead: int,
        seed: int | None,
        rank: int,
        world_size: int,
        even: bool,
        drop_last: bool,
        labels: tuple[str, Callable[[str], Any]] | None = None,
        decode: list[tuple[list[str], Decoder]] = ...,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def failures(self) -> list[str]: ...
    def num_files(self) -> int: ...
    def first_compressed(self) -> str | None: ...
    def unopened(self) -> list[str]: ...
    def undecodable(self) -> str | None: ...
    def classes(self) -> tuple[list[str], bool]: ...
    def fingerprint(self) -> str: ...
    def nbytes(self) -> int: ...
    def sample_bytes(self, sample: int) -> int | None: ...
    def names(self, indices: list[int]) -> list[str]: ...
    def labels(self, indices: list[int]) -> list[str]: ...
    def fields(self, indices: list[int]) -> list[list[tuple[str, int, int]]]: ...
    def num_batches(self, epoch: int) -> int: ...
    def begin(self, epochs: int, position: tuple[int, int, int]) -> Reader: ...

@final
class Reader:
    def next(self, timeout: float | None = None) -> _RawBatch | Literal[False] | None: ...
    def stop(self) -> None: ...
