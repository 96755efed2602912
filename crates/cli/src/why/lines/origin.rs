//! Finds the process that wrote a line, by a prefix of the launcher.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use regex::bytes::Regex;

use super::history::{History, may_raise};
use super::message::{Message, Numbers};

/// A time before or after the name of a process.
const TIME: &str = r"\[?(?:(?:\d{4}[-/]\d\d[-/]\d\d[ T]|[A-Z][a-z]{2} [ \d]\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[-+]\d\d:?\d\d)?)\]?[\s:]\s*";
/// Names of processes.
const NAMES: [&str; 10] = [
    // torchrun, `mpirun -prepend-rank`
    r"\[(?:rank|default|node|worker)?[ :=]?\d+\]:?",
    // `mpirun --tag-output`
    r"\[\d+,(?:mpirank:)?\d+(?:,[\w.-]+)?\](?:<std(?:out|err)>)?:?",
    // `kubectl --prefix`
    r"\[pod/[^\]]+\]",
    // Ray
    r"\([^()]*\bpid=\d+[^()]*\)",
    // docker compose
    r"[\w.@-]+ +\|",
    // syslog, journald, Heroku
    r"(?:[\w.-]+ )?[\w./-]+\[[\w.]+\]:",
    // The file, from `grep`
    r"[\w./-]+\.(?:log|txt|out|err):",
    // The host, from pdsh, DeepSpeed and `parallel --tag`
    r"[A-Za-z][\w.-]*\d[\w.-]*(?::[ \t]|\t)",
    // `srun --label`
    r"\d+:\s",
    // stern: the pod, which ends in a number or five random letters, and its container
    r"[a-z0-9][a-z0-9.-]*-(?:\d+|[a-z0-9]{5}) [a-z0-9][a-z0-9-]* ",
];
/// Members of a JSON object that name a process.
const MEMBER: &str = r#""(?:_PID|pid|rank|local_rank|pod|pod_name|_HOSTNAME|host|hostname)"\s*:\s*(?:"[^"]*"|\d+)"#;
/// Maximum number of names of a process, such as a host and a rank.
const NAMES_MAX: usize = 3;

static NAME: LazyLock<Regex> =
    LazyLock::new(|| compiled(&format!(r"^\s*(?:{TIME})*(?<name>{})(?:\d+:)?", NAMES.join("|"))));
static MEMBERS: LazyLock<Regex> = LazyLock::new(|| compiled(MEMBER));

/// Finds the names of processes in lines.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// The current file in the output of `tail`.
    of_file: Option<String>,
}

impl Origins {
    /// Records the header that `tail` prints before lines of another file.
    pub(super) fn record_head(&mut self, line: &[u8]) {
        if let Some(file) = line.strip_prefix(b"==> ").and_then(|rest| rest.strip_suffix(b" <==")) {
            self.of_file = Some(in_words(file));
        }
    }

    /// Returns the name of the process that wrote `line`.
    pub(super) fn of(&self, line: &[u8]) -> Option<String> {
        let mut names: Vec<String> = self.of_file.iter().cloned().collect();
        if line.trim_ascii_start().starts_with(b"{") {
            names.extend(MEMBERS.find_iter(line).map(|found| in_words(found.as_bytes())));
        } else {
            let mut rest = line;
            while let Some(captures) = NAME.captures(rest).filter(|_| names.len() < NAMES_MAX) {
                names.extend(captures.name("name").map(|found| in_words(found.as_bytes())));
                rest = &rest[captures.get_match().end()..];
            }
        }
        (!names.is_empty()).then(|| names.join(" "))
    }
}

fn in_words(name: &[u8]) -> String {
    String::from_utf8_lossy(name).trim().to_owned()
}

/// Removes origins that number the lines instead of naming a process: first words without letters, such as the number of a
/// thread or a record, then whole origins.
pub(super) fn forget_numbers(messages: &mut Vec<Message>) {
    let words = |origin: String| {
        let words: Vec<_> = origin.split(' ').filter(|word| word.contains(|c: char| c.is_alphabetic())).collect();
        Some(words.join(" ")).filter(|words| !words.is_empty())
    };
    let forgotten: Vec<_> = with_origins(messages, words);
    let are_numbers = |forgotten: &[Message]| {
        let [named, forgotten_pairs] = [&*messages, forgotten].map(pairs);
        forgotten_pairs * 2 > named * 3 || ((forgotten_pairs > named || forgotten_pairs == 0) && is_one_pool(forgotten))
    };
    if forgotten != *messages && (is_many(messages, &[]) || are_numbers(&forgotten)) {
        *messages = forgotten;
    }
    let forgotten = with_origins(messages, |_| None);
    // Text in brackets may differ in each message if each process has only one.
    if is_many(messages, &['[', '(']) || pairs(&forgotten) * 2 > pairs(messages) * 3 {
        *messages = forgotten;
    }
}

