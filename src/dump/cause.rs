//! The likely cause of a get that finds no memory, and what to change: cases told apart by numbers.

use std::time::Duration;

use super::{Dump, Refused};
use crate::error::UsageReport;

/// Errors of the driver (`CUresult`) that belong to earlier work: once a context has failed, its later calls return them too.
const OF_EARLIER_WORK: [i64; 12] = [700, 701, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999];
/// Held bytes per byte asked for, in percent, from which rounding is a cause.
const WASTE_PERCENT: u64 = 150;

/// The limit of a get that fits the partition where it is made.
pub(crate) const OUTER_PARTITION: &str = "the ceiling of the partition around this one";

/// A pool of which so much of its ceiling is in use will soon refuse a get.
const SHORT_PERCENT: u64 = 90;
/// No copy takes this long.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// What the system has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) total_bytes: u64,
    pub(crate) available_bytes: u64,
    /// Where the total comes from, and whether that is a control group.
    pub(crate) origin: String,
    pub(crate) is_group: bool,
}

/// What was found, and what helps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cause {
    pub(super) found: String,
    pub(super) change: String,
}

/// The first case that the numbers of `dump` show. Without a request: what a get over the limit would meet, if the pool comes
/// near it.
pub(super) fn likely(dump: &Dump) -> Option<Cause> {
    (dump.request.is_some() || is_short(dump)).then(|| first_case(dump))
}

/// Whether little is left: buffers that are not pinned exist, the system is full, copies do not end, or nearly all of the
/// ceiling is in use.
fn is_short(dump: &Dump) -> bool {
    let UsageReport { in_use_bytes, in_flight_bytes, fallback_bytes, max_bytes, .. } = dump.usage;
    let used_bytes = in_use_bytes.saturating_add(in_flight_bytes);
    fallback_bytes > 0
        || dump.host.as_ref().is_some_and(|host| host.available_bytes == 0)
        || dump.oldest_copy.is_some_and(|(age, _)| age >= STUCK_AFTER)
        || max_bytes.is_some_and(|max_bytes| used_bytes >= max_bytes / 100 * SHORT_PERCENT)
}

