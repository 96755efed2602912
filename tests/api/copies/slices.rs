//! Slices of a buffer: casts to elements, and indexing of pinned slices.

use crate::fixture::heap;

#[test]
fn a_cast_that_does_not_fit_names_length_size_and_alignment() {
    let mut buf = heap().build().unwrap().get(10).unwrap();
    assert_eq!(buf.wait_slice_as_mut::<u16>().unwrap().len(), 5);
    let error = buf.wait_slice_as_mut::<f64>().unwrap_err();
    assert!(error.is_invalid_request(), "{error}");
    for part in ["10B", "f64", "elements have 8B", "alignment 8"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert!(buf.wait_slice_as::<()>().unwrap_err().is_invalid_request(), "an element has at least a byte");
    buf.truncate(8);
    assert_eq!(buf.wait_slice_as::<f64>().unwrap().len(), 1);
}

#[test]
fn a_pinned_slice_is_indexed_as_a_plain_one() {
    let mut buf = heap().build().unwrap().get(4).unwrap();
    let bytes = buf.wait_slice_mut().unwrap();
    bytes.copy_from_slice(&[1, 2, 3, 4]);
    bytes[1] = 9;
    bytes[2..].fill(7);
    bytes[..=0][0] += 1;
    assert_eq!(*bytes, [2, 9, 7, 7]);
    AsMut::<[u8]>::as_mut(bytes).iter_mut().for_each(|byte| *byte -= 1);
    assert_eq!((&*bytes).into_iter().collect::<Vec<_>>(), [&1, &8, &6, &6]);
}
