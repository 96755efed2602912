//! `pinpool why --lines` on logs of launchers, containers and editors: ranks in one file, colors, blanks, parts of lines.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rand::{RngExt, SeedableRng};
use serde_json::Value;

use crate::TREND;
use crate::tool::{finish, pinpool};

/// The lines of each public run.
fn runs() -> Vec<Vec<String>> {
    let text = fs::read_to_string(Path::new(crate::ROOT).join("tests/data/tf_lines/public.tsv")).unwrap();
    let mut runs: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in text.lines().skip(1) {
        let cells: Vec<&str> = row.split('\t').collect();
        let message = match cells[1] {
            "after" => format!(
                "PoolAllocator: After {} get requests, put_count={} evicted_count={} eviction_rate={} and unsatisfied allocation rate={}",
                cells[3], cells[4], cells[5], cells[6], cells[7]
            ),
            _ => format!("Raising pool_size_limit_ from {} to {}", cells[8], cells[9]),
        };
        let line = format!("I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] {message}");
        runs.entry(cells[0].to_owned()).or_default().push(line);
    }
    runs.into_values().collect()
}

/// A change that a style makes to a line.
type Style<'a> = &'a dyn Fn(&str) -> String;

fn summary(text: &str) -> Value {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let ran = finish(pinpool(&["inspect", "--json"]).arg(file.path()));
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap()
}

/// A launcher's prefix for a rank and a line number, and the name of the rank in it.
type Launcher = (fn(usize, usize) -> String, fn(usize) -> String);

const LAUNCHERS: [Launcher; 14] = [
    (|rank, _| format!("[rank{rank}]: "), |rank| format!("[rank{rank}]:")),
    (|rank, _| format!("[default{rank}]:[rank{rank}]: "), |rank| format!("[default{rank}]: [rank{rank}]:")),
    (|rank, _| format!("{rank}: "), |rank| format!("{rank}:")),
    (|rank, _| format!("[1,{rank}]<stderr>:"), |rank| format!("[1,{rank}]<stderr>:")),
    (|rank, _| format!("[{rank}] "), |rank| format!("[{rank}]")),
    (
        |rank, line| format!("[pod/train-{rank}/worker] 2026-01-01T10:{:02}:00.5Z ", line % 60),
        |rank| format!("[pod/train-{rank}/worker]"),
    ),
    (|rank, _| format!("worker-{rank}  | "), |rank| format!("worker-{rank}  |")),
    (
        |rank, line| format!("Nov 20 10:{:02}:{:02} host python[{}]: ", line / 60 % 60, line % 60, 100 + rank),
        |rank| format!("host python[{}]:", 100 + rank),
    ),
    (
        |rank, line| format!("2026-01-01T10:00:00.{line:06}+00:00 node{rank} python[7]: "),
        |rank| format!("node{rank} python[7]:"),
    ),
    (|rank, _| format!("(Worker pid={}) ", 100 + rank), |rank| format!("(Worker pid={})", 100 + rank)),
    (|rank, line| format!("logs/rank{rank}.log:{line}:"), |rank| format!("logs/rank{rank}.log:")),
    (|rank, _| format!("node{}: [rank{rank}]: ", rank / 4), |rank| format!("node{}: [rank{rank}]:", rank / 4)),
    (|rank, _| format!("gpu-{rank}\t"), |rank| format!("gpu-{rank}")),
    (|rank, line| format!("10:00:{:02} [rank{rank}]: ", line % 60), |rank| format!("[rank{rank}]:")),
];

/// The lines of several runs, each after the prefix of its rank, randomly merged.
fn merged(ranks: &[&Vec<String>], prefix: fn(usize, usize) -> String, random: &mut impl RngExt) -> String {
    let mut at = vec![0; ranks.len()];
    let mut text = String::new();
    loop {
        let left: Vec<_> = (0..ranks.len()).filter(|&rank| at[rank] < ranks[rank].len()).collect();
        if left.is_empty() {
            return text;
        }
        let rank = left[random.random_range(0..left.len())];
        text += &format!("{}{}\n", prefix(rank, at.iter().sum()), ranks[rank][at[rank]]);
        at[rank] += 1;
    }
}

/// The end limits of the pools of an origin.
fn limits<'a>(summary: &'a Value, origin: Option<&str>) -> Vec<&'a Value> {
    let pools = summary["pools"].as_array().unwrap().iter();
    pools.filter(|pool| pool["origin"].as_str() == origin).map(|pool| &pool["limit"]).collect()
}

