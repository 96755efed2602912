//! Values in Python's pickle encoding, protocol 2: dictionaries with text keys, lists, texts and whole numbers.

use std::io::{self, Write};

/// A value.
#[derive(Debug)]
pub(super) enum Pickle {
    Number(u64),
    Text(String),
    List(Vec<Pickle>),
    Dictionary(Vec<(&'static str, Pickle)>),
}

impl From<u64> for Pickle {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Pickle {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Pickle {
    /// Writes the value as a whole pickle.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"\x80\x02")?;
        self.write_part(out)?;
        out.write_all(b".")
    }

    fn write_part(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Number(number) => match i32::try_from(*number) {
                Ok(small) => {
                    out.write_all(b"J")?;
                    out.write_all(&small.to_le_bytes())
                }
                // LONG1 of eight bytes, which memory_viz reads as a number; one of nine is another kind there, with which it cannot
                // calculate. The last byte keeps a larger number above 0.
                Err(_) => {
                    let bytes = number.to_le_bytes();
                    let last: &[u8] = if i64::try_from(*number).is_ok() { &[] } else { &[0] };
                    out.write_all(if last.is_empty() { b"\x8a\x08" } else { b"\x8a\x09" })?;
                    out.write_all(&bytes)?;
                    out.write_all(last)
                }
            },
            Self::Text(text) => write_text(text, out),
            Self::List(values) => {
                out.write_all(b"](")?;
                values.iter().try_for_each(|value| value.write_part(out))?;
                out.write_all(b"e")
            }
            Self::Dictionary(entries) => {
                out.write_all(b"}(")?;
                for (name, value) in entries {
                    write_text(name, out)?;
                    value.write_part(out)?;
                }
                out.write_all(b"u")
            }
        }
    }
}

fn write_text(text: &str, out: &mut dyn Write) -> io::Result<()> {
    let len = u32::try_from(text.len()).map_err(io::Error::other)?;
    out.write_all(b"X")?;
    out.write_all(&len.to_le_bytes())?;
    out.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_codes_of_protocol_two() {
        let value = Pickle::Dictionary(vec![("a", 7.into()), ("b", Pickle::List(vec![u64::MAX.into(), "x".into()]))]);
        let mut bytes = Vec::new();
        value.write(&mut bytes).unwrap();
        let expected: &[u8] =
            b"\x80\x02}(X\x01\0\0\0aJ\x07\0\0\0X\x01\0\0\0b](\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0X\x01\0\0\0xeu.";
        assert_eq!(bytes, expected);
        let mut address = Vec::new();
        Pickle::from(0x7f00_1234_0000).write(&mut address).unwrap();
        assert_eq!(address, b"\x80\x02\x8a\x08\0\0\x34\x12\0\x7f\0\0.");
    }
}
