//! The two messages of the pool, and the prefixes that TensorFlow's versions and pinpool print before them.
//!
//! A message may stand anywhere in a line, behind a progress bar or another message, and may be wrapped over several lines.
//! One that was cut off, or whose figures are no longer those that were printed, is counted, and nothing of it is used.

use std::collections::HashSet;
use std::io;
use std::sync::LazyLock;

use regex::bytes::{Captures, Regex};

use super::origin::Origins;
use super::text::{Piece, Pieces};
use crate::files::why;

/// The pool raises its limit while both rates are above this (`kTolerable`).
pub(super) const TOLERABLE_RATE: f64 = 2e-3;
/// A limit below this rises to it at once.
const LEAST_RAISED_LIMIT: u64 = 100;

/// The limit that a raise from `limit` gives.
pub(super) fn raised(limit: u64) -> u64 {
    if limit < LEAST_RAISED_LIMIT { LEAST_RAISED_LIMIT } else { limit.saturating_add(limit / 10) }
}

/// A message is wrapped over at most this many pieces.
const LONGEST_WRAP: usize = 6;
/// A line of a container is put together up to so many bytes.
const LONGEST_LINE_BYTES: usize = 1 << 20;
/// More messages than any program prints. A file that was made to fill the memory has more.
const MOST_MESSAGES: usize = 200_000;

/// The time, the severity and the place in the source, where there are any.
const PREFIX: &str = r"(?-u)(?:(?:\[?(?<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?)Z?:?\s+)?[A-Z]+\s+(?:\S*pool_allocator\.cc:(?<at>\d+)|\S+?)\]\s*)?";
const AFTER: &str = r"PoolAllocator:\s*After\s+(?<get>\d*)\s*get\s+requests,\s*put_count=(?<put>\d+)\s+evicted_count=(?<evicted>\d+)\s+eviction_rate=(?<evicting>[-+.\da-z]+)\s+and\s+unsatisfied\s+allocation\s+rate=(?<missing>-?(?:nan|inf|[.\d]+(?:e[-+]?\d+)?))";
const RAISE: &str = r"Raising\s+pool_size_limit_\s+from\s+(?<from>\d+)\s+to\s+(?<to>\d+)";
/// Searched for first: these words are found much faster than a whole message.
const BEGINNING: &str = r"(?-u)PoolAllocator:\s*After\b|Raising\s+pool_size_limit_";

/// What terminals and web pages put into a line: colours, blanks and dashes of their own.
const DECORATION: &str = r"(?-u)\x1b\[[0-9;?]*[ -/]*[@-~]|&nbsp;|\xc2\xa0|\xe2\x80\x93|\xe2\x88\x92";

/// What containerd writes before a line, or before a part of one (`P`).
const CONTAINER: &str = r"(?-u)^\d{4}-\d\d-\d\dT\S+ std(?:out|err) (?<part>[PF]) ";

static CONTAINERS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(CONTAINER).ok());
static DECORATIONS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(DECORATION).ok());
static WHOLE: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(&format!("{PREFIX}(?:{AFTER}|{RAISE})")).ok());
static BEGUN: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(BEGINNING).ok());

/// One message with what its prefix tells.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Message {
    /// Where it begins, from 1.
    pub(super) line: u64,
    /// The time as printed; `None` without a prefix, or in a version that printed none.
    pub(super) time: Option<String>,
    /// The process that it is of, as a launcher names it before the line.
    pub(super) origin: Option<String>,
    pub(super) figures: Figures,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Figures {
    After(Counters),
    Raise { from: u64, to: u64 },
}

/// The figures of `PoolAllocator: After ...`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Counters {
    /// `None` if the log has lost it.
    pub(super) get: Option<u64>,
    pub(super) put: u64,
    pub(super) evicted: u64,
    /// The rate as printed, with six significant digits; not finite where TensorFlow divided by 0.
    pub(super) eviction_rate: f64,
    pub(super) unsatisfied_rate: f64,
}

/// What a log holds.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) messages: Vec<Message>,
    pub(super) lines: u64,
    /// Messages that begin and do not end, or whose figures are damaged.
    pub(super) cut: u64,
    /// Why the log was not read to its end, and where.
    pub(super) stopped: Option<String>,
    /// The line of TensorFlow's source that the first prefix names.
    source_line: Option<u32>,
}

