//! `pinpool why --lines` on one log as terminals, collectors and pages store it: wrapped, truncated, escaped, with numbered lines.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::TREND;
use crate::tf_lines::{after, inspected};
use crate::tool::{finish, pinpool};

/// The pool's lines in the log of a public run.
const LOG: &str = "\
Epoch 1/3
2017-07-03 08:35:05.226270: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] PoolAllocator: After 11003 get requests, put_count=10977 evicted_count=1000 eviction_rate=0.0910996 and unsatisfied allocation rate=0.102336
2017-07-03 08:35:05.226305: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:259] Raising pool_size_limit_ from 100 to 110
INFO:tensorflow:global step 100: loss = 2.3 (0.35 sec/step)
2017-07-03 09:00:46.585953: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] PoolAllocator: After 15371 get requests, put_count=15382 evicted_count=1000 eviction_rate=0.0650111 and unsatisfied allocation rate=0.065578
2017-07-03 09:00:46.585986: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:259] Raising pool_size_limit_ from 212 to 233
2017-07-03 09:45:08.178118: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] PoolAllocator: After 62269 get requests, put_count=62314 evicted_count=1000 eviction_rate=0.0160478 and unsatisfied allocation rate=0.0160433
2017-07-03 09:45:08.178166: I tensorflow/core/common_runtime/gpu/pool_allocator.cc:259] Raising pool_size_limit_ from 493 to 542
";
const AFTER: &str = "PoolAllocator: After 11003 get requests, put_count=10977 evicted_count=1000 eviction_rate=0.0910996 and \
                     unsatisfied allocation rate=0.102336";
const LATER: &str = "PoolAllocator: After 62269 get requests, put_count=62314 evicted_count=1000 eviction_rate=0.0160478 and \
                     unsatisfied allocation rate=";

/// The messages and the summary of each text.
fn all_inspected(texts: &[String]) -> Vec<(Vec<Value>, Value)> {
    let dir = TempDir::new().unwrap();
    let path = |(at, text): (usize, &String)| {
        let path = dir.path().join(at.to_string());
        fs::write(&path, text).unwrap();
        path
    };
    // At least two logs, so that each object names its log.
    let ran = finish(pinpool(&["inspect", "--json"]).args(texts.iter().enumerate().map(path)));
    let (mut found, mut messages) = (Vec::new(), Vec::new());
    for object in ran.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if object["kind"] == "summary" {
            found.push((std::mem::take(&mut messages), object));
        } else {
            messages.push(object);
        }
    }
    assert_eq!(found.len(), texts.len(), "{}", ran.stderr);
    found
}

/// Returns the facts of a log, which do not depend on the wrapping of its lines.
fn facts((messages, summary): &(Vec<Value>, Value)) -> (Vec<[Value; 9]>, [Value; 4]) {
    let keys = ["kind", "get", "put", "evicted", "eviction_rate", "unsatisfied_rate", "from", "to", "limit"];
    let messages = messages.iter().map(|message| keys.map(|key| message[key].clone())).collect();
    let pools = summary["pools"].as_array().map_or(0, Vec::len);
    (messages, [summary[TREND].clone(), summary["limit"].clone(), summary["cut"].clone(), pools.into()])
}

/// Checks that each style has the facts of the plain log.
fn check(styles: Vec<(String, String)>) {
    let (names, mut texts): (Vec<_>, Vec<_>) = styles.into_iter().unzip();
    texts.push(LOG.to_owned());
    let mut found = all_inspected(&texts);
    let plain = facts(&found.pop().unwrap());
    assert_eq!((plain.0.len(), plain.1[0].as_str(), plain.1[1].as_u64()), (6, Some("warming up"), Some(542)));
    for (name, found) in names.iter().zip(&found) {
        assert_eq!(facts(found), plain, "{name}");
    }
}

/// The parts of a line on a terminal of `width` columns.
fn hard(line: &str, width: usize) -> Vec<String> {
    line.as_bytes().chunks(width).map(|part| String::from_utf8(part.to_vec()).unwrap()).collect()
}

