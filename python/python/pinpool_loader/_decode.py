"""Decoders: images of one size become one array per field of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pinpool import _pinpool
from pinpool._arguments import count

__all__ = ["Image"]


class DecoderSpec(NamedTuple):
    """A decoder, and the shape and dtype of its results."""

    decoder: _pinpool.Decoder
    shape: tuple[int, ...]
    dtype: str


class Image:
    """JPEG and PNG files as RGB images of one size, of dtype uint8: `Image(224, 224)`.

    `layout` is "HWC", or "CHW" for the channels first. An image of another size is resized by a bilinear filter, as by Pillow's
    `resize(..., Image.BILINEAR)`: the whole image with `fit="stretch"`, the largest centred part of the same proportions with
    "crop". Transparency is dropped, as by `convert("RGB")`. A 16-bit PNG is scaled to 8 bits (Pillow clips it). The rotation in
    EXIF data is ignored, as by Pillow without `ImageOps.exif_transpose`. A file of more than `pixels_max` pixels fails before it is
    decoded, which bounds the memory of a decoding thread: 3 bytes a pixel, 7 for an interlaced PNG. The limit is never above
    178,956,970.
    """

    def __init__(
        self,
        height: int,
        width: int | None = None,
        layout: Literal["HWC", "CHW"] = "HWC",
        fit: Literal["stretch", "crop"] = "stretch",
        pixels_max: int | None = None,
        **others: object,
    ) -> None:
        if others:
            remedy = ": images are uint8; convert batches in map=" if "dtype" in others else ""
            raise TypeError(f"an Image has no argument {next(iter(others))}={remedy}")
        if width is None:
            raise TypeError(f"Image({height!r}) has no width: give the height and the width, as in Image(224, 224)")
        if layout not in ("HWC", "CHW"):
            raise ValueError(f"layout must be 'HWC' or 'CHW', not {layout!r}")
        if fit not in ("stretch", "crop"):
            raise ValueError(f"fit must be 'stretch' or 'crop', not {fit!r}")
        self.height, self.width = count("height", height, 1, (1 << 32) - 1), count("width", width, 1, (1 << 32) - 1)
        self.layout, self.fit = layout, fit
        self.pixels_max = None if pixels_max is None else count("pixels_max", pixels_max, 1, (1 << 63) - 1)

    def _spec(self) -> DecoderSpec:
        decoder = _pinpool.Decoder.image(self.height, self.width, self.layout == "CHW", self.fit == "crop", self.pixels_max)
        if decoder is None:
            raise ValueError(f"Image({self.height}, {self.width}) has more pixels than an image can have")
        sizes = (self.height, self.width)
        return DecoderSpec(decoder, (3, *sizes) if self.layout == "CHW" else (*sizes, 3), "uint8")

    def __repr__(self) -> str:
        return f"pinpool_loader.Image({self.height}, {self.width}, {self.layout!r}, {self.fit!r})"


def decoders(decode: Mapping[str, Image] | None) -> dict[tuple[str, ...], DecoderSpec]:
    """The decoder of each field, by its names: "jpg;jpeg" is one field of two names."""
    if decode is None:
        return {}
    example = "such as {'jpg': pinpool_loader.Image(224, 224)}"
    if not isinstance(decode, Mapping) or not decode:
        raise TypeError(f"decode must be a dict from fields to images, {example}, not {decode!r}")
    found: dict[tuple[str, ...], DecoderSpec] = {}
    for key, image in decode.items():
        if not isinstance(image, Image):
            raise TypeError(f"decode[{key!r}] must be a pinpool_loader.Image, not {image!r}; map= decodes other formats")
        names = tuple(name.strip().removeprefix(".").lower() for name in str(key).split(";"))
        if not isinstance(key, str) or not all(names):
            raise TypeError(f"decode must have field names as keys, such as 'jpg' or 'jpg;jpeg;png', not {key!r}")
        taken = [name for earlier in found for name in earlier if name in names]
        if taken:
            raise ValueError(f"decode names the field {taken[0]!r} twice")
        found[names] = image._spec()
    return found
