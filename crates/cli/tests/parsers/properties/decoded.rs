//! Files that a loader decodes: each is decoded into its place, or refused.

use pinpool_loader::{Decode as _, Fit, ImageDecoder, Layout};

/// Data of an image.
pub(crate) fn decoders(data: &[u8]) {
    let image = ImageDecoder::new(2, 2, Layout::Chw, Fit::Crop).expect("a size of images").max_pixels(1 << 20);
    let mut pixels = [0; 12];
    let _ = image.decode(data, &mut pixels);
}