/// Wraps a log line between words, and within a word only if the word is longer than `width`.
fn words(line: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in line.split(' ').flat_map(|word| hard(word, width)) {
        let last = lines.last_mut().unwrap();
        if last.is_empty() {
            *last = word;
        } else if last.len() + 1 + word.len() <= width {
            *last += &format!(" {word}");
        } else {
            lines.push(word);
        }
    }
    lines
}

type Wrap = fn(&str, usize) -> Vec<String>;
const WRAPS: [(&str, Wrap); 2] = [("hard", hard), ("words", words)];

/// A name, the text before each line, computed from its number, and the text after it.
type Frame = (&'static str, fn(usize) -> String, &'static str);
const FRAMES: [Frame; 16] = [
    ("none", |_| String::new(), ""),
    ("indent", |_| "    ".to_owned(), ""),
    ("time", |n| format!("2026-04-22T21:34:{:02}.{}Z ", n % 60, 1_234_567 + n), ""),
    ("compose", |_| "trainer-1  | ".to_owned(), ""),
    ("rank", |_| "[rank0]: ".to_owned(), ""),
    ("number", |n| format!("{n:6}\t"), ""),
    ("grep", |n| format!("{n}:"), ""),
    ("label", |n| format!("L{n}:\t"), ""),
    ("tai64n", |n| format!("@400000005959f5{n:02x}0d7b1c2c "), ""),
    ("thread", |n| format!("2026-04-22 21:34:{:02},123 [{}] INFO train - ", n % 60, n * 13 % 40), ""),
    ("quote", |_| "> ".to_owned(), ""),
    ("pane", |_| "\u{2502}".to_owned(), "   \u{2502}"),
    ("asciinema", |n| format!("[{:.3}, \"o\", \"", n as f64 / 77.0), "\"]"),
    ("notebook", |_| "      \"".to_owned(), "\\n\","),
    ("json", |n| format!("{{\"ts\":{n},\"log\":\""), "\"}"),
    ("crlf", |_| String::new(), "\r"),
];

#[test]
fn a_log_that_is_wrapped_at_any_width_says_what_the_log_says() {
    let mut styles = Vec::new();
    for ((name, wrap), width) in WRAPS.iter().flat_map(|wrap| (20..=230).step_by(3).map(move |width| (wrap, width))) {
        let bare = LOG.lines().map(|line| line.rsplit_once("] ").map_or(line, |(_, message)| message));
        for (what, log) in [("whole", LOG.lines().collect::<Vec<_>>()), ("bare", bare.collect())] {
            let lines: Vec<_> = log.iter().flat_map(|line| wrap(line, width)).collect();
            styles.push((format!("{what}, {name} at {width}"), lines.join("\n")));
        }
    }
    check(styles);
}

#[test]
fn log_collector_prefixes_around_wrapped_lines_are_ignored() {
    let mut styles = Vec::new();
    for ((frame, before, behind), (name, wrap)) in
        FRAMES.iter().flat_map(|frame| WRAPS.iter().map(move |wrap| (frame, wrap)))
    {
        for width in [25, 60, 78, 89, 95, 100, 111, 120, 150, 230] {
            let parts = LOG.lines().flat_map(|line| wrap(line, width)).enumerate();
            let lines: Vec<_> = parts.map(|(n, part)| format!("{}{part}{behind}\n", before(n))).collect();
            styles.push((format!("{frame}, {name} at {width}"), lines.concat()));
            // If the collector's own lines were wrapped, only the first part has the prefix.
            let lines = LOG.lines().enumerate().flat_map(|(n, line)| wrap(&format!("{}{line}", before(n)), width));
            styles.push((format!("{frame} before, {name} at {width}"), lines.collect::<Vec<_>>().join("\n")));
        }
    }
    check(styles);
}

