//! Finds the messages in the lines of a log, after the prefixes of TensorFlow's versions and of pinpool.
//!
//! A message may start anywhere in a line, after a progress bar or another message, and may be wrapped over several lines at any
//! position, including its prefix. Truncated and damaged messages are counted, and their numbers are not used.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::LazyLock;

use regex::bytes::{Captures, Regex};

use super::limits::Trust;
use super::message::{LogContent, Message, Numbers};
use super::origin::{self, Origins, compiled};
use super::parts::{self, AFTER, FIRST_LETTERS, Match, Parts, RAISE, follow, frame, is_line_end};
use crate::files::why;

/// Maximum number of lines of other text between two parts of a message.
const OTHER_LINES: usize = 3;
/// Maximum length of a message, wrapped or not.
const MESSAGE_BYTES_MAX: usize = 512;
/// Maximum length of a prefix, and maximum number of lines over which it is wrapped.
const PREFIX_BYTES_MAX: usize = 256;
const PREFIX_LINES: usize = 8;
/// A file with longer lines is not a log: a saved notebook has a line for each line of its output.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Maximum length of the part of a line that is searched for the names of its process.
const NAMES_BYTES: usize = 4 << 10;
/// Maximum number of messages; only a malicious file has more.
const MESSAGES_MAX: usize = 200_000;

/// The optional time, severity and source location.
const PREFIX: &str = r"(?:\[?(?<time>\d{4}-\d\d-\d\d[ T]?\d\d:\d\d:\d\d(?:\.\d+)?)Z?:?\s*)?[A-Z]+\s*(?:\S*pool_allocator\.cc:(?<at>\d+)|\S+?)\]\s*$";
/// Insertions of terminals, web pages and markup: colors, links, special blanks and dashes, escapes.
const DECORATION: &str = r"(?:\x1b|\\u001[bB])(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))|&nbsp;|&#\d{1,3};|\xc2\xa0|\xc2\xad|\xe2\x80\x8b|\xe2\x80\x93|\xe2\x88\x92|\\_";
/// The prefix that containerd writes before a line, and before each part of a long line.
const CONTAINER: &str = r"^\d{4}-\d\d-\d\dT\S+ std(?:out|err) [PF] ";

static CONTAINERS: LazyLock<Regex> = LazyLock::new(|| compiled(CONTAINER));
static DECORATIONS: LazyLock<Regex> = LazyLock::new(|| compiled(DECORATION));
static PREFIXES: LazyLock<Regex> = LazyLock::new(|| compiled(PREFIX));

/// Finds all messages. [`LogContent::stopped`] is set if the log was not read to its end.
pub(super) fn find(log: impl io::Read) -> LogContent {
    let (mut log, mut finder) = (BufReader::with_capacity(64 << 10, log), Finder::default());
    let mut line = Vec::new();
    let stopped = loop {
        let before = finder.found.lines;
        let read = log.by_ref().take(LINE_BYTES_MAX - line.len() as u64).read_until(b'\n', &mut line);
        let is_full = line.len() as u64 == LINE_BYTES_MAX && !line.ends_with(b"\n");
        // A progress bar overwrites its line.
        let overwritten = if is_full { line.iter().rposition(|&byte| byte == b'\r') } else { None };
        let why = match read {
            Ok(_) if line.is_empty() => break None,
            Ok(_) if is_full && overwritten.is_none() => format!(
                "line {} is longer than {} MiB, the longest line that is read; split a notebook on one line with \
                 `jq . FILE | pinpool why --lines -`",
                before + 1,
                LINE_BYTES_MAX >> 20
            ),
            Ok(_) if finder.found.messages.len() >= MESSAGES_MAX => format!(
                "{MESSAGES_MAX} messages are the most that are read from a log; split it (`split -l {before} FILE`)"
            ),
            Ok(_) => {
                finder.found.lines += u64::from(!is_full);
                let end = overwritten.map_or(line.len(), |end| end + 1);
                for piece in line.drain(..end).as_slice().split(|byte| matches!(byte, b'\n' | b'\r')) {
                    finder.search(before + 1, piece);
                }
                continue;
            }
            Err(error) => why(&error),
        };
        break Some(format!("read up to line {before} only: {why}"));
    };
    finder.close();
    let mut found = finder.found;
    origin::forget_numbers(&mut found.messages);
    LogContent { stopped, ..found }
}

#[derive(Default)]
struct Finder {
    origins: Origins,
    found: LogContent,
    /// The previous lines, for wrapped prefixes.
    recent: VecDeque<(u64, Vec<u8>)>,
    open: Option<OpenMessage>,
}

/// The prefix of a message.
struct Head {
    line: u64,
    time: Option<String>,
    /// Whether the prefix names TensorFlow's source file.
    is_tensorflow: bool,
    origin: Option<String>,
}

/// A message that may continue in the next line.
struct OpenMessage {
    head: Head,
    parts: Parts,
    /// The text of the message so far.
    text: Vec<u8>,
    /// The first line of the message, and the text after the message in its last line.
    first: Vec<u8>,
    tail: Vec<u8>,
    /// Whether this is certainly a message, and not similar text.
    is_message: bool,
    other_lines: usize,
}