#[test]
fn every_rank_has_its_own_end_limits_whatever_the_launcher_writes_before_its_lines() {
    const LOGS: usize = 20;
    let runs: Vec<_> = runs().into_iter().filter(|run| run.len() >= 2).collect();
    let alone: Vec<_> = runs.iter().map(|run| summary(&(run.join("\n") + "\n"))).collect();
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    for (log, ranks) in (0..LOGS).flat_map(|log| [2, 4, 8].map(|ranks| (log, ranks))) {
        let (prefix, name) = LAUNCHERS[log % LAUNCHERS.len()];
        // Ranks of one program have like printed: in each second log all are the same run.
        let first = random.random_range(0..runs.len());
        let chosen: Vec<_> =
            (0..ranks).map(|_| if log % 2 == 0 { random.random_range(0..runs.len()) } else { first }).collect();
        let lines: Vec<_> = chosen.iter().map(|&run| &runs[run]).collect();
        let found = summary(&merged(&lines, prefix, &mut random));
        for (rank, &run) in chosen.iter().enumerate() {
            // A run may be of several pools, or starts.
            let expected = limits(&alone[run], None);
            assert_eq!(limits(&found, Some(&name(rank))), expected, "log {log} of {ranks} ranks: {}", name(rank));
        }
        assert_eq!(limits(&found, None), [&Value::Null; 0], "log {log} of {ranks} ranks");
    }
}

#[test]
fn numbers_of_lines_are_no_ranks() {
    let runs = runs();
    let run = runs.iter().max_by_key(|run| run.len()).unwrap();
    let numbered: String = run.iter().enumerate().map(|(at, line)| format!("{}: {line}\n", at + 1)).collect();
    let (plain, numbered) = (summary(&(run.join("\n") + "\n")), summary(&numbered));
    assert_eq!(plain["pools"], numbered["pools"]);
}

#[test]
fn colors_blanks_dashes_and_parts_of_lines_change_nothing() {
    let runs = runs();
    let run = runs.iter().max_by_key(|run| run.len()).unwrap();
    let all = |style: &dyn Fn(&str) -> String| run.iter().map(|line| style(line) + "\n").collect::<String>();
    let plain = summary(&all(&str::to_owned));
    let grep = |line: &str| line.replace("PoolAllocator", "\x1b[01;31m\x1b[KPoolAllocator\x1b[m\x1b[K");
    let parts = |line: &str| {
        let (first, last) = line.split_at(line.len() / 2);
        format!("2026-01-01T00:00:00.1Z stderr P {first}\n2026-01-01T00:00:00.1Z stderr F {last}")
    };
    let styles: [(&str, Style<'_>); 5] = [
        ("grep --color", &grep),
        ("parts of containerd", &parts),
        ("blanks of HTML", &|line| line.replace(' ', "&nbsp;")),
        ("blanks that do not break", &|line| line.replace(' ', "\u{a0}")),
        ("dashes", &|line| line.replace("e-0", "e\u{2013}0")),
    ];
    for (name, style) in styles {
        let found = summary(&all(style));
        assert_eq!((&found["after"], &found["raise"]), (&plain["after"], &plain["raise"]), "{name}");
        assert_eq!(found["pools"], plain["pools"], "{name}");
    }
}

#[test]
fn few_gets_decide_nothing_and_the_first_sentence_is_the_one_that_was_looked_for() {
    let after = |get: u64, put: u64, evicted: u64, evicting: &str, missing: &str| {
        format!(
            "PoolAllocator: After {get} get requests, put_count={put} evicted_count={evicted} eviction_rate={evicting} and \
             unsatisfied allocation rate={missing}\n"
        )
    };
    // A program that drains its queues: the limit is no more steady than before.
    let busy = after(2_702, 2_702, 1_000, "0.370096", "0.407106");
    let raise = "Raising pool_size_limit_ from 100 to 110\n";
    let drained = summary(&format!("{busy}{raise}{}", after(0, 1_000, 1_000, "1", "-nan")));
    assert_eq!(drained[TREND], "warming up", "{drained}");
    let short = summary(&after(4, 1_000, 1_000, "1", "0"));
    assert_eq!(short[TREND], "too short to tell", "{short}");
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &busy).unwrap();
    let ran = finish(pinpool(&["inspect"]).arg(file.path()));
    assert!(ran.stdout.contains("\nThese lines are information, not errors.\n1 message in 1 line; "), "{}", ran.stdout);
}

#[test]
fn a_log_in_another_compression_is_named_with_what_unpacks_it() {
    for (bytes, name) in
        [(&b"BZh91AY&SY"[..], "bzip2 -dc"), (b"\xfd7zXZ\0\0\x04", "xz -dc"), (b"\x28\xb5\x2f\xfd\x04", "zstd -dc")]
    {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let ran = finish(pinpool(&["inspect"]).arg(file.path()));
        assert_eq!(ran.code(), 1);
        ran.check_stderr(name);
    }
}
