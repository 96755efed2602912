//! The memory that is needed to decode an image.

use pinpool_loader::{Decode as _, Fit, ImageDecoder, Layout};
use test_common::heap_use;

#[global_allocator]
static ALLOCATOR: heap_use::MeasuringAllocator = heap_use::MeasuringAllocator;

#[test]
fn decoding_a_png_takes_three_bytes_per_pixel() {
    const SIDE: u32 = 2000;
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, SIDE, SIDE);
    encoder.set_color(png::ColorType::Rgba);
    encoder.write_header().unwrap().write_image_data(&vec![7; (SIDE * SIDE * 4) as usize]).unwrap();
    let image = ImageDecoder::new(4, 4, Layout::Hwc, Fit::Stretch).unwrap();
    let mut into = vec![0; image.len_bytes()];
    let before = heap_use::start();
    image.decode(&file, &mut into).unwrap();
    let bytes = heap_use::peak() - before;
    assert_eq!(into, [7; 48]);
    let least = (SIDE * SIDE * 3) as usize;
    assert!(bytes < least + (1 << 20), "{bytes} B at one time");
}