fn first_case(dump: &Dump) -> Cause {
    let UsageReport { held_bytes, in_use_bytes, in_flight_bytes, idle_bytes, .. } = dump.usage;
    let limit = dump.limit;
    let needed_bytes = dump.request.as_ref().map_or(0, |request| request.needed_bytes);
    let cause = |found: String, change: String| Cause { found, change };
    // A ceiling that is not above the present one helps nobody. Other limits than the pool's ceiling are not among the figures.
    let max_bytes = dump.usage.max_bytes.filter(|_| !matches!(limit, "PINPOOL_RESERVE" | OUTER_PARTITION)).unwrap_or(0);
    let raised_to = |enough_bytes: u64| {
        if enough_bytes > max_bytes { enough_bytes } else { max_bytes.saturating_add(needed_bytes) }
    };
    let used_bytes = in_use_bytes.saturating_add(in_flight_bytes);
    let kept_bytes = idle_bytes.saturating_add(dump.free_bytes);
    match dump.request.as_ref().map(|request| &request.refused) {
        Some(Refused::Source { code: Some(code), .. }) if OF_EARLIER_WORK.contains(code) => {
            return cause(
                format!("the driver returns an error of earlier work (code {code}): its context has failed"),
                "look for the first CUDA error of the process; no setting of the pool helps".to_owned(),
            );
        }
        Some(Refused::Limit { could_fit: false, .. }) => {
            return cause(
                format!("the request alone is larger than {limit} allows"),
                format!("ask for less, or raise {limit} to {needed_bytes} bytes or more"),
            );
        }
        Some(Refused::Line { first_bytes, .. }) => {
            let enough_bytes = raised_to(used_bytes.saturating_add(*first_bytes).saturating_add(needed_bytes));
            return cause(
                format!("a get of {first_bytes} bytes is first in line, and what is free is kept for it"),
                format!(
                    "wait longer (PINPOOL_WAIT), get less at once, or raise {limit} to {enough_bytes} bytes or more"
                ),
            );
        }
        Some(Refused::Source { .. }) if kept_bytes > held_bytes / 2 && kept_bytes >= needed_bytes => {
            return cause(
                format!("{kept_bytes} of the {held_bytes} bytes held are idle, in other sizes or in pieces"),
                format!(
                    "set PINPOOL_MAX_BYTES below {held_bytes} bytes, so that gets release what is idle; or batch to fewer sizes \
                     (PINPOOL_PRESET=adaptive has fewer); Pool::trim releases it now"
                ),
            );
        }
        Some(Refused::Ledger { found, remedy }) => return cause(found.clone(), (*remedy).to_owned()),
        Some(Refused::Source { remedy: Some(remedy), .. }) => {
            return cause("what the driver or the kernel says above".to_owned(), (*remedy).to_owned());
        }
        refused => {
            let is_refused_by_source = matches!(refused, Some(Refused::Source { .. }));
            if let Some(host) = &dump.host
                && (is_refused_by_source || host.is_group)
                && host.available_bytes <= needed_bytes
            {
                return of_full_memory(host, needed_bytes);
            }
            if is_refused_by_source {
                let free = dump
                    .host
                    .as_ref()
                    .map_or_else(String::new, |host| format!(" though {} bytes are free", host.available_bytes));
                return cause(
                    format!("the back-end refused{free}: a limit other than memory, or no piece as long as that"),
                    "raise RLIMIT_MEMLOCK and vm.max_map_count; under WSL2 its limit on pinned memory; pin at the start with \
                     PINPOOL_RESERVE; `pinpool doctor` looks at each"
                        .to_owned(),
                );
            }
        }
    }
    if in_flight_bytes > 0 && in_flight_bytes >= held_bytes / 2 {
        let oldest = dump.oldest_copy.map_or_else(String::new, |(age, stream)| {
            format!(", the oldest for {} on stream {stream:#x}", seconds(age))
        });
        return cause(
            format!("most of what is held is in flight{oldest}: copies do not end, or end slowly"),
            format!("look at what blocks the stream (PINPOOL_STUCK_AFTER warns); or raise {limit}"),
        );
    }
    if kept_bytes > in_use_bytes {
        return cause(
            "most of what is held is idle, in other sizes or in pieces".to_owned(),
            "call Pool::trim, lower PINPOOL_IDLE_TIMEOUT or PINPOOL_MAX_IDLE_BYTES; or batch to fewer sizes".to_owned(),
        );
    }
    let tagged = dump.owners.iter().filter(|owner| owner.asked_bytes > 0);
    let (asked_bytes, tagged_bytes) =
        tagged.fold((0, 0), |sum, owner| (sum.0 + owner.asked_bytes, sum.1 + owner.bytes));
    if tagged_bytes > in_use_bytes / 2 && tagged_bytes >= asked_bytes.saturating_mul(WASTE_PERCENT) / 100 {
        return cause(
            format!("rounding: {asked_bytes} bytes asked for take {tagged_bytes}"),
            "PINPOOL_PRESET=adaptive, or PINPOOL_ROUNDING=exact under tensorflow".to_owned(),
        );
    }
    let oldest = dump.owners.iter().filter_map(|owner| Some((owner.oldest?, &owner.tag))).max();
    let oldest = oldest.map_or_else(
        || "; get buffers by Pool::tagged to see whose they are and how old".to_owned(),
        |(age, tag)| format!("; the oldest is {} old, of {tag}", seconds(age)),
    );
    let enough_bytes = raised_to(used_bytes.saturating_add(needed_bytes));
    cause(
        format!("nearly all that is held is in use: buffers are put back too late or not at all{oldest}"),
        format!("put buffers back sooner, lower the prefetch, or raise {limit} to {enough_bytes} bytes or more"),
    )
}

fn of_full_memory(host: &Host, needed_bytes: u64) -> Cause {
    let Host { total_bytes, available_bytes, origin, .. } = host;
    if needed_bytes > *total_bytes {
        return Cause {
            found: format!("the request alone is larger than all memory there is: {total_bytes} bytes ({origin})"),
            change: "ask for less".to_owned(),
        };
    }
    if host.is_group {
        return Cause {
            found: format!(
                "the control group is full ({available_bytes} bytes left of its {origin}): over its limit the kernel ends a \
                 process without an error"
            ),
            change: "raise memory.max (docker --memory), or lower PINPOOL_MAX_BYTES; pinned pages count as RssShmem"
                .to_owned(),
        };
    }
    Cause {
        found: format!("the machine has too little memory left: {available_bytes} bytes"),
        change: "lower PINPOOL_MAX_BYTES, or end other programs".to_owned(),
    }
}

fn seconds(age: Duration) -> String {
    format!("{} s", age.as_secs())
}

#[cfg(test)]
mod tests {
    use super::super::{Owner, Request};
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_request_over_all_memory_is_no_matter_of_other_programs() {
        let host = Host { total_bytes: 8 * GIB, available_bytes: GIB, origin: "machine".to_owned(), is_group: false };
        assert_eq!(of_full_memory(&host, 9 * GIB).change, "ask for less");
        assert!(of_full_memory(&host, 2 * GIB).change.contains("other programs"));
    }

    fn full(usage: UsageReport, refused: Refused) -> Dump {
        Dump {
            device: String::new(),
            allocator: String::new(),
            owners: Vec::new(),
            usage: UsageReport { held_bytes: 4 * GIB, max_bytes: Some(4 * GIB), ..usage },
            free_bytes: 0,
            peak_bytes: 4 * GIB,
            oldest_copy: None,
            host: Some(Host {
                total_bytes: 64 * GIB,
                available_bytes: 32 * GIB,
                origin: "machine".to_owned(),
                is_group: false,
            }),
            request: Some(Request { asked_bytes: GIB, needed_bytes: GIB, tag: None, refused }),
            limit: "PINPOOL_MAX_BYTES",
        }
    }