fn with_origins(messages: &[Message], origin: impl Fn(String) -> Option<String>) -> Vec<Message> {
    let renamed = |message: &Message| Message { origin: message.origin.clone().and_then(&origin), ..message.clone() };
    messages.iter().map(renamed).collect()
}

/// Returns whether there are more than half as many origins as messages, without origins that begin with one of `excepted`.
fn is_many(messages: &[Message], excepted: &[char]) -> bool {
    let origins = messages.iter().filter_map(|message| message.origin.as_deref());
    let origins: HashSet<_> = origins.filter(|origin| !origin.starts_with(excepted)).collect();
    origins.len() * 2 > messages.len()
}

/// Returns whether one pool may have printed all messages. Similar processes print the same message twice.
fn is_one_pool(messages: &[Message]) -> bool {
    let is_twice = messages.windows(2).any(|pair| pair[0].numbers == pair[1].numbers);
    !is_twice && History::of(messages).is_ok_and(|history| history.pools.len() == 1)
}

/// Returns the number of raises that follow their check, because a process prints both together.
fn pairs(messages: &[Message]) -> usize {
    let (mut checked, mut pairs) = (HashMap::new(), 0);
    for message in messages {
        match &message.numbers {
            Numbers::After(counters) => _ = checked.insert(&message.origin, counters),
            Numbers::Raise { .. } => pairs += usize::from(checked.remove(&message.origin).is_some_and(may_raise)),
        }
    }
    pairs
}

/// Compiles a constant pattern.
pub(super) fn compiled(pattern: &str) -> Regex {
    Regex::new(&format!("(?-u){pattern}")).expect("the patterns are constants that tests compile")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_name_processes_and_times_do_not() {
        let mut origins = Origins::default();
        let message = "I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] PoolAllocator: After 1 get requests";
        for (prefix, name) in [
            ("[rank0]: ", "[rank0]:"),
            ("[default3]:[rank3]: ", "[default3]: [rank3]:"),
            ("7: ", "7:"),
            ("[12] ", "[12]"),
            ("[1,0]<stderr>:", "[1,0]<stderr>:"),
            ("[1,mpirank:3,algo-1]<stdout>:", "[1,mpirank:3,algo-1]<stdout>:"),
            ("[pod/train-0/worker] 2026-01-01T10:00:00.5Z ", "[pod/train-0/worker]"),
            ("\x20(RayTrainWorker pid=123, ip=10.0.0.2) ", "(RayTrainWorker pid=123, ip=10.0.0.2)"),
            ("worker-1  | ", "worker-1  |"),
            ("Nov  2 10:00:00 host python[101]: ", "host python[101]:"),
            ("2026-01-01T10:00:00.123456+00:00 host python[101]: ", "host python[101]:"),
            ("2026-01-01T10:00:00+00:00 app[worker.1]: ", "app[worker.1]:"),
            ("logs/rank3.log:", "logs/rank3.log:"),
            ("logs/rank3.log:1234:", "logs/rank3.log:"),
            ("node01: [rank5]: ", "node01: [rank5]:"),
            ("gpu-host-2\t", "gpu-host-2"),
            ("[2026-01-01 10:00:00,123] [3] ", "[3]"),
            ("10:00:00.5 [rank1]: ", "[rank1]:"),
            ("train-0 worker ", "train-0 worker"),
            ("train-6b5d5c7f4-x2x5k main 2026-01-01T10:00:00Z ", "train-6b5d5c7f4-x2x5k main"),
            ("10:00:00 train-12 worker-main [rank1]: ", "train-12 worker-main [rank1]:"),
            (r#"{"_HOSTNAME":"h1","_PID":"77","MESSAGE":""#, r#""_HOSTNAME":"h1" "_PID":"77""#),
        ] {
            assert_eq!(origins.of(format!("{prefix}{message}").as_bytes()).as_deref(), Some(name), "{prefix}");
        }
        for prefix in [
            "",
            "10:00:00 ",
            "gpu-0 ",
            "2026-01-01 10:00:00.123: ",
            "[10:00:00] ",
            "2026-01-01T10:00:00Z ",
            "50%|#### | ",
        ] {
            assert_eq!(origins.of(format!("{prefix}{message}").as_bytes()), None, "{prefix}");
        }
        origins.record_head(b"==> rank1.log <==");
        assert_eq!(origins.of(message.as_bytes()).as_deref(), Some("rank1.log"));
    }
}
