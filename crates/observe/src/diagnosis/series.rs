//! The diagnosis of a recording: its snapshots, evaluated by the rules of the running pool.

use std::cmp::Reverse;

use super::snapshot::Snapshot;
use super::window_diagnosis::WindowDiagnosis;
use super::{Monitor, REQUESTS_MIN};
use crate::record::{PoolDescription, Recording, SET_IN_CODE};

/// A pool of a recording, with its diagnosis.
#[derive(Debug, Clone)]
pub struct PoolDiagnosis {
    /// The pool's number in the recording.
    pub pool: u32,
    pub name: String,
    /// The diagnosis of the windows that cost most, with the time lost over the whole recording.
    pub diagnosis: WindowDiagnosis,
    pub requests: u64,
    /// Requests that found no memory immediately.
    pub delayed_requests: u64,
}

/// Returns the diagnosis of each pool with enough requests: alarms first, then the other diagnoses, both by lost time, the most
/// first. A pool without snapshots is omitted. It has none if its process was killed immediately.
pub fn diagnose_recording(recording: &Recording) -> Vec<PoolDiagnosis> {
    let diagnose = |pool: &PoolDescription| {
        let set_in_code = pool.fact(SET_IN_CODE).unwrap_or_default();
        let snapshot = |of: &Snapshot| Snapshot { set_in_code: set_in_code.to_owned(), ..of.clone() };
        let taken = recording.snapshots.iter().filter(|taken| taken.pool == pool.number);
        let series: Vec<_> = taken.map(|taken| (taken.at_us, snapshot(&taken.snapshot))).collect();
        let diagnosis = diagnose_series(&series)?;
        let Snapshot { requests, delayed_requests, .. } = series.last()?.1;
        Some(PoolDiagnosis { pool: pool.number, name: pool.name(), diagnosis, requests, delayed_requests })
    };
    let mut diagnoses: Vec<_> = recording.pools.iter().filter_map(diagnose).collect();
    diagnoses.sort_by_key(|one| (!one.diagnosis.is_alarm, Reverse(one.diagnosis.lost.total_ns()), one.pool));
    diagnoses
}

