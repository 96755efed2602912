"""Decoders of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Never

from pinpool import _pinpool
from pinpool._arguments import checked_int, hide_unknown_parameter

__all__ = ["ImageDecoder"]


class DecoderSpec(NamedTuple):
    """A decoder with the shape and dtype of its results."""

    decoder: _pinpool.Decoder
    shape: tuple[int, ...]
    dtype: str


class ImageDecoder:
    """Decodes JPEG and PNG files to RGB images of one size and dtype uint8, for `Loader(decode=)`.

    Pixels equal Pillow's `convert("RGB").resize((width, height), BILINEAR)` up to rounding. In tests, JPEG pixels differed by at most 4.
    A 16-bit PNG is scaled to 8 bits, while Pillow clips it. Transparency is dropped. Rotation in EXIF data is ignored, as in Pillow
    without `ImageOps.exif_transpose`.

    Args:
        height, width: size of the result in pixels.
        layout: "HWC" for shape (height, width, 3), or "CHW" for (3, height, width).
        fit: "stretch" resizes the whole image; "crop" resizes its largest centered part of the same proportions.
        max_pixels: files with more pixels fail before they are decoded (default and maximum: 178,956,970). This bounds the memory of a
            thread: 3 bytes per pixel, 7 for an interlaced PNG, up to 11 for a progressive JPEG.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    @hide_unknown_parameter
    def __init__(
        self,
        height: int,
        width: int,
        *,
        layout: Literal["HWC", "CHW"] = "HWC",
        fit: Literal["stretch", "crop"] = "stretch",
        max_pixels: int | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            remedy = ": images are uint8; convert batches in map=" if "dtype" in unknown else ""
            raise TypeError(f"ImageDecoder has no argument {next(iter(unknown))!r}{remedy}")
        if layout not in ("HWC", "CHW"):
            raise ValueError(f"layout must be 'HWC' or 'CHW', not {layout!r}")
        if fit not in ("stretch", "crop"):
            raise ValueError(f"fit must be 'stretch' or 'crop', not {fit!r}")
        self.height, self.width = checked_int("height", height, 1, (1 << 32) - 1), checked_int("width", width, 1, (1 << 32) - 1)
        self.layout, self.fit = layout, fit
        self.max_pixels = None if max_pixels is None else checked_int("max_pixels", max_pixels, 1, (1 << 63) - 1)

    def _spec(self) -> DecoderSpec:
        decoder = _pinpool.Decoder.image(self.height, self.width, self.layout == "CHW", self.fit == "crop", self.max_pixels)
        if decoder is None:
            raise ValueError(f"ImageDecoder({self.height}, {self.width}) has more pixels than an image can have")
        sizes = (self.height, self.width)
        return DecoderSpec(decoder, (3, *sizes) if self.layout == "CHW" else (*sizes, 3), "uint8")

    def __repr__(self) -> str:
        return f"pinpool_loader.ImageDecoder({self.height}, {self.width}, layout={self.layout!r}, fit={self.fit!r})"


def decoder_specs(decode: Mapping[str, ImageDecoder] | None) -> dict[tuple[str, ...], DecoderSpec]:
    """Returns the decoder and result of each field by its names: "jpg;jpeg" is one field with two names."""
    if decode is None:
        return {}
    example = "such as {'jpg': pinpool_loader.ImageDecoder(224, 224)}"
    if not isinstance(decode, Mapping):
        raise TypeError(f"decode must be a dict from field names to decoders, {example}, not {decode!r}")
    if not decode:
        raise ValueError(f"decode has no field: pass None, or a dict {example}")
    specs: dict[tuple[str, ...], DecoderSpec] = {}
    for key, decoder in decode.items():
        if not isinstance(decoder, ImageDecoder):
            raise TypeError(f"decode[{key!r}] must be a pinpool_loader.ImageDecoder, not {decoder!r}; map= decodes other formats")
        names = tuple(name.strip().removeprefix(".").lower() for name in str(key).split(";"))
        if not isinstance(key, str) or not all(names):
            raise TypeError(f"decode must have field names as keys, such as 'jpg' or 'jpg;jpeg;png', not {key!r}")
        repeated = [name for earlier_names in specs for name in earlier_names if name in names]
        if repeated:
            raise ValueError(f"decode names the field {repeated[0]!r} twice")
        specs[names] = decoder._spec()
    return specs