    #[track_caller]
    fn says(dump: &Dump, found: &str, change: &str) {
        let cause = likely(dump).unwrap();
        assert!(cause.found.contains(found) && cause.change.contains(change), "{cause:?}");
    }

    #[test]
    fn each_of_the_seven_cases_is_told_by_its_numbers() {
        let ceiling = Refused::Limit { name: "PINPOOL_MAX_BYTES", could_fit: true };
        let of_source =
            |code| Refused::Source { error: "cuMemCreate failed".to_owned(), code: Some(code), remedy: None };
        let in_use = UsageReport { in_use_bytes: 4 * GIB, ..Default::default() };
        let mut dump = full(in_use, ceiling.clone());
        says(
            &dump,
            "in use: buffers are put back too late or not at all; get buffers by Pool::tagged",
            "PINPOOL_MAX_BYTES to 5368709120",
        );
        let bytes = 4 * GIB;
        let owner =
            Owner { tag: "a".to_owned(), buffers: 4, bytes, asked_bytes: bytes, oldest: Some(Duration::from_secs(90)) };
        dump.owners = vec![owner.clone()];
        says(&dump, "the oldest is 90 s old, of a", "PINPOOL_MAX_BYTES");
        dump.owners = vec![Owner { asked_bytes: 2 * GIB + 1, ..owner }];
        says(&dump, "rounding: 2147483649 bytes asked for take 4294967296", "PINPOOL_ROUNDING");

        let idle = UsageReport { in_use_bytes: GIB, idle_bytes: 3 * GIB, ..Default::default() };
        says(&full(idle, ceiling.clone()), "most of what is held is idle", "PINPOOL_IDLE_TIMEOUT");
        let in_flight = UsageReport { in_use_bytes: GIB, in_flight_bytes: 3 * GIB, ..Default::default() };
        let copies = Dump { oldest_copy: Some((Duration::from_secs(45), 16)), ..full(in_flight, ceiling.clone()) };
        says(&copies, "in flight, the oldest for 45 s on stream 0x10", "PINPOOL_STUCK_AFTER");
        says(&full(in_use, of_source(2)), "the back-end refused though 34359738368 bytes are free", "vm.max_map_count");
        let group = |is_group| {
            Some(Host { total_bytes: 8 * GIB, available_bytes: 1 << 20, origin: "cgroup limit x".to_owned(), is_group })
        };
        says(&Dump { host: group(true), ..full(in_use, ceiling.clone()) }, "the control group is full", "memory.max");
        says(
            &Dump { host: group(false), ..full(in_use, of_source(2)) },
            "the machine has too little memory left",
            "PINPOOL_MAX_BYTES",
        );
        let remedy = Some("raise vm.max_map_count");
        let says_why = Refused::Source { error: "mmap failed".to_owned(), code: Some(12), remedy };
        says(&full(in_use, says_why), "what the driver or the kernel says above", "raise vm.max_map_count");
        says(&full(in_use, of_source(700)), "an error of earlier work (code 700)", "first CUDA error");
        let too_large = Refused::Limit { name: "PINPOOL_MAX_BYTES", could_fit: false };
        says(&full(in_use, too_large), "the request alone is larger than PINPOOL_MAX_BYTES", "ask for less");
    }

    #[test]
    fn a_dump_of_a_healthy_pool_has_no_cause() {
        let ceiling = Refused::Limit { name: "PINPOOL_MAX_BYTES", could_fit: true };
        let usage = |in_use_bytes, idle_bytes| UsageReport { in_use_bytes, idle_bytes, ..Default::default() };
        let at = |usage| Dump { request: None, ..full(usage, ceiling.clone()) };
        assert_eq!(likely(&at(usage(GIB, 3 * GIB))), None);
        assert_eq!(likely(&at(UsageReport { in_flight_bytes: 3 * GIB, ..usage(0, GIB) })), None);
        assert!(likely(&at(usage(4 * GIB, 0))).is_some());
        assert!(likely(&at(UsageReport { fallback_bytes: 1, ..usage(GIB, 0) })).is_some());
        let copy = |seconds| Dump { oldest_copy: Some((Duration::from_secs(seconds), 1)), ..at(usage(GIB, 0)) };
        assert!(likely(&copy(29)).is_none() && likely(&copy(30)).is_some());
    }

    #[test]
    fn a_machine_that_is_full_is_no_cause_of_a_ceiling() {
        let ceiling = Refused::Limit { name: "PINPOOL_MAX_BYTES", could_fit: true };
        let in_use = UsageReport { in_use_bytes: 4 * GIB, ..Default::default() };
        let host = Some(Host { total_bytes: GIB, available_bytes: 0, origin: "machine".to_owned(), is_group: false });
        says(&Dump { host, ..full(in_use, ceiling) }, "nearly all that is held is in use", "PINPOOL_MAX_BYTES");
    }
}
