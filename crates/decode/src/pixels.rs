//! From a file's bytes to RGB pixels of 8 bits.

use std::io::Cursor;

use png::{ColorType, Transformations};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::DecodeError;

/// Most pixels of an image: a header that claims more is taken for damaged, as in Pillow, which refuses twice its
/// `MAX_IMAGE_PIXELS`.
pub const PIXELS_MAX: usize = 2 * 89_478_485;
/// Bytes of a pixel.
pub(crate) const CHANNELS: usize = 3;

/// An image that was decoded: width and height; its pixels are in the vector that was given.
pub(crate) type Size = (usize, usize);

/// Decodes a JPEG or a PNG into `pixels`, by its first bytes. Transparency is left out, as by Pillow's `convert("RGB")`.
pub(crate) fn decode(encoded: &[u8], pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    match encoded {
        [0xff, 0xd8, 0xff, ..] => jpeg(encoded, pixels),
        [0x89, b'P', b'N', b'G', ..] => png(encoded, pixels),
        _ => Err(DecodeError::Unknown { begin: encoded[..encoded.len().min(4)].to_vec() }),
    }
}

fn check((width, height): Size) -> Result<Size, DecodeError> {
    let is_small = width.checked_mul(height).is_some_and(|pixels| pixels <= PIXELS_MAX);
    if is_small { Ok((width, height)) } else { Err(DecodeError::TooLarge { width, height }) }
}

fn jpeg(encoded: &[u8], pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    let failed = |error| DecodeError::damaged("JPEG", error);
    let options = DecoderOptions::new_fast()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(encoded), options);
    decoder.decode_headers().map_err(failed)?;
    let Some(info) = decoder.info() else { return Err(DecodeError::damaged("JPEG", "it has no header")) };
    let (width, height) = check((info.width.into(), info.height.into()))?;
    pixels.clear();
    pixels.resize(width * height * CHANNELS, 0);
    decoder.decode_into(pixels).map_err(failed)?;
    Ok((width, height))
}

fn png(encoded: &[u8], pixels: &mut Vec<u8>) -> Result<Size, DecodeError> {
    let failed = |error| DecodeError::damaged("PNG", error);
    let mut decoder = png::Decoder::new(Cursor::new(encoded));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(failed)?;
    let side = |side: u32| usize::try_from(side).unwrap_or(usize::MAX);
    let (width, height) = check((side(reader.info().width), side(reader.info().height)))?;
    let (color, _) = reader.output_color_type();
    let Some(len) = reader.output_buffer_size() else { return Err(DecodeError::TooLarge { width, height }) };
    let mut frame = vec![0; len];
    reader.next_frame(&mut frame).map_err(failed)?;
    // Reads on to the end, so that a file that was cut off behind its picture is found.
    reader.finish().map_err(failed)?;
    pixels.clear();
    match color {
        ColorType::Rgb => *pixels = frame,
        ColorType::Rgba => pixels.extend(frame.chunks_exact(4).flat_map(|pixel| &pixel[..CHANNELS])),
        ColorType::Grayscale => pixels.extend(frame.iter().flat_map(|&gray| [gray; CHANNELS])),
        ColorType::GrayscaleAlpha => pixels.extend(frame.chunks_exact(2).flat_map(|pixel| [pixel[0]; CHANNELS])),
        ColorType::Indexed => return Err(DecodeError::damaged("PNG", "its palette was not applied")),
    }
    Ok((width, height))
}
