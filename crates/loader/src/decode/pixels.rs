//! Decodes files into RGB pixels of 8 bits.

use std::io::Cursor;

use png::{ColorType, Transformations};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::decode::{DecodeError, damaged};

/// Maximum number of pixels of an image, as in Pillow, which refuses twice its `MAX_IMAGE_PIXELS`.
pub const PIXELS_MAX: usize = 2 * 89_478_485;
/// Bytes of a pixel.
pub(super) const CHANNELS: usize = 3;

/// Width and height of an image.
pub(super) type Size = (usize, usize);

/// Decodes a JPEG or PNG file of at most `most` pixels into `pixels`. Drops transparency, as Pillow's `convert("RGB")` does.
pub(super) fn decode(encoded: &[u8], most: usize, pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    match encoded {
        [0xff, 0xd8, 0xff, ..] => jpeg(encoded, most, pixels),
        [0x89, b'P', b'N', b'G', ..] => png(encoded, most, pixels),
        _ => {
            let begin = &encoded[..encoded.len().min(4)];
            Err(format!("neither a JPEG nor a PNG image: it begins with {begin:02x?}").into())
        }
    }
}

fn check((width, height): Size, most: usize) -> Result<Size, DecodeError> {
    if width.checked_mul(height).is_some_and(|pixels| pixels <= most) {
        return Ok((width, height));
    }
    let limit = format!("{most} (max_pixels, up to {PIXELS_MAX}); raise it, or leave the file out");
    Err(format!("an image of {width} x {height} pixels: the limit is {limit}").into())
}

fn jpeg(encoded: &[u8], most: usize, pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    let failed = |error| damaged("JPEG", error);
    let options = DecoderOptions::new_fast()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(encoded), options);
    decoder.decode_headers().map_err(failed)?;
    let Some(info) = decoder.info() else { return Err(damaged("JPEG", "it has no header")) };
    let (width, height) = check((info.width.into(), info.height.into()), most)?;
    // No need to clear the old pixels: the decoder overwrites all of them.
    pixels.resize(width * height * CHANNELS, 0);
    decoder.decode_into(pixels).map_err(failed)?;
    Ok((width, height))
}

fn png(encoded: &[u8], most: usize, pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    let failed = |error| damaged("PNG", error);
    let mut decoder = png::Decoder::new(Cursor::new(encoded));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(failed)?;
    let side = |side: u32| usize::try_from(side).unwrap_or(usize::MAX);
    let (width, height) = check((side(reader.info().width), side(reader.info().height)), most)?;
    let color = reader.output_color_type().0;
    pixels.clear();
    pixels.reserve(width * height * CHANNELS);
    if reader.info().interlaced {
        // The rows of a pass are not adjacent, so decode the whole image.
        let len = reader.output_buffer_size().ok_or_else(|| damaged("PNG", "it is too large"))?;
        let mut frame = vec![0; len];
        reader.next_frame(&mut frame).map_err(failed)?;
        append_rgb(color, &frame, pixels)?;
    } else {
        while let Some(row) = reader.next_row().map_err(failed)? {
            append_rgb(color, row.data(), pixels)?;
        }
    }
    // Read to the end, to detect a file that is truncated after its pixels.
    reader.finish().map_err(failed)?;
    Ok((width, height))
}

/// Appends pixels of this type, without transparency.
fn append_rgb(color: ColorType, from: &[u8], to: &mut Vec<u8>) -> Result<(), DecodeError> {
    match color {
        ColorType::Rgb => to.extend_from_slice(from),
        ColorType::Rgba => to.extend(from.chunks_exact(4).flat_map(|pixel| &pixel[..CHANNELS])),
        ColorType::Grayscale => to.extend(from.iter().flat_map(|&gray| [gray; CHANNELS])),
        ColorType::GrayscaleAlpha => to.extend(from.chunks_exact(2).flat_map(|pixel| [pixel[0]; CHANNELS])),
        ColorType::Indexed => return Err(damaged("PNG", "its palette was not applied")),
    }
    Ok(())
}