/// Returns the diagnosis of a whole series with times of the pool's clock, or `None` if there are too few requests and no
/// failure.
fn diagnose_series(series: &[(u64, Snapshot)]) -> Option<WindowDiagnosis> {
    let (end_us, end) = series.last()?;
    let mut monitor = Monitor { remembers_all: true, ..Monitor::default() };
    series.iter().for_each(|(at_us, snapshot)| _ = monitor.add(*at_us, snapshot.clone()));
    let mut seen = end.clone();
    if monitor.latest().is_none() {
        (end.requests >= REQUESTS_MIN || end.failure.is_some()).then_some(())?;
        // At its end, a pool holds less memory than before, so the snapshot in the middle shows the memory.
        let (_, middle) = series[series.partition_point(|(at_us, _)| *at_us < end_us / 2)].clone();
        let Snapshot { used, used_bytes, in_flight_bytes, held_bytes, idle_bytes, free_bytes, holders, .. } = middle;
        seen = Snapshot { used, used_bytes, in_flight_bytes, held_bytes, idle_bytes, free_bytes, holders, ..seen };
        monitor.most_held_bytes = held_bytes;
    }
    Some(WindowDiagnosis { lost: end.lost(*end_us), ..monitor.why(*end_us, &seen) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::{Cause, LikelyCause};

    const MIB: u64 = 1 << 20;

    /// Returns one snapshot per second of a pool with 20 requests per second.
    fn series(seconds: u64, at: impl Fn(u64, Snapshot) -> Snapshot) -> Vec<(u64, Snapshot)> {
        let of = |second: u64| {
            let (requests, is_pinned) = (20 * second, true);
            let held = Snapshot {
                requests,
                returns: requests,
                is_pinned,
                used: 8,
                used_bytes: 8 * MIB,
                ..Snapshot::default()
            };
            (second * 1_000_000, at(second, Snapshot { held_bytes: 8 * MIB, ..held }))
        };
        (1..=seconds).map(of).collect()
    }

    #[test]
    fn a_recording_is_diagnosed_in_the_windows_of_its_pool() {
        let short = series(60, |second, now| {
            let waited = second.clamp(20, 40) - 20;
            let (limit, max_bytes) = (Some("PINPOOL_MAX_BYTES".into()), Some(8 * MIB));
            let (delayed_requests, waiting_ns) = (waited * 10, waited * 1_000_000_000);
            let needed_bytes = 12 * MIB;
            Snapshot {
                delayed_requests,
                own_waits: delayed_requests,
                waiting_ns,
                limit,
                max_bytes,
                needed_bytes,
                ..now
            }
        });
        let diagnosis = diagnose_series(&short).unwrap();
        assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::LimitTooSmall, true), "{diagnosis}");
        assert_eq!((diagnosis.lost.window_us, diagnosis.lost.waiting_ns), (60_000_000, 20_000_000_000));
    }

    #[test]
    fn a_recording_and_its_process_have_the_same_diagnosis() {
        // Two windows in which the source refuses, then one in which threads wait for each other for less time.
        let short = series(30, |second, now| {
            let (refused, own) = (second.min(20), second.clamp(20, 30) - 20);
            let waiting_ns = (refused * 500 + own * 100) * 1_000_000;
            let is_by_source = second <= 20;
            let limit = Some("PINPOOL_MAX_BYTES".into());
            Snapshot { delayed_requests: second * 10, own_waits: own * 10, waiting_ns, is_by_source, limit, ..now }
        });
        let mut process = Monitor::default();
        short.iter().for_each(|(at_us, now)| _ = process.add(*at_us, now.clone()));
        let (at_us, now) = short.last().unwrap();
        let (recorded, running) = (diagnose_series(&short).unwrap(), process.why(*at_us, now));
        assert_eq!((recorded.cause, &recorded.found), (running.cause, &running.found));
        assert!(running.found.starts_with("in 2 of the last 3 windows (now limit_too_small): "), "{running}");
    }

    #[test]
    fn a_recording_shorter_than_a_window_is_diagnosed_by_its_middle() {
        let empty_at_the_end = series(8, |second, now| match second {
            8 => Snapshot { used: 0, used_bytes: 0, held_bytes: 0, ..now },
            _ => now,
        });
        let diagnosis = diagnose_series(&empty_at_the_end).unwrap();
        assert_eq!(diagnosis.cause, Cause::Healthy);
        assert!(diagnosis.found.contains("8.0MiB held"), "{diagnosis}");
        assert_eq!(diagnose_series(&series(8, |_, now| Snapshot { requests: 19, ..now })), None, "too few requests");
        // The only snapshot may be the snapshot at the end.
        let released = series(1, |_, now| Snapshot { held_bytes: 0, most_held_bytes: 4 * MIB, ..now });
        let diagnosis = diagnose_series(&released).unwrap();
        assert!(diagnosis.found.ends_with("at most 4.0MiB held"), "{diagnosis}");
    }

    #[test]
    fn a_recording_that_ends_with_a_failed_request_explains_it() {
        let failed = |at: u64| {
            series(30, move |second, now| {
                let likely = LikelyCause { found: "all is in use".to_owned(), remedy: "put it back".to_owned() };
                Snapshot { failure: (second == at).then_some((Cause::LimitTooSmall, likely)), ..now }
            })
        };
        let diagnosis = diagnose_series(&failed(30)).unwrap();
        assert_eq!((diagnosis.cause, diagnosis.found.as_str()), (Cause::LimitTooSmall, "all is in use"));
        assert_eq!(diagnose_series(&failed(12)).unwrap().cause, Cause::Healthy);
    }
}
