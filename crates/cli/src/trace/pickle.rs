//! JSON values in Python's pickle encoding, protocol 2: objects, arrays, texts and whole numbers.

use std::io::{self, Write};

use serde_json::Value;

/// Writes the value as a whole pickle.
pub(super) fn write(value: &Value, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"\x80\x02")?;
    write_part(value, out)?;
    out.write_all(b".")
}

fn write_part(value: &Value, out: &mut dyn Write) -> io::Result<()> {
    match value {
        Value::String(text) => write_text(text, out),
        Value::Array(values) => {
            out.write_all(b"](")?;
            values.iter().try_for_each(|value| write_part(value, out))?;
            out.write_all(b"e")
        }
        Value::Object(entries) => {
            out.write_all(b"}(")?;
            for (name, value) in entries {
                write_text(name, out)?;
                write_part(value, out)?;
            }
            out.write_all(b"u")
        }
        number => write_number(number.as_u64().unwrap_or(0), out),
    }
}

fn write_number(number: u64, out: &mut dyn Write) -> io::Result<()> {
    if let Ok(small) = i32::try_from(number) {
        out.write_all(b"J")?;
        return out.write_all(&small.to_le_bytes());
    }
    // LONG1 of eight bytes: memory_viz cannot calculate with longer numbers. The ninth byte keeps larger numbers above 0.
    let signed = i64::try_from(number).is_err();
    out.write_all(if signed { b"\x8a\x09" } else { b"\x8a\x08" })?;
    out.write_all(&number.to_le_bytes())?;
    out.write_all(&[0][..usize::from(signed)])
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
        let mut bytes = Vec::new();
        write(&serde_json::json!({ "a": 7, "b": [u64::MAX, "x", 0x7f00_1234_0000_u64] }), &mut bytes).unwrap();
        let expected: &[u8] = b"\x80\x02}(X\x01\0\0\0aJ\x07\0\0\0X\x01\0\0\0b](\
              \x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0X\x01\0\0\0x\x8a\x08\0\0\x34\x12\0\x7f\0\0eu.";
        assert_eq!(bytes, expected);
    }
}