impl Found {
    /// The versions of TensorFlow that print from that line of their source.
    pub(super) fn tensorflow(&self) -> Option<&'static str> {
        match self.source_line? {
            227 | 239 => Some("0.5"),
            242 | 254 => Some("0.6"),
            243 | 255 => Some("of early 2016"),
            244 | 256 => Some("0.7 to 0.10"),
            245 | 257 => Some("0.11"),
            247 | 259 => Some("0.12 to 1.x"),
            _ => None,
        }
    }
}

/// Finds all messages.
///
/// # Errors
///
/// If the patterns do not compile. What ends the log too early is [`Found::stopped`].
pub(super) fn find(mut pieces: Pieces<impl io::Read>) -> io::Result<Found> {
    let (Some(whole), Some(begun), Some(origins), Some(decorations), Some(containers)) =
        (&*WHOLE, &*BEGUN, Origins::new(), &*DECORATIONS, &*CONTAINERS)
    else {
        return Err(io::Error::other("the patterns of this command do not compile"));
    };
    let mut finder =
        Finder { whole, begun, origins, decorations, containers, found: Found::default(), open: None, part: None };
    let stopped = loop {
        match pieces.next() {
            Ok(Some(piece)) => finder.search(piece),
            Ok(None) => break None,
            Err(error) => break Some(format!("read up to line {} only: {}", pieces.lines(), why(&error))),
        }
        if finder.found.messages.len() >= MOST_MESSAGES {
            let line = pieces.lines();
            break Some(format!(
                "read up to line {line} only: {MOST_MESSAGES} diagnostics are the most that are read of a log; split it \
                 (`split -l {line} FILE`)"
            ));
        }
    };
    finder.cut_off();
    let mut found = finder.found;
    forget_numbers(&mut found.messages);
    Ok(Found { lines: pieces.lines(), stopped, ..found })
}

/// What differs from line to line is a number of the line, and names no process. What stands in brackets is none.
fn forget_numbers(messages: &mut [Message]) {
    let origins = messages.iter().filter_map(|message| message.origin.as_deref());
    let origins: HashSet<_> = origins.filter(|origin| !origin.starts_with(['[', '('])).collect();
    if origins.len() * 2 > messages.len() {
        messages.iter_mut().for_each(|message| message.origin = None);
    }
}

struct Finder<'a> {
    whole: &'a Regex,
    begun: &'a Regex,
    origins: Origins,
    decorations: &'a Regex,
    containers: &'a Regex,
    found: Found,
    open: Option<Open>,
    /// The first parts of a line of a container, and where it began.
    part: Option<(u64, Vec<u8>)>,
}

/// A message that has begun and not ended.
struct Open {
    line: u64,
    origin: Option<String>,
    pieces: Vec<Vec<u8>>,
}