impl OpenMessage {
    /// Returns the numbers of a complete message.
    fn numbers(&self) -> Option<Numbers> {
        let followed = follow(self.parts, &self.text);
        Numbers::of(&followed.numbers).filter(|_| followed.is_whole)
    }

    /// Returns the text continued by `line`, if it continues there, and the number of bytes of `line` that belong to it.
    fn extended(&self, line: &[u8]) -> Option<(Vec<u8>, usize)> {
        let is_end = is_line_end(&self.tail);
        let is_alike = |rest: &[u8]| !is_end && parts::ends_alike(&self.tail, rest);
        let starts = [frame(&self.first, line), 0].into_iter().filter(|_| is_end || is_alike(line));
        starts.map(|start| line.len() - line[start..].trim_ascii_start().len()).find_map(|start| {
            let text = [&self.text, some(&line[start..])].concat();
            let Match { end, is_whole, .. } = follow(self.parts, &text);
            let used = start + end.checked_sub(self.text.len())?;
            let continues =
                end > self.text.len() && (is_whole || is_line_end(&line[used..]) || is_alike(&line[used..]));
            continues.then(|| (text[..end].to_vec(), used))
        })
    }
}

impl Finder {
    fn search(&mut self, line: u64, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        let bytes = undecorated(&piece[CONTAINERS.find(piece).map_or(0, |prefix| prefix.end())..]);
        self.origins.record_head(&bytes);
        let text = String::from_utf8_lossy(&bytes);
        self.found.has_pinned |= text.contains("] created: ") && !text.contains(" pinned=no ");
        if let Some(diagnosis) = crate::diagnosis::from_log_line(&bytes) {
            self.found.diagnoses.insert(diagnosis.pool.clone(), diagnosis);
        }
        let mut at = self.resume(&bytes);
        while let Some(next) = bytes[at..].iter().position(|byte| matches!(byte, b'P' | b'R')) {
            at += next;
            at += self.try_at(line, &bytes, at);
        }
        if self.recent.len() >= PREFIX_LINES {
            self.recent.pop_front();
        }
        self.recent.push_back((line, if bytes.len() > PREFIX_BYTES_MAX { Vec::new() } else { bytes.into_owned() }));
    }

    /// Opens the message that starts at `at`, if there is one, and closes the previous one. Returns the number of bytes processed.
    fn try_at(&mut self, line: u64, bytes: &[u8], at: usize) -> usize {
        let (parts, text) = (if bytes[at] == b'P' { AFTER } else { RAISE }, &bytes[at..]);
        let followed = follow(parts, text);
        let (end, tail) = (followed.end, some(&text[followed.end..]));
        let has_begun = followed.letters >= FIRST_LETTERS;
        let is_likely = has_begun || followed.letters >= FIRST_LETTERS / 2;
        let is_part = is_line_end(tail) && (is_likely || self.open.is_none());
        if !has_begun && !is_part && !bytes[..at].trim_ascii_end().ends_with(b"]") {
            return 1;
        }
        let head = self.head(line, bytes, at);
        let is_message = is_likely || head.is_tensorflow;
        if followed.letters == 0 || (!has_begun && !is_part && !head.is_tensorflow) {
            return 1;
        }
        self.close();
        let (text, first, tail) = (text[..end].to_vec(), some(bytes).to_vec(), tail.to_vec());
        self.wait(OpenMessage { head, parts, text, first, tail, is_message, other_lines: 0 });
        end
    }

    /// Keeps `open` open if it may continue in the next line, and closes it otherwise.
    fn wait(&mut self, open: OpenMessage) {
        let is_whole = follow(open.parts, &open.text).is_whole;
        // A rate with fewer digits may continue, and be equally plausible.
        let is_long = open.parts == RAISE || parts::rate_digits(&open.text) == Some(parts::RATE_DIGITS);
        let is_sure = is_long && open.numbers().is_some_and(|numbers| numbers.trust() == Trust::Sure);
        self.open = Some(open);
        if is_whole && is_sure {
            self.close();
        }
    }

    /// Continues the open message in `line`. Returns the number of bytes processed.
    fn resume(&mut self, line: &[u8]) -> usize {
        let Some(mut open) = self.open.take() else { return 0 };
        let own = [(b'P', AFTER), (b'R', RAISE)].into_iter().filter_map(|(letter, parts)| {
            let mut places = (0..line.len()).filter(|&at| line[at] == letter);
            places.find(|&at| follow(parts, &line[at..]).letters >= FIRST_LETTERS)
        });
        let own = own.min().unwrap_or(line.len());
        let was = follow(open.parts, &open.text).is_whole;
        let extended = open.extended(&line[..own]).filter(|(text, used)| {
            // A number that may be complete continues only if the longer number is more plausible, or if it is equally
            // plausible and nothing follows.
            let [before, after] = [&open.text, text].map(|text| Numbers::of(&follow(open.parts, text).numbers));
            let [before, after] = [before, after].map(|numbers| numbers.map(|numbers| numbers.trust()));
            let rest = &line[*used..];
            let is_rest = is_line_end(rest) && !continues_number(rest) && parts::rate_digits(text).is_some();
            !was || (after > before && (is_rest || after == Some(Trust::Sure))) || (after == before && is_rest)
        });
        let used = match extended {
            Some((text, used)) if text.len() <= MESSAGE_BYTES_MAX => {
                (open.text, open.tail, open.other_lines) = (text, some(&line[used..]).to_vec(), 0);
                used
            }
            _ => {
                open.other_lines = if was { OTHER_LINES } else { open.other_lines } + 1;
                0
            }
        };
        let is_over = own < line.len() || open.other_lines > if open.is_message { OTHER_LINES } else { 0 };
        self.wait(open);
        if is_over {
            self.close();
        }
        used
    }

