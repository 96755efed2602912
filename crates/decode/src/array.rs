//! An array of one shape and type, from NumPy's files.

use npyz::{NpyHeader, Order};

use crate::DecodeError;

/// Arrays of one shape and type, from `.npy` files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    shape: Vec<u64>,
    /// As the files name it: `<f4`.
    descr: String,
    len_bytes: usize,
}

impl Array {
    /// Arrays of this shape whose elements have `item_bytes` bytes and are of the type that NumPy names `descr`: `<f4` is float32.
    /// `None` if they have more bytes than memory can.
    #[must_use]
    pub fn new(shape: &[u64], descr: &str, item_bytes: usize) -> Option<Self> {
        let side = |bytes: usize, side: &u64| bytes.checked_mul(usize::try_from(*side).ok()?);
        let len_bytes = shape.iter().try_fold(item_bytes, side).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        Some(Self { shape: shape.to_vec(), descr: descr.to_owned(), len_bytes })
    }

    /// Bytes of an array.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Copies the data of a `.npy` file into `into`.
    ///
    /// # Errors
    ///
    /// [`DecodeError`]; one if `into` has another length than [`len_bytes`](Self::len_bytes).
    pub fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
        let damaged = |why: &dyn std::fmt::Display| DecodeError::damaged(".npy", why);
        let mut data = encoded;
        let header = NpyHeader::from_reader(&mut data).map_err(|error| damaged(&error))?;
        let descr = header.dtype().descr();
        let descr = descr.trim_matches('\'');
        // Of one dimension both orders are the same.
        let is_in_order = header.order() == Order::C || header.shape().len() < 2;
        if header.shape() != self.shape || descr != self.descr || !is_in_order {
            let order = if is_in_order { "" } else { ", in Fortran's order" };
            return Err(DecodeError::OtherArray {
                found: format!("{:?} of {descr}{order}", header.shape()),
                expected: format!("{:?} of {}", self.shape, self.descr),
            });
        }
        if data.len() != self.len_bytes || into.len() != self.len_bytes {
            return Err(damaged(&format_args!("{} B of data where there should be {}", data.len(), self.len_bytes)));
        }
        into.copy_from_slice(data);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as NumPy writes it.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let header = format!("{header:<117}\n");
        let len = u16::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes(), data].concat()
    }

    fn decoded(array: &Array, file: &[u8]) -> Result<Vec<u8>, String> {
        let mut into = vec![0; array.len_bytes()];
        array.decode(file, &mut into).map_err(|error| error.to_string())?;
        Ok(into)
    }

    #[test]
    fn the_data_of_an_array_of_the_shape_and_type_is_copied() {
        let array = Array::new(&[2, 3], "<i2", 2).unwrap();
        let data: Vec<u8> = (0..12).collect();
        let right = "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }";
        assert_eq!(decoded(&array, &file(right, &data)).unwrap(), data);
        let scalar = Array::new(&[], "|u1", 1).unwrap();
        let zero_dimensional = file("{'descr': '|u1', 'fortran_order': False, 'shape': (), }", &[7]);
        assert_eq!(decoded(&scalar, &zero_dimensional).unwrap(), [7]);
    }

    #[test]
    fn others_are_named_and_broken_ones_are_errors() {
        let array = Array::new(&[2, 3], "<i2", 2).unwrap();
        let data = [0; 12];
        for (header, words) in [
            (
                "{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2), }",
                "the array is [3, 2] of <i2, and [2, 3] of <i2",
            ),
            ("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }", "the array is [2, 3] of <f2"),
            ("{'descr': '<i2', 'fortran_order': True, 'shape': (2, 3), }", "in Fortran's order"),
            ("{'descr': '<i2', 'fortran_order': False, 'shape': 2 }", "damaged .npy"),
            ("{", "damaged .npy"),
        ] {
            let error = decoded(&array, &file(header, &data)).unwrap_err();
            assert!(error.contains(words), "{header}: {error}");
        }
        let whole = file("{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }", &data);
        for len in 0..whole.len() {
            assert!(decoded(&array, &whole[..len]).is_err(), "{len}");
        }
        assert!(decoded(&array, &[&whole[..], &[0]].concat()).unwrap_err().contains("13 B of data"));
    }

    #[test]
    fn more_bytes_than_memory_has_are_refused() {
        assert_eq!(Array::new(&[u64::MAX, 2], "|u1", 1), None);
        assert_eq!(Array::new(&[1 << 62], "<f4", 4), None);
    }
}
