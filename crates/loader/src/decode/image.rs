//! Decodes images and resizes them to one size.

use std::cell::RefCell;

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer, pixels::U8x3};

use crate::decode::pixels::{self, CHANNELS};
use crate::decode::{Decode, DecodeError, damaged};

/// The order of the values of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Layout {
    /// Height, width, channel, as in files.
    #[default]
    Hwc,
    /// Channel, height, width, as most models expect.
    Chw,
}

/// The way in which an image is resized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fit {
    /// The whole image, without keeping its proportions.
    #[default]
    Stretch,
    /// The largest centered part with the right proportions.
    Crop,
}

/// Images of one size, RGB with 8 bits, resized by a bilinear filter over all covered pixels, like Pillow's `BILINEAR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageDecoder {
    height: u32,
    width: u32,
    layout: Layout,
    fit: Fit,
    max_pixels: usize,
}

/// Maximum scratch memory that a thread keeps: 22 million pixels. The memory of a larger image is freed afterwards.
const SCRATCH_BYTES_MAX: usize = 64 << 20;

/// Memory that a thread reuses for each image.
#[derive(Default)]
struct Scratch {
    pixels: Vec<u8>,
    resized: Vec<u8>,
    resizer: Resizer,
}

impl Scratch {
    fn bytes(&self) -> usize {
        self.pixels.capacity() + self.resized.capacity() + self.resizer.size_of_internal_buffers()
    }
}

std::thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl ImageDecoder {
    /// Decodes images into this size. `None` if a side is 0 or the size exceeds [`PIXELS_MAX`](crate::PIXELS_MAX) pixels.
    pub fn new(height: u32, width: u32, layout: Layout, fit: Fit) -> Option<Self> {
        let pixels = u64::from(height) * u64::from(width);
        let fits = usize::try_from(pixels).is_ok_and(|pixels| (1..=pixels::PIXELS_MAX).contains(&pixels));
        fits.then_some(Self { height, width, layout, fit, max_pixels: pixels::PIXELS_MAX })
    }

    /// Refuses encoded images of more than `most` pixels. Decoding takes 3 bytes per pixel, 4 more for an interlaced PNG,
    /// and up to 8 more for a progressive JPEG.
    pub fn max_pixels(self, most: usize) -> Self {
        Self { max_pixels: most.min(pixels::PIXELS_MAX), ..self }
    }

    fn decode_with(&self, scratch: &mut Scratch, encoded: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
        if into.len() != self.len_bytes() {
            return Err(damaged("image", format_args!("{} bytes do not fit into {}", self.len_bytes(), into.len())));
        }
        let Scratch { pixels, resized, resizer } = scratch;
        let size = pixels::decode(encoded, self.max_pixels, pixels)?;
        // The resizer copies an image that already has this size.
        if self.layout == Layout::Hwc {
            return self.resize(resizer, pixels, size, into);
        }
        resized.resize(self.len_bytes(), 0);
        self.resize(resizer, pixels, size, resized)?;
        for (channel, plane) in into.chunks_exact_mut(resized.len() / CHANNELS).enumerate() {
            let values = resized.chunks_exact(CHANNELS).map(|pixel| pixel[channel]);
            plane.iter_mut().zip(values).for_each(|(to, value)| *to = value);
        }
        Ok(())
    }

    fn resize(
        &self,
        resizer: &mut Resizer,
        pixels: &[u8],
        (width, height): pixels::Size,
        into: &mut [u8],
    ) -> Result<(), DecodeError> {
        let side = |side: usize| u32::try_from(side).unwrap_or(u32::MAX);
        let source = TypedImageRef::<U8x3>::from_buffer(side(width), side(height), pixels);
        let source = source.map_err(|error| damaged("image", error))?;
        let target = TypedImage::from_buffer(self.width, self.height, into);
        let mut target = target.map_err(|error| damaged("image", error))?;
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).use_alpha(false);
        let options = if self.fit == Fit::Crop { options.fit_into_destination(None) } else { options };
        // `resize` would compile the code of all pixel types.
        resizer.resize_typed(&source, &mut target, &options).map_err(|error| damaged("image", error))
    }
}

impl Decode for ImageDecoder {
    fn len_bytes(&self) -> usize {
        self.height as usize * self.width as usize * CHANNELS
    }

    /// Decodes a JPEG or PNG file into `into`.
    fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let decoded = self.decode_with(scratch, encoded, into);
            if scratch.bytes() > SCRATCH_BYTES_MAX {
                *scratch = Scratch::default();
            }
            decoded
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes these pixels as a PNG file.
    fn encoded(width: u32, height: u32, color: png::ColorType, pixels: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(color);
        encoder.write_header().unwrap().write_image_data(pixels).unwrap();
        file
    }

    fn decoded(image: ImageDecoder, file: &[u8]) -> Vec<u8> {
        let mut into = vec![0xaa; image.len_bytes()];
        image.decode(file, &mut into).unwrap();
        into
    }

    #[test]
    fn an_image_of_the_right_size_is_copied_in_either_layout() {
        let pixels: Vec<u8> = (0..2 * 3 * 3).collect();
        let file = encoded(3, 2, png::ColorType::Rgb, &pixels);
        let image = |layout| ImageDecoder::new(2, 3, layout, Fit::Stretch).unwrap();
        assert_eq!(decoded(image(Layout::Hwc), &file), pixels);
        let planes = [[0, 3, 6, 9, 12, 15], [1, 4, 7, 10, 13, 16], [2, 5, 8, 11, 14, 17]].concat();
        assert_eq!(decoded(image(Layout::Chw), &file), planes);
    }