    /// Adds the open message to the messages found, or counts it as truncated.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let ends_line = is_line_end(&open.tail);
        let numbers = open.numbers().filter(|numbers| !ends_line || numbers.trust() > Trust::Contradicted);
        let Some(numbers) = numbers.filter(|_| !continues_number(&open.tail)) else {
            self.found.cut += u64::from(open.is_message);
            return;
        };
        let Head { line, time, origin, .. } = open.head;
        self.found.messages.push(Message { line, time, origin, numbers });
    }

    /// Returns the prefix of the message at `at` of `bytes`. The prefix is in this line or, if it is wrapped, in the previous
    /// lines.
    fn head(&self, line: u64, bytes: &[u8], at: usize) -> Head {
        let mut text = bytes[at.saturating_sub(PREFIX_BYTES_MAX)..at].to_vec();
        let (mut head, mut first) = (self.prefix(line, &text).map(|(_, head)| head), bytes);
        for (number, whole) in self.recent.iter().rev() {
            let is_over = text.len() > PREFIX_BYTES_MAX || !matches!(text.trim_ascii_end().last(), None | Some(b']'));
            if is_over || head.as_ref().is_some_and(|head| head.time.is_some()) {
                break;
            }
            let before = without_border(whole);
            let joined = [0, frame(before, &text)].map(|start| [before, text[start..].trim_ascii_start()].concat());
            let longer =
                joined.iter().find_map(|text| self.prefix(*number, text).filter(|(start, _)| *start < before.len()));
            if let Some((_, longer)) = longer.filter(|(_, longer)| longer.time.is_some() || longer.is_tensorflow) {
                (head, first) = (Some(longer), whole);
            }
            [_, text] = joined;
        }
        let head = head.unwrap_or(Head { line, time: None, is_tensorflow: false, origin: None });
        Head { origin: self.origins.of(&first[..first.len().min(NAMES_BYTES)]), ..head }
    }

    /// Returns the prefix at the end of `text` and its position, if there is one.
    fn prefix(&self, line: u64, text: &[u8]) -> Option<(usize, Head)> {
        let captures = PREFIXES.captures(text).filter(|_| text.trim_ascii_end().ends_with(b"]"))?;
        let start = captures.get_match().start();
        // The pattern matches ASCII only.
        let text = |name| std::str::from_utf8(captures.name(name)?.as_bytes()).ok();
        let is_tensorflow = captures.name("at").is_some();
        Some((start, Head { line, time: text("time").map(str::to_owned), is_tensorflow, origin: None }))
    }
}

/// Returns the text without colors and escapes, with plain blanks and dashes.
fn undecorated(bytes: &[u8]) -> Cow<'_, [u8]> {
    // Few logs have decorations, and the search for these bytes is fast.
    if !bytes.iter().any(|byte| matches!(byte, 0x1b | b'&' | b'\\' | 0xc2 | 0xe2)) {
        return bytes.into();
    }
    let plain = |found: &Captures<'_>| match found.get_match().as_bytes() {
        [b'&', b'#', number @ .., b';'] => {
            std::str::from_utf8(number).ok().and_then(|text| text.parse().ok()).into_iter().collect()
        }
        [b'&', ..] | [0xc2, 0xa0] => vec![b' '],
        [0xe2, 0x80, 0x93] | [0xe2, 0x88, 0x92] => vec![b'-'],
        [b'\\', b'_'] => vec![b'_'],
        _ => Vec::new(),
    };
    DECORATIONS.replace_all(bytes, plain)
}

/// Returns the beginning of a text, which may be long.
fn some(text: &[u8]) -> &[u8] {
    &text[..text.len().min(MESSAGE_BYTES_MAX)]
}

/// Returns a line without the border that a terminal or a format adds at its end.
fn without_border(line: &[u8]) -> &[u8] {
    let line = line.trim_ascii_end();
    let line = line.strip_suffix(b"\"]").unwrap_or(line);
    let is_border = |byte: &u8| !byte.is_ascii() || b" \"',|=".contains(byte);
    &line[..line.len() - line.iter().rev().take_while(|byte| is_border(byte)).count()]
}

/// Returns whether the text after a number continues the number, such as the rest of a progress bar that overwrote its end.
fn continues_number(behind: &[u8]) -> bool {
    match behind {
        [b'/' | b'%', ..] => true,
        [b'.' | b',' | b':', next, ..] => next.is_ascii_digit(),
        _ => false,
    }
}
