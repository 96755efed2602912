//! The parts of the two messages, and how lines continue each other.
//!
//! Blanks are ignored, because a message may be wrapped between two words, within a word, or within a number.

use Part::{Count, Rate, Word};

/// Part of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Word(&'static str),
    Count,
    Rate,
}

pub(super) type Parts = &'static [Part];

/// `PoolAllocator: After ...`
pub(super) const AFTER: Parts = &[
    Word("PoolAllocator:After"),
    Count,
    Word("getrequests,put_count="),
    Count,
    Word("evicted_count="),
    Count,
    Word("eviction_rate="),
    Rate,
    Word("andunsatisfiedallocationrate="),
    Rate,
];
/// `Raising pool_size_limit_ from ...`
pub(super) const RAISE: Parts = &[Word("Raisingpool_size_limit_from"), Count, Word("to"), Count];
/// A message has certainly begun after this many letters. Fewer letters may be the beginning of another text.
pub(super) const FIRST_LETTERS: usize = 19;

/// Blanks that separate a column from the text on its left.
const COLUMN: &[u8] = b"  ";
/// Maximum number of letters that two words may share by chance.
const ALIKE: usize = 3;

/// The part of a text that matches a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Match<'a> {
    /// The position after the last byte of the text that belongs to the message.
    pub(super) end: usize,
    /// Number of matched letters in the message's words.
    pub(super) letters: usize,
    pub(super) numbers: Vec<&'a [u8]>,
    /// Whether all parts were found. The last number may still continue in the next line.
    pub(super) is_whole: bool,
}

/// Matches `text` with the beginning of a message.
pub(super) fn follow<'a>(parts: Parts, text: &'a [u8]) -> Match<'a> {
    let mut found = Match { end: 0, letters: 0, numbers: Vec::new(), is_whole: false };
    for part in parts {
        let Word(word) = part else {
            let start = found.end + blanks(&text[found.end..]);
            let end = start + number_bytes(part, &text[start..]);
            found.numbers.push(&text[start..end]);
            found.end = if end > start { end } else { found.end };
            continue;
        };
        let mut column = None;
        for letter in word.bytes() {
            let next = found.end + blanks(&text[found.end..]);
            if next - found.end >= COLUMN.len() {
                column = Some((found.end, found.letters));
            }
            if text.get(next) != Some(&letter) {
                // A column may begin with letters that continue the word.
                let column = column.filter(|(_, letters)| next < text.len() && found.letters - letters <= ALIKE);
                (found.end, found.letters) = column.unwrap_or((found.end, found.letters));
                return found;
            }
            (found.end, found.letters) = (next + 1, found.letters + 1);
            // Quoted-printable encoding (`=3D`), perhaps with a soft line end (`=`) before it.
            let is_mail = |rest: &[u8]| letter == b'=' && (rest.starts_with(b"3D") || rest.starts_with(b"="));
            while is_mail(&text[found.end..]) {
                found.end += if text[found.end] == b'=' { 1 } else { 2 };
            }
        }
    }
    found.is_whole = found.numbers.last().is_some_and(|last| !last.is_empty());
    found
}

fn blanks(text: &[u8]) -> usize {
    text.len() - text.trim_ascii_start().len()
}

/// Returns the length of the number at the start of `text`.
fn number_bytes(part: &Part, text: &[u8]) -> usize {
    let run = |from: usize, of: fn(&u8) -> bool| from + text[from..].iter().take_while(|byte| of(byte)).count();
    if *part == Count {
        return run(0, u8::is_ascii_digit);
    }
    let sign = usize::from(text.first().is_some_and(|byte| matches!(byte, b'-' | b'+')));
    if [b"nan".as_slice(), b"inf"].iter().any(|word| text[sign..].starts_with(word)) {
        return sign + 3;
    }
    let digits = run(sign, |byte| matches!(byte, b'.' | b'0'..=b'9'));
    if digits == sign || text.get(digits) != Some(&b'e') {
        return if digits > sign { digits } else { 0 };
    }
    let exponent = digits + 1 + usize::from(text.get(digits + 1).is_some_and(|byte| matches!(byte, b'-' | b'+')));
    let end = run(exponent, u8::is_ascii_digit);
    // The exponent may be in the next line.
    if end > exponent || end == text.len() { end } else { digits }
}

