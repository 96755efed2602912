//! Files that a loader decodes: each is decoded into its place, or refused.

use pinpool_loader::{Array, Decode as _, Fit, Image, Layout};

/// Data of an array, or an image.
pub(crate) fn decoders(data: &[u8]) {
    let image = Image::new(2, 2, Layout::Chw, Fit::Crop).expect("a size of images").pixels_max(1 << 20);
    let mut pixels = [0; 12];
    let _ = image.decode(data, &mut pixels);
    let array = Array::new(&[2, 3], "<f4", 4).expect("a size of arrays");
    let mut values = [0; 24];
    if array.decode(data, &mut values).is_ok() {
        assert_eq!(Some(&values[..]), data.get(data.len() - 24..), "the data is the end of the file");
    }
}