impl Finder<'_> {
    fn search(&mut self, piece: Piece) {
        let Some(Piece { line, bytes }) = self.whole_line(piece) else { return };
        if bytes.is_empty() && self.open.is_none() {
            return;
        }
        let bytes = self.undecorated(bytes);
        self.origins.note_head(&bytes);
        let used = self.close(&bytes);
        if self.open.is_some() {
            return;
        }
        let mut rest = &bytes[used..];
        let (whole, begun) = (self.whole, self.begun);
        if !begun.is_match(rest) {
            return;
        }
        let origin = self.origins.of(&bytes);
        while let Some(captures) = whole.captures(rest) {
            let range = captures.get_match().range();
            self.found.cut += begun.find_iter(&rest[..range.start]).count() as u64;
            self.keep(&captures, line, origin.clone(), &rest[range.end..]);
            rest = &rest[range.end..];
        }
        for _ in begun.find_iter(rest) {
            self.cut_off();
            self.open = Some(Open { line, origin: origin.clone(), pieces: vec![rest.to_vec()] });
        }
    }

    /// The line of a container behind its last part; other pieces as they are.
    fn whole_line(&mut self, Piece { line, bytes }: Piece) -> Option<Piece> {
        let Some(captures) = self.containers.captures(&bytes) else { return Some(Piece { line, bytes }) };
        let is_part = captures.name("part").is_some_and(|part| part.as_bytes() == b"P");
        let text = &bytes[captures.get_match().end()..];
        let (line, before) = self.part.take().unwrap_or((line, Vec::new()));
        let whole = [before.as_slice(), text].concat();
        if is_part && whole.len() <= LONGEST_LINE_BYTES {
            self.part = Some((line, whole));
            return None;
        }
        Some(Piece { line, bytes: whole })
    }

    /// The text without colours, with plain blanks and dashes.
    fn undecorated(&self, bytes: Vec<u8>) -> Vec<u8> {
        // Few logs have any, and looking for these bytes is fast.
        if !bytes.iter().any(|byte| matches!(byte, 0x1b | b'&' | 0xc2 | 0xe2)) {
            return bytes;
        }
        let plain = |found: &Captures<'_>| match found.get_match().as_bytes() {
            [0x1b, ..] => Vec::new(),
            [0xe2, ..] => vec![b'-'],
            _ => vec![b' '],
        };
        self.decorations.replace_all(&bytes, plain).into_owned()
    }

    /// Looks whether `bytes` ends the open message; returns how many of them did.
    fn close(&mut self, bytes: &[u8]) -> usize {
        let Some(mut open) = self.open.take() else { return 0 };
        open.pieces.push(bytes.to_vec());
        // A line is wrapped between two words, or within one.
        for separator in [b" ".as_slice(), b""] {
            let text = open.pieces.join(separator);
            let before = text.len() - bytes.len();
            let Some(captures) = self.whole.captures(&text).filter(|captures| captures.get_match().start() < before)
            else {
                continue;
            };
            self.keep(&captures, open.line, open.origin.take(), &text[captures.get_match().end()..]);
            return bytes.len() - (text.len() - captures.get_match().end()).min(bytes.len());
        }
        self.open = Some(open);
        // Another message, or too much other text.
        if self.begun.is_match(bytes) || self.open.as_ref().is_some_and(|open| open.pieces.len() > LONGEST_WRAP) {
            self.cut_off();
        }
        0
    }

    fn cut_off(&mut self) {
        self.found.cut += u64::from(self.open.take().is_some());
    }

    /// `behind` follows the message.
    fn keep(&mut self, captures: &Captures<'_>, line: u64, origin: Option<String>, behind: &[u8]) {
        // ASCII, by the pattern.
        let text = |name| captures.name(name).and_then(|found| std::str::from_utf8(found.as_bytes()).ok());
        let Some(figures) = figures(text).filter(|_| !continues_number(behind)) else {
            self.found.cut += 1;
            return;
        };
        self.found.source_line = self.found.source_line.or_else(|| text("at")?.parse().ok());
        self.found.messages.push(Message { line, time: text("time").map(str::to_owned), origin, figures });
    }
}

/// Whether what follows a figure is more of a number, such as the rest of a progress bar that was written over its end.
fn continues_number(behind: &[u8]) -> bool {
    match behind {
        [b'/' | b'%', ..] => true,
        [b'.' | b',' | b':', next, ..] => next.is_ascii_digit(),
        _ => false,
    }
}

/// `None` if a figure is one that no pool prints: the log has lost or added some of its digits.
fn figures<'a>(text: impl Fn(&'static str) -> Option<&'a str>) -> Option<Figures> {
    let count = |name| text(name)?.parse::<u64>().ok();
    // Not finite where TensorFlow divided by 0.
    let is_rate = |rate: &f64| !rate.is_finite() || (0.0..=1.0).contains(rate);
    let rate = |name| text(name).filter(|text| !text.ends_with('.'))?.parse::<f64>().ok().filter(is_rate);
    if text("from").is_some() {
        let (from, to) = (count("from")?, count("to")?);
        return (to == raised(from)).then_some(Figures::Raise { from, to });
    }
    let get = match text("get")? {
        "" => None,
        get => Some(get.parse().ok()?),
    };
    Some(Figures::After(Counters {
        get,
        put: count("put")?,
        evicted: count("evicted")?,
        eviction_rate: rate("evicting")?,
        unsatisfied_rate: rate("missing")?,
    }))
}
