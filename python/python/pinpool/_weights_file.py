"""What a `.safetensors` file says it has: names, types, shapes, and where the bytes are."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
from typing import Any, NamedTuple

from ._errors import LoadError

# The longest header that is read; one of this length describes more than 100,000 tensors.
_HEADER_BYTES_MAX = 16 << 20

# The name in a file: bits of an element, the name in NumPy, the name in torch.
DTYPES: dict[str, tuple[int, str | None, str | None]] = {
    "BOOL": (8, "bool", "bool"),
    "U8": (8, "uint8", "uint8"),
    "I8": (8, "int8", "int8"),
    "F4": (4, None, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None, None),
    "F6_E3M2": (6, None, None),
    "F8_E4M3": (8, None, "float8_e4m3fn"),
    "F8_E5M2": (8, None, "float8_e5m2"),
    "F8_E8M0": (8, None, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, None, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, None, "float8_e5m2fnuz"),
    "U16": (16, "uint16", "uint16"),
    "I16": (16, "int16", "int16"),
    "F16": (16, "float16", "float16"),
    "BF16": (16, None, "bfloat16"),
    "U32": (32, "uint32", "uint32"),
    "I32": (32, "int32", "int32"),
    "F32": (32, "float32", "float32"),
    "U64": (64, "uint64", "uint64"),
    "I64": (64, "int64", "int64"),
    "F64": (64, "float64", "float64"),
    "C64": (64, "complex64", "complex64"),
}


class Tensor(NamedTuple):
    """A tensor of a file, or a part of one."""

    #: The name of the type in the format: "BF16".
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: Where its bytes lie in the file, in order: first byte, and number of bytes.
    runs: list[tuple[int, int]]

    def part(self, name: str, slices: slice | tuple[slice, ...]) -> Tensor:
        """The elements of `slices`, one for each of the first axes."""
        slices = slices if isinstance(slices, tuple) else (slices,)
        bits = DTYPES[self.dtype][0]
        if bits % 8:
            raise ValueError(f"slices of {name}: {self.dtype} has elements of {bits} bits, which are loaded whole alone")
        if len(slices) > len(self.shape) or not all(isinstance(one, slice) and one.step in (None, 1) for one in slices):
            raise ValueError(f"slices of {name}: {slices!r} for the shape {self.shape}: slices of step 1, at most one for each axis")
        if not self.shape:
            return self
        ranges = [range(length)[one] for one, length in itertools.zip_longest(slices, self.shape, fillvalue=slice(None))]
        shape = tuple(map(len, ranges))
        # From the last axis on that is cut, the elements of a part lie together.
        cut = max((axis for axis, length in enumerate(self.shape) if shape[axis] != length), default=0)
        strides = [math.prod(self.shape[axis + 1 :]) * bits // 8 for axis in range(len(self.shape))]
        length = math.prod(shape[cut:]) * bits // 8
        starts = (sum(map(operator.mul, at, strides)) for at in itertools.product(*ranges[:cut], ranges[cut][:1]))
        begin = self.runs[0][0] if self.runs else 0
        runs = [(begin + start, length) for start in starts] if length else []
        return Tensor(self.dtype, shape, math.prod(shape) * bits // 8, runs)


class Header(NamedTuple):
    """What a file, or the files of an index, say that they have."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(fd: int, path: str) -> Header:
    """The header of the file, its tensors in the order of their bytes: they fill the file without gaps."""

    def broken(why: str) -> LoadError:
        return LoadError(f"{path}: broken safetensors: {why}; write it again, or fetch it again")

    file_bytes = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if file_bytes < 8 or length > min(file_bytes - 8, _HEADER_BYTES_MAX):
        raise broken(f"the header has {length} B by its first 8 bytes, and the file {file_bytes} B")
    try:
        header = json.loads(os.pread(fd, length, 8))
        metadata = dict(header.pop("__metadata__", None) or {})
        entries = [
            (begin, end - begin, name, entry["dtype"], tuple(map(operator.index, entry["shape"])))
            for name, entry in header.items()
            for begin, end in [map(operator.index, entry["data_offsets"])]
        ]
        entries.sort(key=operator.itemgetter(0, 1, 2))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise broken(f"the header cannot be read ({type(error).__name__}: {error})") from None
    tensors, place = {}, 0
    for begin, nbytes, name, dtype, shape in entries:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise LoadError(f"{path}: {name} has the dtype {dtype}, which is unknown here: known are {', '.join(DTYPES)}")
        bits = math.prod(shape) * DTYPES[dtype][0]
        if min(shape, default=0) < 0 or bits != nbytes * 8:
            raise broken(f"{name} has {nbytes} B, but {bits / 8:g} B by its shape {shape} of {dtype}")
        if begin != place:
            raise broken(f"{name} begins at byte {begin} of the data, where byte {place} is the next")
        place += nbytes
        tensors[name] = Tensor(dtype, shape, nbytes, [(8 + length + begin, nbytes)] if nbytes else [])
    if 8 + length + place != file_bytes:
        raise broken(f"the tensors end at byte {8 + length + place}, the file at {file_bytes}")
    return Header(metadata, tensors)


def files_of(path: str) -> tuple[dict[str, Any], dict[str, list[str] | None]]:
    """What an index says of the whole, and its files with the names in each; a path that is no index has any names."""
    if not path.endswith(".json"):
        return {}, {path: None}
    with open(path, "rb") as file:
        text = file.read()
    by_file: dict[str, list[str]] = {}
    try:
        index = json.loads(text)
        for name, file_name in index["weight_map"].items():
            by_file.setdefault(os.path.join(os.path.dirname(path), file_name), []).append(name)
        return dict(index.get("metadata") or {}), {**by_file}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise LoadError(f"{path}: no index of safetensors files ({why}): its weight_map has the file of each tensor") from None
