//! An image of one size.

use std::cell::RefCell;

use fast_image_resize::images::{Image as Target, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use crate::DecodeError;
use crate::pixels::{self, CHANNELS};

/// In which order the numbers of an image lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Layout {
    /// Height, width, channel: as files have them.
    #[default]
    Hwc,
    /// Channel, height, width: as most models take them.
    Chw,
}

/// How an image of another size becomes one of this size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fit {
    /// The whole image, whatever its proportions.
    #[default]
    Stretch,
    /// As much from its middle as has the proportions.
    Crop,
}

/// Images of one size, RGB with 8 bits, by a bilinear filter over all pixels that a new one covers, as Pillow's `BILINEAR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    height: u32,
    width: u32,
    layout: Layout,
    fit: Fit,
}

/// Memory of a thread for one image after the other.
#[derive(Default)]
struct Scratch {
    pixels: Vec<u8>,
    resized: Vec<u8>,
    resizer: Resizer,
}

std::thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Image {
    /// `None` if a side is 0, or there are more than [`PIXELS_MAX`](crate::PIXELS_MAX) pixels.
    #[must_use]
    pub fn new(height: u32, width: u32, layout: Layout, fit: Fit) -> Option<Self> {
        let pixels = u64::from(height) * u64::from(width);
        let fits = usize::try_from(pixels).is_ok_and(|pixels| (1..=pixels::PIXELS_MAX).contains(&pixels));
        fits.then_some(Self { height, width, layout, fit })
    }

    /// Bytes of a decoded image.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.height as usize * self.width as usize * CHANNELS
    }

    /// Decodes a JPEG or PNG file into `into`.
    ///
    /// # Errors
    ///
    /// [`DecodeError`]; what `into` holds then is not defined. One if it has another length than [`len_bytes`](Self::len_bytes).
    pub fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { pixels, resized, resizer } = scratch;
            let (width, height) = pixels::decode(encoded, pixels)?;
            let is_of_size = (width, height) == (self.width as usize, self.height as usize);
            match (self.layout, is_of_size) {
                (Layout::Hwc, false) => self.resize(resizer, pixels, (width, height), into),
                (Layout::Hwc, true) => copy(pixels, into),
                (Layout::Chw, true) => planes(pixels, into),
                (Layout::Chw, false) => {
                    resized.resize(self.len_bytes(), 0);
                    self.resize(resizer, pixels, (width, height), resized)?;
                    planes(resized, into)
                }
            }
        })
    }

    fn resize(
        &self,
        resizer: &mut Resizer,
        pixels: &[u8],
        (width, height): pixels::Size,
        into: &mut [u8],
    ) -> Result<(), DecodeError> {
        let side = |side: usize| u32::try_from(side).unwrap_or(u32::MAX);
        let source = ImageRef::new(side(width), side(height), pixels, PixelType::U8x3);
        let source = source.map_err(|error| DecodeError::damaged("image", error))?;
        let target = Target::from_slice_u8(self.width, self.height, into, PixelType::U8x3);
        let mut target = target.map_err(|error| DecodeError::damaged("image", error))?;
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).use_alpha(false);
        let options = if self.fit == Fit::Crop { options.fit_into_destination(None) } else { options };
        resizer.resize(&source, &mut target, &options).map_err(|error| DecodeError::damaged("image", error))
    }
}

fn copy(pixels: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
    check_length(pixels, into)?;
    into.copy_from_slice(pixels);
    Ok(())
}

/// One channel after the other.
fn planes(pixels: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
    check_length(pixels, into)?;
    for (channel, plane) in into.chunks_exact_mut(pixels.len() / CHANNELS).enumerate() {
        let values = pixels.chunks_exact(CHANNELS).map(|pixel| pixel[channel]);
        plane.iter_mut().zip(values).for_each(|(to, value)| *to = value);
    }
    Ok(())
}

fn check_length(pixels: &[u8], into: &[u8]) -> Result<(), DecodeError> {
    if pixels.len() == into.len() {
        return Ok(());
    }
    Err(DecodeError::damaged("image", format_args!("{} B do not fit into {} B", pixels.len(), into.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A PNG of these pixels.
    fn encoded(width: u32, height: u32, color: png::ColorType, pixels: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(color);
        encoder.write_header().unwrap().write_image_data(pixels).unwrap();
        file
    }

    fn decoded(image: Image, file: &[u8]) -> Vec<u8> {
        let mut into = vec![0xaa; image.len_bytes()];
        image.decode(file, &mut into).unwrap();
        into
    }

    #[test]
    fn an_image_of_the_size_is_taken_as_it_is_in_either_order() {
        let pixels: Vec<u8> = (0..2 * 3 * 3).collect();
        let file = encoded(3, 2, png::ColorType::Rgb, &pixels);
        let image = |layout| Image::new(2, 3, layout, Fit::Stretch).unwrap();
        assert_eq!(decoded(image(Layout::Hwc), &file), pixels);
        let planes = [[0, 3, 6, 9, 12, 15], [1, 4, 7, 10, 13, 16], [2, 5, 8, 11, 14, 17]].concat();
        assert_eq!(decoded(image(Layout::Chw), &file), planes);
    }

    #[test]
    fn gray_and_transparent_images_are_rgb() {
        let image = Image::new(1, 2, Layout::Hwc, Fit::Stretch).unwrap();
        assert_eq!(decoded(image, &encoded(2, 1, png::ColorType::Grayscale, &[7, 9])), [7, 7, 7, 9, 9, 9]);
        assert_eq!(decoded(image, &encoded(2, 1, png::ColorType::GrayscaleAlpha, &[7, 0, 9, 255])), [7, 7, 7, 9, 9, 9]);
        let transparent = encoded(2, 1, png::ColorType::Rgba, &[1, 2, 3, 0, 4, 5, 6, 128]);
        assert_eq!(decoded(image, &transparent), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_crop_takes_the_middle_and_a_stretch_all() {
        // Black, white, black: a square of the middle is white.
        let pixels: Vec<u8> = [[0; 12], [255; 12], [0; 12]].concat().repeat(4);
        let file = encoded(12, 4, png::ColorType::Rgb, &pixels);
        let image = |fit| decoded(Image::new(2, 2, Layout::Hwc, fit).unwrap(), &file);
        assert!(image(Fit::Crop).iter().all(|&value| value > 200), "{:?}", image(Fit::Crop));
        assert!(image(Fit::Stretch).iter().all(|&value| (50..200).contains(&value)), "{:?}", image(Fit::Stretch));
    }

    #[test]
    fn what_is_cut_off_changed_or_no_image_is_an_error() {
        let pixels: Vec<u8> = (0..=255).cycle().take(32 * 32 * 3).collect();
        let file = encoded(32, 32, png::ColorType::Rgb, &pixels);
        let image = Image::new(8, 8, Layout::Hwc, Fit::Stretch).unwrap();
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
    fn sizes_that_no_memory_holds_are_refused() {
        assert_eq!(Image::new(0, 5, Layout::Hwc, Fit::Crop), None);
        assert_eq!(Image::new(u32::MAX, u32::MAX, Layout::Hwc, Fit::Crop), None);
    }
}
