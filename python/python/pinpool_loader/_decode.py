"""What the loader decodes: images and arrays of one size, each field of a batch one array."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _pinpool

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Array", "Image"]


@dataclass(frozen=True)
class Image:
    """JPEG and PNG files as RGB images of one size, of dtype uint8.

    `layout` is "HWC", or "CHW" for the channels first. An image of another size is resized by a bilinear filter, as by Pillow's
    `resize(..., Image.BILINEAR)`: the whole of it with `fit="stretch"`, as much from its middle as has the proportions with
    "crop". Transparency is left out, as by `convert("RGB")`. A file of more than `pixels_max` pixels fails before it is decoded, which
    bounds the memory of a decoding thread: 3 bytes a pixel, 7 for an interlaced PNG. The limit is never above 178,956,970.
    """

    height: int
    width: int
    layout: Literal["HWC", "CHW"] = "HWC"
    fit: Literal["stretch", "crop"] = "stretch"
    pixels_max: int | None = None

    def _decoder(self) -> Decoded:
        if self.layout not in ("HWC", "CHW"):
            raise ValueError(f"Image(layout={self.layout!r}): 'HWC' or 'CHW'")
        if self.fit not in ("stretch", "crop"):
            raise ValueError(f"Image(fit={self.fit!r}): 'stretch' or 'crop'")
        sides = {"height": self.height, "width": self.width, "pixels_max": self.pixels_max}
        for name, side in sides.items():
            if side is None and name == "pixels_max":
                continue
            if not isinstance(side, int) or isinstance(side, bool) or not 0 < side < 1 << 32:
                raise ValueError(f"Image({name}={side!r}): a number of pixels, 1 or more")
        decoder = _pinpool.Decoder.image(self.height, self.width, self.layout == "CHW", self.fit == "crop", self.pixels_max)
        if decoder is None:
            raise ValueError(f"Image({self.height}, {self.width}): more pixels than any image may have")
        sizes = (self.height, self.width)
        return Decoded(decoder, (3, *sizes) if self.layout == "CHW" else (*sizes, 3), "uint8")


@dataclass(frozen=True)
class Array:
    """`.npy` files of one shape and dtype. A file of another fails, and its name and what it has are told."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    def _decoder(self) -> Decoded:
        import numpy as np

        dtype, shape = np.dtype(self.dtype), tuple(self.shape)
        if dtype.hasobject or dtype.names is not None:
            raise ValueError(f"Array(dtype={self.dtype!r}): a type of plain numbers")
        if any(not isinstance(side, int) or side < 0 for side in shape):
            raise ValueError(f"Array(shape={self.shape!r}): whole numbers, 0 or more")
        decoder = None
        if math.prod(shape) < 1 << 63:
            decoder = _pinpool.Decoder.array(list(shape), dtype.str, dtype.itemsize)
        if decoder is None:
            raise ValueError(f"Array(shape={self.shape!r}): more bytes than memory can have")
        return Decoded(decoder, shape, dtype.name)


class Decoded(NamedTuple):
    """A decoder, and what it makes of each sample."""

    decoder: _pinpool.Decoder
    shape: tuple[int, ...]
    dtype: str


def decoders(decode: Mapping[str, Image | Array] | None) -> dict[tuple[str, ...], Decoded]:
    """The decoder of each field, by its names: "jpg;jpeg" is one field of two names."""
    if decode is None:
        return {}
    if not isinstance(decode, Mapping) or not decode:
        raise TypeError(f"decode={decode!r}: what each field is decoded to, such as {{'jpg': pinpool.Image(224, 224)}}")
    found: dict[tuple[str, ...], Decoded] = {}
    for key, codec in decode.items():
        if not isinstance(codec, (Image, Array)):
            raise TypeError(f"decode={{{key!r}: {codec!r}}}: a pinpool.Image or a pinpool.Array")
        names = tuple(name.strip().removeprefix(".").lower() for name in str(key).split(";"))
        if not isinstance(key, str) or not all(names):
            raise TypeError(f"decode={{{key!r}: ...}}: the name of a field, or several as in 'jpg;jpeg;png'")
        taken = [name for earlier in found for name in earlier if name in names]
        if taken:
            raise ValueError(f"decode={{{key!r}: ...}}: the field {taken[0]!r} is decoded already")
        found[names] = codec._decoder()
    return found


def handed(decoded: Mapping[tuple[str, ...], Decoded]) -> list[tuple[list[str], Any]]:
    """As the loader's threads take them."""
    return [(list(names), each.decoder) for names, each in decoded.items()]