/// Returns the length of the prefix of `next` that a log collector added. This is the beginning that `next` and `first` share,
/// except for numbers. It ends at the last separator that does not occur in a number or a word of a message.
pub(super) fn frame(first: &[u8], next: &[u8]) -> usize {
    let (mut at, mut of_next, mut end) = (0, 0, 0);
    while at < first.len() && of_next < next.len() {
        let (one, other) = (word(&first[at..]), word(&next[of_next..]));
        if !is_alike(one, other) {
            break;
        }
        (at, of_next) = (at + one.len(), of_next + other.len());
        let is_separator = !other[0].is_ascii_alphanumeric() && !b"._-".contains(&other[0]);
        end = if is_separator { of_next } else { end };
    }
    end
}

/// Returns the first word of `text`: letters and digits, blanks, or one other byte.
fn word(text: &[u8]) -> &[u8] {
    let is_blank = |byte: &u8| *byte == text[0] && byte.is_ascii_whitespace();
    let blanks = text.iter().take_while(|byte| is_blank(byte)).count();
    &text[..text.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count().max(blanks).max(1)]
}

/// Returns whether two words differ only in their numbers, or are two long hexadecimal numbers.
fn is_alike(one: &[u8], other: &[u8]) -> bool {
    /// Shorter words with a digit do not count as hexadecimal numbers.
    const HEXADECIMAL: usize = 8;
    let shape = |word: &[u8]| {
        let mut shape: Vec<u8> = word.iter().map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect();
        shape.dedup_by(|one, other| one == other && matches!(one, b'0' | b' ' | b'\t'));
        shape
    };
    let is_number = |word: &[u8]| word.len() >= HEXADECIMAL && word.iter().any(u8::is_ascii_digit);
    shape(one) == shape(other) || (one.len() == other.len() && is_number(one) && is_number(other))
}

/// Returns whether both texts end identically, except for numbers.
pub(super) fn ends_alike(tail: &[u8], next: &[u8]) -> bool {
    let (tail, next) = (tail.trim_ascii(), next.trim_ascii_end());
    let reversed = |text: &[u8]| text.iter().rev().copied().collect::<Vec<_>>();
    let (tail, next) = (reversed(tail), reversed(&next[next.len().saturating_sub(2 * tail.len())..]));
    frame(&next, &tail) == tail.len()
}

/// Returns whether `rest`, after a part of a message, is only the end of a line: blanks, a border, the end of a string, markup,
/// or a separate column far to the right.
pub(super) fn is_line_end(rest: &[u8]) -> bool {
    const TAG_MAX: usize = 64;
    let mut at = 0;
    while let Some(&byte) = rest.get(at) {
        at += match byte {
            b'\\' => 2,
            b'<' => rest[at..].iter().take(TAG_MAX).position(|byte| *byte == b'>').map_or(1, |end| end + 1),
            _ if byte.is_ascii_alphanumeric() => return rest.starts_with(COLUMN),
            _ => 1,
        };
    }
    true
}

/// Maximum number of printed digits in a rate.
pub(super) const RATE_DIGITS: usize = 6;

/// Returns the number of significant digits of the rate at the end of `text`; `None` if the rate is not valid.
pub(super) fn rate_digits(text: &[u8]) -> Option<usize> {
    let number = text.rsplit(|byte| *byte == b'=').next().unwrap_or_default();
    let digits = number.iter().skip_while(|byte| !matches!(byte, b'1'..=b'9')).take_while(|byte| **byte != b'e');
    let digits = digits.filter(|byte| byte.is_ascii_digit()).count();
    (digits <= RATE_DIGITS && !matches!(number, [b'0', b'0'..=b'9', ..])).then_some(digits)
}
