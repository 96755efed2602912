//! An array of one shape and type, from NumPy's files.

use super::{Decode, DecodeError, damaged};

/// Longest header, as in NumPy.
const HEADER_BYTES_MAX: usize = 10_000;

/// Arrays of one shape and type, from `.npy` files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    shape: Vec<u64>,
    /// As the files name it: `<f4`.
    descr: String,
    len_bytes: usize,
}

impl Array {
    /// Arrays of this shape with elements of `item_bytes` bytes and the NumPy type `descr`: `<f4` is float32.
    /// `None` if they have more bytes than memory can.
    #[must_use]
    pub fn new(shape: &[u64], descr: &str, item_bytes: usize) -> Option<Self> {
        let side = |bytes: usize, side: &u64| bytes.checked_mul(usize::try_from(*side).ok()?);
        let len_bytes = shape.iter().try_fold(item_bytes, side).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        Some(Self { shape: shape.to_vec(), descr: descr.to_owned(), len_bytes })
    }
}

impl Decode for Array {
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Copies the data of a `.npy` file into `into`.
    fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), DecodeError> {
        let (header, data) = Header::of(encoded).map_err(|why| damaged(".npy", why))?;
        // With one dimension, both orders are the same.
        let is_in_order = !header.is_fortran || header.shape.len() < 2;
        if header.shape != self.shape || header.descr != self.descr || !is_in_order {
            let order = if is_in_order { "" } else { ", in Fortran's order" };
            let found = format!("{:?} of {}{order}", header.shape, header.descr);
            return Err(format!("the array is {found}, and {:?} of {} was asked for", self.shape, self.descr).into());
        }
        if data.len() != self.len_bytes || into.len() != self.len_bytes {
            let why = format!("{} B of data where there should be {}", data.len(), self.len_bytes);
            return Err(damaged(".npy", why));
        }
        into.copy_from_slice(data);
        Ok(())
    }
}

/// What a file says of its data.
#[derive(Debug, Default)]
struct Header<'a> {
    descr: &'a str,
    is_fortran: bool,
    shape: Vec<u64>,
}

impl<'a> Header<'a> {
    /// The header and the data behind it.
    fn of(file: &'a [u8]) -> Result<(Self, &'a [u8]), String> {
        let rest = file.strip_prefix(b"\x93NUMPY").ok_or("it does not begin as a .npy file")?;
        let (bytes, rest) = match rest {
            [1, _, a, b, rest @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), rest),
            [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
            _ => return Err("it is truncated, or of a version above 3".to_owned()),
        };
        if bytes > HEADER_BYTES_MAX {
            return Err(format!("a header of {bytes} B; at most {HEADER_BYTES_MAX} are read"));
        }
        let (header, data) = rest.split_at_checked(bytes).ok_or("it is truncated")?;
        let header = str::from_utf8(header).ok().and_then(|header| Text(header).header());
        let header =
            header.ok_or("its header is not {'descr': 'TYPE', 'fortran_order': BOOL, 'shape': (SIDE, ...)}")?;
        Ok((header, data))
    }
}

/// A literal of Python that is read from its front. Reads each byte once and nests nothing.
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    /// The three keys in any order, each once.
    fn header(mut self) -> Option<Header<'a>> {
        let (mut descr, mut is_fortran, mut shape) = (None, None, None);
        self.take("{").then_some(())?;
        while !self.take("}") {
            let key = self.string()?;
            self.take(":").then_some(())?;
            let is_first = match key {
                "descr" => descr.replace(self.string()?).is_none(),
                "fortran_order" => is_fortran.replace(self.bool()?).is_none(),
                "shape" => shape.replace(self.tuple()?).is_none(),
                _ => false,
            };
            // Behind a value is a comma, or the end.
            if !is_first || !(self.take(",") || self.0.starts_with('}')) {
                return None;
            }
        }
        let header = Header { descr: descr?, is_fortran: is_fortran?, shape: shape? };
        self.0.is_empty().then_some(header)
    }

    /// Passes over `token` and the blanks around it.
    fn take(&mut self, token: &str) -> bool {
        let rest = self.0.trim_start().strip_prefix(token);
        self.0 = rest.unwrap_or(self.0).trim_start();
        rest.is_some()
    }

    fn string(&mut self) -> Option<&'a str> {
        let quote = if self.take("'") { '\'' } else { self.take("\"").then_some('"')? };
        let (string, rest) = self.0.split_once(quote)?;
        self.0 = rest.trim_start();
        (!string.contains('\\')).then_some(string)
    }

    fn bool(&mut self) -> Option<bool> {
        if self.take("True") { Some(true) } else { self.take("False").then_some(false) }
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        let mut sides = Vec::new();
        self.take("(").then_some(())?;
        while !self.take(")") {
            let digits = self.0.len() - self.0.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
            let (side, rest) = self.0.split_at(digits);
            self.0 = rest;
            // Python 2 wrote long numbers as `3L`.
            self.take("L");
            sides.push(side.parse().ok()?);
            if !(self.take(",") || self.0.starts_with(')')) {
                return None;
            }
        }
        Some(sides)
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

    /// A parser that backtracks takes twice as long for each level.
    #[test]
    fn nested_headers_are_refused_at_once_and_long_ones_unread() {
        let array = Array::new(&[2, 3], "<i2", 2).unwrap();
        for depth in 2..=64 {
            for (open, close) in [("[", "]"), ("{0:", "}"), ("((1,),", ")")] {
                let nested = format!("{}1{}", open.repeat(depth), close.repeat(depth));
                for header in [format!("{{'descr': {nested}, }}"), format!("{{{nested}}}"), nested] {
                    let error = decoded(&array, &file(&header, &[])).unwrap_err();
                    assert!(error.contains("damaged .npy"), "{header}: {error}");
                }
            }
        }
        let long = file(&" ".repeat(20_000), &[0; 12]);
        assert!(decoded(&array, &long).unwrap_err().contains("a header of 20001 B; at most 10000 are read"));
    }

    #[test]
    fn headers_are_read_in_each_form_that_numpy_wrote() {
        let array = Array::new(&[2, 3], "<i2", 2).unwrap();
        let data: Vec<u8> = (0..12).collect();
        let header = "{'shape': (2L, 3L), \"descr\": '<i2', 'fortran_order': False}\n";
        let len = u32::try_from(header.len()).unwrap().to_le_bytes();
        for version in [2, 3] {
            let whole = [b"\x93NUMPY", &[version, 0][..], &len, header.as_bytes(), &data].concat();
            assert_eq!(decoded(&array, &whole).unwrap(), data);
        }
        let of_one = Array::new(&[6], "<i2", 2).unwrap();
        let fortran = file("{'descr': '<i2', 'fortran_order': True, 'shape': (6,), }", &data);
        assert_eq!(decoded(&of_one, &fortran).unwrap(), data, "of one dimension both orders are the same");
        for twice in ["'descr': '<i2', 'descr': '<i2', ", "'other': 'x', "] {
            let header = format!("{{{twice}'fortran_order': False, 'shape': (2, 3), }}");
            assert!(decoded(&array, &file(&header, &data)).is_err(), "{header}");
        }
    }

    #[test]
    fn more_bytes_than_memory_has_are_refused() {
        assert_eq!(Array::new(&[u64::MAX, 2], "|u1", 1), None);
        assert_eq!(Array::new(&[1 << 62], "<f4", 4), None);
    }
}