    #[test]
    fn gray_and_transparent_images_are_rgb() {
        let image = ImageDecoder::new(1, 2, Layout::Hwc, Fit::Stretch).unwrap();
        assert_eq!(decoded(image, &encoded(2, 1, png::ColorType::Grayscale, &[7, 9])), [7, 7, 7, 9, 9, 9]);
        assert_eq!(decoded(image, &encoded(2, 1, png::ColorType::GrayscaleAlpha, &[7, 0, 9, 255])), [7, 7, 7, 9, 9, 9]);
        let transparent = encoded(2, 1, png::ColorType::Rgba, &[1, 2, 3, 0, 4, 5, 6, 128]);
        assert_eq!(decoded(image, &transparent), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_crop_takes_the_middle_and_a_stretch_all() {
        // Black, white, black: a square of the middle is white.
        let file = encoded(12, 4, png::ColorType::Rgb, &[[0; 12], [255; 12], [0; 12]].concat().repeat(4));
        let image = |fit| decoded(ImageDecoder::new(2, 2, Layout::Hwc, fit).unwrap(), &file);
        assert!(image(Fit::Crop).iter().all(|&value| value > 200), "{:?}", image(Fit::Crop));
        assert!(image(Fit::Stretch).iter().all(|&value| (50..200).contains(&value)), "{:?}", image(Fit::Stretch));
    }

    #[test]
    fn truncated_changed_and_foreign_files_are_errors() {
        let pixels: Vec<u8> = (0..=255).cycle().take(32 * 32 * 3).collect();
        let file = encoded(32, 32, png::ColorType::Rgb, &pixels);
        let image = ImageDecoder::new(8, 8, Layout::Hwc, Fit::Stretch).unwrap();
        let mut into = vec![0; image.len_bytes()];
        for len in 0..file.len() - 12 {
            assert!(image.decode(&file[..len], &mut into).is_err(), "{len} of {}", file.len());
        }
        let mut changed = file.clone();
        changed[60] ^= 1;
        assert!(image.decode(&changed, &mut into).is_err());
        let error = image.decode(b"GIF89a", &mut into).unwrap_err();
        assert_eq!(error.to_string(), "neither a JPEG nor a PNG image: it begins with [47, 49, 46, 38]");
        assert!(image.decode(&file, &mut into[1..]).is_err());
    }

    #[test]
    fn scratch_of_a_large_image_is_freed_and_of_a_small_one_kept() {
        let image = ImageDecoder::new(1, 1, Layout::Hwc, Fit::Stretch).unwrap();
        // 75 MB of pixels, in a file of some KB.
        assert_eq!(decoded(image, &encoded(5000, 5000, png::ColorType::Grayscale, &vec![7; 25_000_000])), [7; 3]);
        assert_eq!(SCRATCH.with_borrow(Scratch::bytes), 0);
        assert_eq!(decoded(image, &encoded(500, 500, png::ColorType::Grayscale, &vec![7; 250_000])), [7; 3]);
        assert!(SCRATCH.with_borrow(Scratch::bytes) >= 750_000);
    }

    #[test]
    fn interlaced_images_decode_to_the_same_pixels() {
        // 3 x 2 gray pixels in the seven passes of Adam7: (0, 0); (2, 0); (1, 0); then the second row.
        let header = [0, 0, 0, 3, 0, 0, 0, 2, 8, 0, 0, 0, 1];
        let passes = [0, 10, 0, 12, 0, 11, 0, 13, 14, 15];
        let mut data = vec![0x78, 0x01, 0x01, 10, 0, !10, 0xff];
        data.extend(passes);
        data.extend(adler32(&passes).to_be_bytes());
        let chunks = [(b"IHDR", &header[..]), (b"IDAT", &data), (b"IEND", &[])];
        let file = chunks.iter().fold(b"\x89PNG\r\n\x1a\n".to_vec(), |mut file, (name, data)| {
            let len = u32::try_from(data.len()).unwrap().to_be_bytes();
            let named = [&name[..], data].concat();
            file.extend(len.iter().chain(&named).chain(&crc32(&named).to_be_bytes()));
            file
        });
        let image = ImageDecoder::new(2, 3, Layout::Hwc, Fit::Stretch).unwrap();
        let expected = decoded(image, &encoded(3, 2, png::ColorType::Grayscale, &[10, 11, 12, 13, 14, 15]));
        assert_eq!(decoded(image, &file), expected);
    }

    fn adler32(bytes: &[u8]) -> u32 {
        let (a, b) = bytes
            .iter()
            .fold((1, 0), |(a, b), &byte| ((a + u32::from(byte)) % 65521, (b + a + u32::from(byte)) % 65521));
        b << 16 | a
    }

    fn crc32(bytes: &[u8]) -> u32 {
        let bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), bit))
    }

    #[test]
    fn an_image_over_the_limit_is_refused_with_the_limit() {
        let image = ImageDecoder::new(1, 1, Layout::Hwc, Fit::Stretch).unwrap();
        let file = encoded(20, 10, png::ColorType::Grayscale, &[7; 200]);
        assert_eq!(decoded(image.max_pixels(200), &file), [7; 3]);
        let text = "an image of 20 x 10 pixels: the limit is 199 (max_pixels, up to 178956970); raise it, or leave the file out";
        assert_eq!(image.max_pixels(199).decode(&file, &mut [0; 3]).unwrap_err().to_string(), text);
        assert_eq!(image.max_pixels(usize::MAX), image, "never above the most that any image may have");
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert_eq!(ImageDecoder::new(0, 5, Layout::Hwc, Fit::Crop), None);
        assert_eq!(ImageDecoder::new(u32::MAX, u32::MAX, Layout::Hwc, Fit::Crop), None);
    }
}