#[test]
fn escapes_of_mails_pages_and_recordings_change_nothing() {
    let mail = hard(&LOG.replace('=', "=3D"), 75).join("=\n");
    let members =
        LOG.lines().map(|line| format!("{{\"log\":\"{line}\\n\",\"stream\":\"stderr\",\"time\":\"21:34\"}}\n"));
    let colors = |line: &str| format!("{{\"log\":\"\\u001b[36m{line}\\u001b[0m\\n\"}}\n");
    let grep = LOG.replace("PoolAllocator", "\x1b[01;31m\x1b[KPoolAllocator\x1b[m\x1b[K");
    let parts = |line: &str| {
        let (first, last) = line.split_at(line.len() / 2);
        format!("2026-01-01T00:00:00.1Z stderr P {first}\n2026-01-01T00:00:00.1Z stderr F {last}\n")
    };
    let link = "\x1b]8;;file:///pool_allocator.cc\x1b\\pool_allocator.cc\x1b]8;;\x1b\\";
    let styles = [
        ("a mail", mail),
        ("a page", LOG.replace('=', "&#61;").replace('_', "&#95;")),
        ("mark-up", LOG.replace('_', "\\_")),
        ("blanks of no width", LOG.replace('_', "_\u{200b}")),
        ("links", LOG.replace("pool_allocator.cc", link)),
        ("other members", members.collect()),
        ("colors in JSON", LOG.lines().map(colors).collect()),
        ("blank lines", LOG.replace('\n', "\n\n\n")),
        ("grep --color", grep),
        ("parts of containerd", LOG.lines().map(parts).collect()),
        ("blanks of HTML", LOG.replace(' ', "&nbsp;")),
        ("blanks that do not break", LOG.replace(' ', "\u{a0}")),
    ];
    check(styles.map(|(name, text)| (name.to_owned(), text)).to_vec());
    // The minus sign of an exponent may have become a dash.
    let line = after("60820202", "60820292", "2000", "3.28838e-05", "3.86056e-05");
    assert_eq!(facts(&inspected(line.replace("e-0", "e\u{2013}0"))), facts(&inspected(&line)));
}

#[test]
fn a_wrapped_message_has_the_line_and_the_time_of_its_prefix() {
    let text = "PoolAllocator: After 11003 get requests, put_c\n2017-07-03 08:35:05.226305: I tensorflow/core/common_runtime/gpu/pool_alloc\n\
                ator.cc:259] Raising pool_size_limit_ from 100 to 110\n";
    let (messages, summary) = inspected(text);
    assert_eq!((messages.len(), &summary["cut"], &messages[0]["line"]), (1, &1.into(), &2.into()));
    assert_eq!(messages[0]["time"], "2017-07-03 08:35:05.226305");
    // A complete message on the previous line is not part of the prefix.
    let (messages, summary) =
        inspected(format!("{AFTER}\nI x/pool_allocator.cc:259] Raising pool\n_size_limit_ from 100 to 110\n"));
    let lines: Vec<_> = messages.iter().map(|message| message["line"].as_u64()).collect();
    assert_eq!((lines, &summary["limit"]), (vec![Some(1), Some(2)], &110.into()));
}

#[test]
fn a_message_that_was_cut_within_its_first_words_is_counted() {
    for end in [9, 13, 16, 30, 60, 100] {
        for text in [AFTER, "Raising pool_size_limit_ from 100 to 110"] {
            let cut = &text[..end.min(text.len() - 1)];
            let (messages, summary) =
                inspected(format!("{AFTER}\nI x/pool_allocator.cc:247] {cut}\nEpoch 1/3\n{AFTER}\n"));
            assert_eq!((messages.len(), &summary["cut"]), (2, &1.into()), "{cut}");
        }
    }
    // Single words of a message in other text are not messages.
    let (_, summary) = inspected(format!("{AFTER}\nSTEP\nR\nRaising\nRaising the bar\nPool\nPoolAllocator is new\n"));
    assert_eq!(summary["cut"], 0);
}

