from collections.abc import Coroutine, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, Self, SupportsIndex, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt


__version__: str

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...
    def synchronize(self) -> Any: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _NumbaStream(Protocol):
    @property
    def handle(self) -> Any: ...

_Stream: TypeAlias = int | _TorchStream | _CupyStream | _CudaStream | _NumbaStream
_Size: TypeAlias = SupportsIndex | str
_Time: TypeAlias = float | str
_Switch: TypeAlias = bool | Literal[0, 1, "0", "1"]

@final
class Buffer:
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ptr(self) -> int: ...
    @property
    def is_pinned(self) -> bool: ...
    @property
    def numa_node(self) -> int | None: ...
    @property
    def released(self) -> bool: ...
    @property
    def views(self) -> int: ...
    def release(self, stream: _Stream | None = None) -> None: ...
    def record_stream(self, stream: _Stream) -> None: ...
    def dlpack(self, device: Literal["cpu", "cuda_host"] = "cpu") -> DlpackExport: ...
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

@final
class DlpackExport:
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Pool:
    def __new__(
        cls,
        *,
        name: str | None = None,
        env: bool = True,
        backend: str | None = ...,
        device: int | str | None = ...,
        numa_node: int | str | None = ...,
        handle_types: Literal["none", "posix_fd"] | None = ...,
        write_combined: _Switch | None = ...,
        preset: Literal["adaptive", "tensorflow"] | None = ...,
        pool_size_limit: int | str | None = ...,
        auto_resize: _Switch | None = ...,
        rounding: Literal["eighths", "pow2", "exact"] | None = ...,
        max_bytes: int | str | None = ...,
        pools_per_host: int | str | None = ...,
        wait: _Time | timedelta | None = ...,
        on_full: Literal["auto", "error", "pageable"] | None = ...,
        max_fallback_bytes: int | str | None = ...,
        max_idle_bytes: int | str | None = ...,
        idle_timeout: _Time | timedelta | None = ...,
        release_policy: Literal["idle", "force"] | None = ...,
        pressure: str | PathLike[str] | None = ...,
        reserve: int | str | None = ...,
        pin_threads: int | str | None = ...,
        growth: _Switch | None = ...,
        poll: _Switch | None = ...,
        zero: _Switch | None = ...,
        trace: str | PathLike[str] | None = ...,
        log_every: int | str | None = ...,
        dump: _Switch | None = ...,
        socket: str | PathLike[str] | None = ...,
        close_wait: _Time | timedelta | None = ...,
        fence: Literal["auto", "event", "timeline"] | None = ...,
        stuck_after: _Time | timedelta | None = ...,
    ) -> Self: ...
    @staticmethod
    def from_env(name: str | None = None) -> Pool: ...
    @staticmethod
    def setting_names() -> list[str]: ...
    def get(self, n: _Size, *, align: _Size | None = None, timeout: _Time | None = None) -> Buffer: ...
    def try_get(self, n: _Size) -> Buffer | None: ...
    def aget(self, n: _Size, *, timeout: _Time | None = None) -> Coroutine[Any, Any, Buffer]: ...
    @overload
    def empty(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike | None = None,
        *,
        order: Literal["C", "F"] = "C",
        library: Literal["numpy"] = "numpy",
        timeout: _Time | None = None,
    ) -> np.ndarray[Any, np.dtype[Any]]: ...
    @overload
    def empty(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: Any = None,
        *,
        order: Literal["C"] = "C",
        library: Literal["torch"],
        timeout: _Time | None = None,
    ) -> Any: ...
    def stats(self) -> dict[str, Any]: ...
    def class_stats(self) -> list[dict[str, Any]]: ...
    def dump(self) -> str: ...
    def reserve(self, n: _Size) -> None: ...
    def trim(self, to_bytes: _Size | None = None) -> None: ...
    def clear(self) -> None: ...
    def poll(self) -> None: ...
    def set_max_bytes(self, max_bytes: _Size) -> None: ...
    def tagged(self, tag: str) -> Pool: ...
    def partition(self, name: str, max_bytes: _Size) -> Pool: ...
    @property
    def name(self) -> str | None: ...
    @property
    def tag(self) -> str | None: ...
