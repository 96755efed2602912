//! `pinpool why --lines` on logs of launchers, with several ranks in one file, and on short or compressed logs.

use std::collections::BTreeMap;
use std::fs;

use rand::{RngExt, SeedableRng};
use serde_json::Value;

use crate::TREND;
use crate::tf_lines::{RAISE, after, inspected, public_rows};
use crate::tool::{finish, pinpool};

/// The lines of each public run.
fn runs() -> Vec<Vec<String>> {
    let mut runs: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in public_rows() {
        let line = format!("I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] {}", row.message());
        runs.entry(row.run).or_default().push(line);
    }
    runs.into_values().collect()
}

fn summary(text: &str) -> Value {
    inspected(text).1
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

/// Returns the final limits of the pools of an origin.
fn limits<'a>(summary: &'a Value, origin: Option<&str>) -> Vec<&'a Value> {
    let pools = summary["pools"].as_array().unwrap().iter();
    pools.filter(|pool| pool["origin"].as_str() == origin).map(|pool| &pool["limit"]).collect()
}

#[test]
fn each_rank_has_its_own_limit_under_any_launcher_prefix() {
    const LOGS: usize = 20;
    let runs: Vec<_> = runs().into_iter().filter(|run| run.len() >= 2).collect();
    let alone: Vec<_> = runs.iter().map(|run| summary(&(run.join("\n") + "\n"))).collect();
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    for (log, ranks) in (0..LOGS).flat_map(|log| [2, 4, 8].map(|ranks| (log, ranks))) {
        let (prefix, name) = LAUNCHERS[log % LAUNCHERS.len()];
        // Ranks of one program may print the same lines, so in every second log all ranks have the same run.
        let first = random.random_range(0..runs.len());
        let chosen: Vec<_> =
            (0..ranks).map(|_| if log % 2 == 0 { random.random_range(0..runs.len()) } else { first }).collect();
        let found = summary(&merged(&chosen.iter().map(|&run| &runs[run]).collect::<Vec<_>>(), prefix, &mut random));
        for (rank, &run) in chosen.iter().enumerate() {
            // A run may contain several pools, or several starts of a program.
            let expected = limits(&alone[run], None);
            assert_eq!(limits(&found, Some(&name(rank))), expected, "log {log} of {ranks} ranks: {}", name(rank));
        }
        assert_eq!(limits(&found, None), [&Value::Null; 0], "log {log} of {ranks} ranks");
    }
}

#[test]
fn few_requests_decide_nothing_and_the_first_matching_sentence_counts() {
    // A program that drains its queues does not make the limit steady.
    let busy = after("2702", "2702", "1000", "0.370096", "0.407106");
    let drained = summary(&format!("{busy}\n{RAISE}\n{}", after("0", "1000", "1000", "1", "-nan")));
    assert_eq!(drained[TREND], "warming up", "{drained}");
    let short = summary(&after("4", "1000", "1000", "1", "0"));
    assert_eq!(short[TREND], "too short to tell", "{short}");
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &busy).unwrap();
    let ran = finish(pinpool(&["inspect"]).arg(file.path()));
    assert!(ran.stdout.contains("\nThese lines are information, not errors.\n1 message in 1 line; "), "{}", ran.stdout);
}

#[test]
fn a_log_in_another_compression_is_refused_with_how_to_unpack_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), b"\xfd7zXZ\0\0\x04").unwrap();
    finish(pinpool(&["inspect"]).arg(file.path())).exits(1).check_stderr("xz -dc FILE");
}