#[test]
fn a_rate_wrapped_at_a_line_end_is_joined_or_ignored() {
    let raise = "Raising pool_size_limit_ from 493 to 542\n";
    let parts =
        ["0.0\n160433", "0\n.0160433", "0.\n0160433", "0.016\n0433", "0.01604\n33", "0.\n0160\n433", "0.0160433"];
    let next = ["", raise, "2017-07-03 09:45:08.178166: I x:259] Epoch\n", "42 steps\n"];
    let texts: Vec<_> = parts.iter().flat_map(|parts| next.map(|next| format!("{LATER}{parts}\n{next}"))).collect();
    for (text, (messages, _)) in texts.iter().zip(all_inspected(&texts)) {
        assert_eq!(messages[0]["unsatisfied_rate"], 0.016_043_3, "{text}");
        assert_eq!(messages[0]["limit"], 493, "{text}");
    }
    // The first part of the rate, 0.30, is as plausible as the whole rate.
    assert_eq!(inspected(after("8980", "12319", "6000", "0.487053", "0.30\n9131\n")).0[0]["limit"], 1273);
    let lost = after("", "2530", "2000", "0.790514", "0");
    let texts: Vec<_> = (10..lost.len()).map(|at| format!("{}\n{}\n", &lost[..at], &lost[at..])).collect();
    assert!(all_inspected(&texts).iter().all(|(messages, _)| messages[0]["put"] == 2530));
    for cut in ["0", "0.0", "0.016", "0.0160", "0.", "9e-"] {
        let (messages, summary) = inspected(format!("{LATER}{cut}\nEpoch 1/3\n{raise}"));
        assert_eq!((messages.len(), &summary["cut"], &summary[TREND]), (1, &1.into(), &"unknown".into()), "{cut}");
    }
    // If other text follows on the same line, the rate 0 is complete. It contradicts the counters, so the check is ignored.
    let (_, summary) = inspected(format!("{LATER}0 I x:247] Epoch 1/3\n"));
    assert_eq!(summary[TREND], "too short to tell");
    for width in 89..230 {
        let cut: String = LOG.lines().map(|line| format!("{}\n", &line[..line.len().min(width)])).collect();
        let (messages, summary) = inspected(format!("{AFTER}\n{cut}"));
        assert_eq!(messages.len() as u64 + summary["cut"].as_u64().unwrap(), 7, "{width}");
        let rates =
            messages.iter().filter(|message| message["kind"] == "after").map(|message| &message["unsatisfied_rate"]);
        assert!(rates.clone().all(|rate| LOG.contains(&format!("rate={rate}\n"))), "{width}: {messages:?}");
    }
    let steady = after("5000000", "5000000", "1000", "0.0002", "0.0002022") + "\n";
    assert_eq!(inspected(&steady).1[TREND], "steady");
    assert_eq!(inspected(format!("{steady}Raising pool_size_limit_ from 121 to 133\n")).1[TREND], "warming up");
}

#[test]
fn numbers_of_records_and_threads_are_no_processes() {
    let frame = |name: &str, before: &dyn Fn(usize) -> String| {
        let lines = LOG.lines().filter(|line| line.contains("pool_alloc")).enumerate();
        (name.to_owned(), lines.map(|(n, line)| format!("{}{line}\n", before(n))).collect::<String>())
    };
    check(vec![
        frame("a record of four", &|n| format!("[{}] kube.train: [[17768936.{n}, {{}}], {{\"log\": \"", n % 4)),
        frame("a thread", &|n| format!("2026-04-22 21:34:20,123 [{}] INFO train - ", n * 7 % 5)),
        frame("a number", &|n| format!("{n}: ")),
    ]);
    // Only checks, without raises.
    let checks = |before: &dyn Fn(usize) -> String| -> String {
        let lines = LOG.lines().filter(|line| line.contains("After")).enumerate();
        lines.map(|(n, line)| format!("{}{line}\n", before(n))).collect()
    };
    let pools = |text: String| inspected(text).1["pools"].as_array().unwrap().len();
    assert_eq!(pools(checks(&|n| format!("[{}] ", n % 2))), 1);
    assert_eq!(pools(checks(&|n| format!("[rank{}] ", n % 2))), 2);
}

#[test]
fn a_limit_that_was_never_raised_is_not_recommended_as_a_start() {
    let (_, summary) = inspected(AFTER);
    let advice = summary["pools"][0]["advice"].to_string();
    assert!(!advice.contains("PINPOOL_POOL_SIZE_LIMIT") && !advice.contains("0 raises"), "{advice}");
    let advice = inspected(LOG).1["pools"][0]["advice"].to_string();
    assert!(advice.contains("PINPOOL_POOL_SIZE_LIMIT=542") && advice.contains("skip the 18 raises"), "{advice}");
}
