//! Snapshots of a recording, judged: the pools as they were seen while it was made.
//!
//! A get is recorded when it was served, with how long it took: it was asked that much earlier, and what its thread spent in calls
//! of the back-end meanwhile was no waiting. A get that waits through the end of a window is in none of its records, so those gets are
//! found first.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::news::worst;
use super::snapshot::{AGED, Holder, Snapshot, UNKNOWN_BYTES};
use super::waits::{Wait, Waits};
use super::{Cause, GETS_MIN, Judge, Judgement, Lost, RecentLengths, largest};
use crate::record::{Event, Record, Recording};

/// A get that waited less found memory at once.
const WAITED_NS: u64 = 200_000;
/// Between two refused gets at which the pool is looked at.
const REFUSED_EVERY_NS: u64 = 100_000_000;
/// The holder of buffers without a tag.
const UNTAGGED: &str = "(untagged)";
/// Parts of the recording; one has ten seconds at least.
const PARTS: u64 = 100;

/// A pool of a recording.
#[derive(Debug, Clone)]
pub struct PoolJudgement {
    /// Its number in the recording.
    pub pool: u32,
    pub name: String,
    /// That of the windows that cost most, with the time lost over the whole recording.
    pub judgement: Judgement,
    pub gets: u64,
    /// Gets that waited, page-locked or moved memory.
    pub slow_gets: u64,
    /// Gets that waited: when they were served, and for how long they had waited, in nanoseconds.
    pub waits: Vec<(u64, u64)>,
}

/// The judgement of each pool that has gets, the one that lost most time first, alarms before others.
pub fn judge_recording(recording: &Recording) -> Vec<PoolJudgement> {
    let mut pools: HashMap<u32, Watched<'_>> = HashMap::new();
    let mut calls = HashMap::new();
    let end_ns = recording.records.last().map_or(0, |record| record.time_ns);
    let window_us = (end_ns / 1000 / PARTS).max(super::WINDOW_US);
    let mut waits = Waits::of(recording);
    for record in &recording.records {
        let demand = || {
            let waits = waits.remove(&record.pool).unwrap_or_default();
            Watched { waits, ..Watched::new(recording, record.pool, window_us, end_ns / 2) }
        };
        pools.entry(record.pool).or_insert_with(demand).apply(record, &mut calls);
    }
    let mut judged: Vec<_> =
        pools.into_iter().filter_map(|(number, pool)| pool.finish(number, end_ns / 1000)).collect();
    // An unpinned pool next to pinned ones of the process is a mistake.
    let is_pinned = |pool: u32| recording.pool(pool).is_some_and(|pool| pool.fact("pinned") == Some("yes"));
    let has_pinned = judged.iter().any(|one| is_pinned(one.pool));
    for one in judged.iter_mut().filter(|one| has_pinned && one.judgement.cause == Cause::NotPinned) {
        one.judgement.is_alarm = true;
    }
    judged.sort_by_key(|one| {
        let Judgement { is_alarm, lost, .. } = &one.judgement;
        (!is_alarm, std::cmp::Reverse(lost.total_ns()), one.pool)
    });
    judged
}

/// A buffer that is out.
#[derive(Debug, Clone, Copy)]
struct Out {
    class_bytes: u64,
    since_ns: u64,
    tag: u32,
    /// Of the call stack; 0 of a get that was not sampled.
    stack: u32,
    thread: u32,
    is_in_flight: bool,
    in_flight_since_ns: u64,
}

/// Time in `calls` of the source that ended since then.
fn spent_since(begun_ns: u64, calls: Option<Vec<(u64, u64)>>) -> u64 {
    calls.unwrap_or_default().iter().filter(|(at, _)| *at >= begun_ns).map(|(_, took)| took).sum()
}

/// One pool, while its records are read.
struct Watched<'a> {
    recording: &'a Recording,
    name: String,
    judge: Judge,
    now: Snapshot,
    /// The middle of the recording, and what was held then.
    middle_ns: u64,
    middle: Option<Snapshot>,
    window_us: u64,
    next_us: u64,
    out: HashMap<u64, Out>,
    idle: HashMap<u64, u64>,
    /// Memory that no get has been served from.
    new: HashMap<u64, bool>,
    lengths: RecentLengths,
    /// Buffers of each size now and at most, and those made, where an eviction is a release.
    sizes: HashMap<u64, (u64, u64, u64)>,
    waits: Waits,
    /// When a get was refused last, in the window that is not over, and the pool then.
    at_refusal: Option<(u64, Snapshot)>,
    /// Bytes that were used until a time, those of later times ever fewer: the first one from a time on is the most since then.
    levels: VecDeque<(u64, u64)>,
    /// Whether the ceiling is shared with other processes.
    has_ledger: bool,
    /// The most that was used and asked for by a get that waited below the pool's own ceiling.
    lacked_bytes: u64,
    /// Whether the back-end has refused.
    has_refused: bool,
    has_ended: bool,
    /// Threads whose next get stood in the wait queue.
    queued: HashSet<u32>,
    slow_gets: u64,
    waited: Vec<(u64, u64)>,
    judgements: Vec<Judgement>,
}

impl<'a> Watched<'a> {
    fn new(recording: &'a Recording, number: u32, window_us: u64, middle_ns: u64) -> Self {
        let fact = |name: &str| recording.pool(number).and_then(|pool| pool.fact(name));
        let is_direct = fact("PINPOOL_PRESET") == Some("tensorflow");
        let limit = fact("PINPOOL_POOL_SIZE_LIMIT").and_then(|limit| limit.parse().ok());
        let now = Snapshot {
            is_pinned: fact("pinned") != Some("no"),
            remote_puts: Some(0),
            pool_size_limit: limit.filter(|_| is_direct),
            ..Snapshot::default()
        };
        Self {
            recording,
            name: fact("name").map_or_else(|| format!("pool {number}"), str::to_owned),
            judge: Judge::default(),
            now,
            middle_ns,
            middle: None,
            window_us,
            next_us: window_us,
            out: HashMap::new(),
            idle: HashMap::new(),
            new: HashMap::new(),
            lengths: RecentLengths::default(),
            sizes: HashMap::new(),
            waits: Waits::default(),
            at_refusal: None,
            levels: VecDeque::new(),
            has_ledger: fact("PINPOOL_LEDGER").is_some_and(|name| name != "none"),
            lacked_bytes: 0,
            has_refused: false,
            has_ended: false,
            queued: HashSet::new(),
            slow_gets: 0,
            waited: Vec::new(),
            judgements: Vec::new(),
        }
    }

    fn apply(&mut self, record: &Record, calls: &mut HashMap<u32, Vec<(u64, u64)>>) {
        while record.time_ns / 1000 >= self.next_us {
            let at_us = self.next_us;
            self.next_us += self.window_us;
            self.end_window(at_us);
        }
        let (now_ns, thread) = (record.time_ns, record.thread);
        if now_ns >= self.middle_ns && self.middle.is_none() {
            self.middle = Some(Snapshot { holders: self.holders(now_ns), ..self.now.clone() });
        }
        while self.levels.back().is_some_and(|&(_, used_bytes)| used_bytes <= self.now.used_bytes) {
            self.levels.pop_back();
        }
        self.levels.push_back((now_ns, self.now.used_bytes));
        let mut called = |took_ns: u64| calls.entry(thread).or_default().push((now_ns, took_ns));
        match record.event {
            Event::New { id, class_bytes, from_source, .. } => {
                self.new.insert(id, from_source);
                if self.now.pool_size_limit.is_some() {
                    let (now, most, made) = self.sizes.entry(class_bytes).or_default();
                    (*now, *made) = (*now + 1, *made + 1);
                    *most = (*most).max(*now);
                }
                self.idle.insert(id, class_bytes);
                self.now.idle_bytes += class_bytes;
            }
            Event::Get { id, bytes, class_bytes, tag, took_ns } => {
                let begun_ns = now_ns.saturating_sub(took_ns);
                let spent_ns = spent_since(begun_ns, calls.remove(&thread));
                let is_queued = self.queued.remove(&thread);
                self.ended(begun_ns, now_ns, took_ns.saturating_sub(spent_ns), class_bytes, (is_queued, spent_ns > 0));
                let (stack, is_in_flight, in_flight_since_ns) = (0, false, 0);
                let out = Out { class_bytes, since_ns: now_ns, tag, stack, thread, is_in_flight, in_flight_since_ns };
                self.got(id, out);
                match self.new.remove(&id) {
                    Some(true) => {
                        let len = if self.now.pool_size_limit.is_some() { class_bytes } else { bytes };
                        self.now.misses += 1;
                        self.now.new_lengths += u64::from(self.lengths.is_new(len));
                    }
                    Some(false) => {
                        self.now.misses += 1;
                        self.now.short_gets += 1;
                    }
                    None => {}
                }
            }
            Event::Waited => _ = self.queued.insert(thread),
            Event::Sampled { id, stack } => self.out.get_mut(&id).into_iter().for_each(|out| out.stack = stack),
            Event::Refused { class_bytes, took_ns, .. } => {
                self.now.short_gets += 1;
                self.now.gets += 1;
                self.now.failed_gets += 1;
                self.now.is_by_source &= !self.is_full(self.now.used_bytes + class_bytes);
                let from_ns = now_ns.saturating_sub(took_ns);
                self.now.waiting_ns += took_ns.saturating_sub(spent_since(from_ns, calls.remove(&thread)));
                self.queued.remove(&thread);
                let needed_bytes = self.now.used_bytes + class_bytes;
                if self.is_full(needed_bytes) {
                    self.waits.ended(Wait { from_ns, to_ns: now_ns, bytes: class_bytes });
                } else {
                    self.lacked_bytes = self.lacked_bytes.max(needed_bytes);
                }
                // Of gets that are refused one after the other it is enough to look at some.
                if self.at_refusal.as_ref().is_none_or(|(before_ns, _)| now_ns >= before_ns + REFUSED_EVERY_NS) {
                    self.note_needs(&[]);
                    let now = Snapshot { holders: self.holders(now_ns), waiting: 0, ..self.now.clone() };
                    self.at_refusal = Some((now_ns, now));
                }
            }
            Event::Put { id, in_flight } => {
                self.now.puts += 1;
                if let Some(out) = self.out.get_mut(&id) {
                    self.now.remote_puts = self.now.remote_puts.map(|puts| puts + u64::from(out.thread != thread));
                    if in_flight {
                        (out.is_in_flight, out.in_flight_since_ns) = (true, now_ns);
                        self.now.in_flight_bytes += out.class_bytes;
                        self.now.copies += 1;
                        return;
                    }
                }
                self.back(id, now_ns);
            }
            Event::Completed { id } => self.back(id, now_ns),
            Event::Gone { id } => {
                self.back(id, now_ns);
                self.new.remove(&id);
                let class_bytes = self.idle.remove(&id).unwrap_or(0);
                self.now.idle_bytes -= class_bytes.min(self.now.idle_bytes);
                self.now.evicted += u64::from(!self.has_ended);
                self.sizes.entry(class_bytes).and_modify(|(now, ..)| *now -= 1.min(*now));
            }
            Event::Leaked { id } => _ = self.out.remove(&id),
            Event::Pin { bytes, took_ns, failed, .. } => {
                called(took_ns);
                self.now.page_locking_ns += took_ns;
                self.has_refused |= failed;
                self.now.is_by_source |= failed;
                if !failed {
                    self.now.page_locks += 1;
                    self.now.pinned_bytes += bytes;
                    self.now.held_bytes += bytes;
                    self.now.most_held_bytes = self.now.most_held_bytes.max(self.now.held_bytes);
                }
            }
            Event::Unpin { bytes, took_ns, failed, .. } if !self.has_ended => {
                called(took_ns);
                self.now.page_locking_ns += took_ns;
                if !failed {
                    self.now.unpinned_bytes += bytes;
                    self.now.held_bytes = self.now.held_bytes.saturating_sub(bytes);
                }
            }
            Event::Move { took_ns, .. } => {
                called(took_ns);
                self.now.moving_ns += took_ns;
            }
            Event::Limit { to, .. } => self.now.pool_size_limit = self.now.pool_size_limit.map(|_| to),
            Event::Ceiling { bytes } => {
                self.now.max_bytes = Some(bytes).filter(|&bytes| bytes != u64::MAX);
                self.now.limit = self.now.max_bytes.map(|_| "PINPOOL_MAX_BYTES");
            }
            Event::End => self.has_ended = true,
            _ => {}
        }
    }

    fn got(&mut self, id: u64, out: Out) {
        self.back(id, out.since_ns);
        self.now.gets += 1;
        self.now.idle_bytes -= self.idle.remove(&id).unwrap_or(0).min(self.now.idle_bytes);
        self.now.used_bytes += out.class_bytes;
        self.now.used += 1;
        self.changed(out.since_ns, true, out.class_bytes);
        self.out.insert(id, out);
    }

    fn back(&mut self, id: u64, now_ns: u64) {
        let Some(out) = self.out.remove(&id) else { return };
        self.changed(now_ns, false, out.class_bytes);
        self.now.used_bytes = self.now.used_bytes.saturating_sub(out.class_bytes);
        self.now.used = self.now.used.saturating_sub(1);
        if out.is_in_flight {
            self.now.in_flight_bytes = self.now.in_flight_bytes.saturating_sub(out.class_bytes);
        }
        self.idle.insert(id, out.class_bytes);
        self.now.idle_bytes += out.class_bytes;
    }

    /// What is used is more or less from `at_ns` on.
    fn changed(&mut self, at_ns: u64, is_more: bool, bytes: u64) {
        if self.now.max_bytes.is_some() {
            self.waits.changed(at_ns, is_more, bytes);
        }
    }

    /// A get was served that waited for so long, beside calls of the back-end.
    fn ended(
        &mut self,
        begun_ns: u64,
        now_ns: u64,
        waited_ns: u64,
        class_bytes: u64,
        (is_queued, has_called): (bool, bool),
    ) {
        let first = self.levels.partition_point(|&(until_ns, _)| until_ns < begun_ns);
        let needed_bytes = self.levels.get(first).map_or(0, |&(_, used_bytes)| used_bytes) + class_bytes;
        let is_full = self.is_full(needed_bytes);
        // An older file does not say which gets stood in the queue. Time that a loaded machine takes from a get is no wait: those are at
        // a limit, or where the back-end refuses.
        let has_waited = is_queued || (!self.recording.marks_waits && waited_ns >= WAITED_NS && is_full);
        self.slow_gets += u64::from(has_waited || has_called);
        if has_waited {
            self.now.short_gets += 1;
            self.now.waiting_ns += waited_ns;
            self.waited.push((now_ns, waited_ns));
            if is_full {
                self.now.is_by_source = false;
                self.waits.ended(Wait { from_ns: begun_ns, to_ns: now_ns, bytes: class_bytes });
            } else {
                self.lacked_bytes = self.lacked_bytes.max(needed_bytes);
            }
        }
    }

    /// Whether gets wait that would bring this much into use: at a ceiling, or where the back-end refuses.
    fn is_full(&self, needed_bytes: u64) -> bool {
        self.now.max_bytes.map_or(self.has_refused, |max_bytes| needed_bytes > max_bytes - max_bytes / 8)
    }

    fn end_window(&mut self, at_us: u64) {
        let at_ns = at_us.saturating_mul(1000);
        let is_at_ceiling = |wait: &Wait| self.is_full(self.now.used_bytes + wait.bytes);
        let still: Vec<_> = self.waits.at(at_ns).filter(is_at_ceiling).collect();
        self.now.waiting = still.len() as u64;
        self.note_needs(&still);
        self.now.holders = self.holders(at_ns);
        let copies = self.out.values().filter(|out| out.is_in_flight).map(|out| out.in_flight_since_ns).min();
        self.now.oldest_copy = copies.map(|since_ns| Duration::from_nanos(at_ns.saturating_sub(since_ns)));
        // Pools that have not begun, or have ended, are not judged.
        if !self.has_ended && self.judge.look(at_us, self.now.clone()).is_some() {
            self.judgements.extend(self.judge.latest().cloned());
            self.waits.begin_window(self.now.used_bytes);
            (self.at_refusal, self.lacked_bytes) = (None, 0);
        }
    }

    /// What gets lacked, with those that `still` wait.
    fn note_needs(&mut self, still: &[Wait]) {
        self.now.recurring = self.sizes.values().filter(|(.., made)| *made > 1).map(|(_, most, _)| most).sum();
        let full_bytes = self.now.max_bytes.unwrap_or(self.now.used_bytes);
        let wanted_bytes = self.waits.most_wanted(still, full_bytes);
        self.now.needed_bytes = if wanted_bytes > 0 { wanted_bytes } else { self.lacked_bytes };
        self.now.others_bytes = self.has_ledger.then_some(UNKNOWN_BYTES);
        self.now.free_bytes = self.now.held_bytes.saturating_sub(self.now.used_bytes + self.now.idle_bytes);
    }

    fn holders(&self, at_ns: u64) -> Vec<Holder> {
        let mut holders: HashMap<u32, Holder> = HashMap::new();
        for out in self.out.values() {
            let tag = || self.recording.tag(out.tag).unwrap_or(UNTAGGED).to_owned();
            let holder = holders.entry(out.tag).or_insert_with(|| Holder { tag: tag(), ..Holder::default() });
            holder.buffers += 1;
            holder.bytes += out.class_bytes;
            let age = Duration::from_nanos(at_ns.saturating_sub(out.since_ns));
            holder.oldest = holder.oldest.max(Some(age));
            holder.aged += u64::from(age >= AGED);
        }
        for (tag, holder) in &mut holders {
            let sampled = self.out.values().filter(|out| out.tag == *tag && out.stack > 0);
            let stack = largest(sampled.map(|out| (out.stack, out.class_bytes)));
            holder.place = stack.and_then(|stack| self.recording.place(stack));
        }
        let mut holders: Vec<_> = holders.into_values().collect();
        holders.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.tag.cmp(&other.tag)));
        holders
    }

    fn finish(mut self, pool: u32, end_us: u64) -> Option<PoolJudgement> {
        if self.now.gets == 0 {
            return None;
        }
        // A program often ends with a get that failed. One that goes on has others.
        let gets = self.now.gets;
        if let Some((at_ns, now)) = self.at_refusal.take().filter(|(_, now)| gets - now.gets < GETS_MIN) {
            let last = self.judge.end_window(at_ns / 1000, now);
            // What keeps the memory is the cause of that.
            let is_known = |before: &Judgement| matches!(before.cause, Cause::Leak | Cause::StuckCopy);
            if last.is_alarm && !self.judgements.last().is_some_and(is_known) {
                self.judgements = vec![last.clone()];
            }
        }
        let begun_us = self.next_us - self.window_us;
        let is_short = self.judgements.is_empty() && end_us > begun_us;
        if is_short && self.now.gets >= GETS_MIN {
            // Shorter than a window; what a pool holds at its end is not what it held.
            self.has_ended = false;
            self.note_needs(&[]);
            let mut now = self.now.clone();
            if let Some(middle) = self.middle.take() {
                let Snapshot { used, used_bytes, in_flight_bytes, held_bytes, idle_bytes, holders, .. } = middle;
                self.judge.most_held_bytes = held_bytes;
                now = Snapshot { used, used_bytes, in_flight_bytes, held_bytes, idle_bytes, holders, ..now };
            }
            self.judgements.push(self.judge.end_window(end_us, now).clone());
        }
        let Snapshot { waiting_ns, page_locking_ns, moving_ns, .. } = self.now;
        let lost = Lost { of_us: end_us, waiting_ns, page_locking_ns, moving_ns };
        let judgement = Judgement { lost, ..worst(&self.judgements)?.clone() };
        let Self { name, slow_gets, waited: waits, now, .. } = self;
        Some(PoolJudgement { pool, name, judgement, gets: now.gets, slow_gets, waits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::PoolDescription;

    const MIB: u64 = 1 << 20;
    const SECOND_NS: u64 = 1_000_000_000;

    /// A recording of one pool, whose events come with their time and thread.
    fn judged(events: &[(u64, u32, Event)]) -> PoolJudgement {
        let record = |&(time_ns, thread, event): &(u64, u32, Event)| Record { time_ns, thread, pool: 0, event };
        let mut records: Vec<_> = events.iter().map(record).collect();
        records.sort_by_key(|record| record.time_ns);
        let pools = vec![PoolDescription { number: 0, facts: vec![("name".to_owned(), "train".to_owned())] }];
        let recording = Recording { records, pools, tags: vec![(1, "labels".to_owned())], ..Recording::default() };
        judge_recording(&recording).remove(0)
    }

    fn get(id: u64, tag: u32, took_ns: u64) -> Event {
        Event::Get { id, bytes: MIB, class_bytes: MIB, tag, took_ns }
    }

    fn put(id: u64) -> Event {
        Event::Put { id, in_flight: false }
    }

    #[test]
    fn one_buffer_in_ten_that_does_not_come_back_is_a_leak_and_a_pool_that_keeps_its_first_is_none() {
        let run = |is_kept: fn(u64) -> bool| {
            let mut events = vec![(0, 0, Event::Ceiling { bytes: 1 << 30 })];
            for n in 1..600 {
                events.push((n * SECOND_NS / 10, 0, get(n, 1, 0)));
                if !is_kept(n) {
                    events.push((n * SECOND_NS / 10 + 1000, 0, put(n)));
                }
            }
            judged(&events)
        };
        let leak = run(|n| n % 10 == 0);
        assert_eq!((leak.judgement.cause, leak.name.as_str(), leak.gets), (Cause::Leak, "train", 599));
        assert!(leak.judgement.found.starts_with("tag labels holds "), "{}", leak.judgement);
        assert_eq!(run(|n| n < 60).judgement.cause, Cause::Healthy);
    }

    #[test]
    fn threads_that_wait_at_the_ceiling_need_what_they_held_and_waited_for_together() {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: 4 * MIB })];
        // Four threads hold a MiB each all the time; two more wait for it, half a second each time.
        for n in 0..400 {
            let (at_ns, thread) = (n * SECOND_NS / 8, u32::try_from(n % 6).unwrap());
            events.push((at_ns + 10, thread, get(n, 0, if n < 4 { 0 } else { SECOND_NS / 4 })));
            events.push((at_ns + SECOND_NS / 2, thread, put(n)));
        }
        let PoolJudgement { judgement, slow_gets, .. } = judged(&events);
        assert_eq!((judgement.cause, judgement.setting), (Cause::LimitTooSmall, Some(("PINPOOL_MAX_BYTES", 6 * MIB))));
        assert!(slow_gets > 390 && judgement.lost.waiting_ns > 90 * SECOND_NS, "{judgement}");
    }

    #[test]
    fn time_in_calls_of_the_back_end_is_no_wait() {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: MIB })];
        for n in 0..300 {
            let (at_ns, took_ns) = (n * SECOND_NS / 10, 40_000_000);
            events.push((at_ns + 41_000_000, 0, Event::Pin { address: 1, bytes: MIB, took_ns, failed: false }));
            events.push((at_ns + 42_000_000, 0, get(n, 0, 40_100_000)));
            events.push((at_ns + 43_000_000, 0, put(n)));
        }
        let PoolJudgement { judgement, slow_gets, .. } = judged(&events);
        assert_eq!((slow_gets, judgement.lost.waiting_ns / SECOND_NS), (300, 0), "{judgement}");
        assert!(judgement.lost.page_locking_ns > 11 * SECOND_NS, "{judgement}");
    }

    /// A buffer of a MiB each tenth of a second, each put when the sixth after it is there, until a get of three waits in vain.
    fn until_refused(max_bytes: u64, gets: u64, wait_ns: u64, is_kept: fn(u64) -> bool) -> Judgement {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: max_bytes })];
        for n in 1..=gets {
            events.push((n * SECOND_NS / 10, 0, get(n, 1, 0)));
            if n > 6 && !is_kept(n) {
                events.push((n * SECOND_NS / 10 + 1000, 0, put(n - 6)));
            }
        }
        let end_ns = gets * SECOND_NS / 10 + wait_ns;
        let refused = Event::Refused { bytes: 3 * MIB, class_bytes: 3 * MIB, tag: 1, took_ns: wait_ns };
        events.push((end_ns, 0, refused));
        // The program ends, and puts what it has.
        (gets - 5..=gets).for_each(|n| events.push((end_ns + 1000, 0, put(n))));
        events.push((end_ns + 2000, 0, Event::End));
        judged(&events).judgement
    }

    #[test]
    fn a_recording_that_ends_with_a_get_that_failed_says_why() {
        for (gets, wait_ns) in [(50, 30 * SECOND_NS), (50, SECOND_NS), (300, 30 * SECOND_NS), (300, 2 * SECOND_NS)] {
            let judgement = until_refused(8 * MIB, gets, wait_ns, |_| false);
            let setting = Some(("PINPOOL_MAX_BYTES", 11 * MIB));
            assert_eq!((judgement.cause, judgement.setting), (Cause::LimitTooSmall, setting), "{judgement}");
        }
        for wait_ns in [SECOND_NS, 30 * SECOND_NS] {
            let leak = until_refused(53 * MIB, 900, wait_ns, |n| n % 20 == 0);
            assert_eq!(leak.cause, Cause::Leak, "{leak}");
        }
    }

    #[test]
    fn a_get_that_failed_long_before_the_end_is_not_the_cause() {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: 8 * MIB })];
        for n in 1..=1990 {
            events.push((n * SECOND_NS / 10, 0, get(n, 1, 0)));
            events.push((n * SECOND_NS / 10 + 1000, 0, put(n)));
        }
        let took_ns = SECOND_NS / 2;
        let refused = Event::Refused { bytes: 3 * MIB, class_bytes: 3 * MIB, tag: 1, took_ns };
        events.push((196 * SECOND_NS, 1, refused));
        let judgement = judged(&events).judgement;
        assert!(!judgement.is_alarm, "{judgement}");
    }

    #[test]
    fn a_page_lock_that_lasts_is_no_wait() {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: 40 * MIB })];
        for n in 0..40 {
            let (at_ns, took_ns) = ((n + 1) * SECOND_NS, SECOND_NS - 1000);
            events.push((at_ns - 10, 0, Event::Pin { address: 1, bytes: MIB, took_ns, failed: false }));
            events.push((at_ns, 0, get(n, 0, took_ns)));
        }
        let judgement = judged(&events).judgement;
        assert!(!judgement.is_alarm && judgement.lost.waiting_ns < SECOND_NS, "{judgement}");
    }

    #[test]
    fn a_slow_consumer_is_told_from_threads_that_put_back_what_they_got() {
        let run = |consumer: u32, gets: u64| {
            let mut events = vec![(0, 0, Event::Ceiling { bytes: 32 * MIB })];
            // The queue is full: a buffer is got when the one before the 32 last is put.
            for n in 0..gets {
                events.push((n * SECOND_NS / 20 + 10, 0, get(n, 1, if n < 32 { 0 } else { SECOND_NS / 25 })));
                events.push(((n + 32) * SECOND_NS / 20, consumer, put(n)));
            }
            judged(&events).judgement
        };
        let slow = run(1, 1200);
        assert_eq!((slow.cause, slow.setting), (Cause::SlowConsumer, None), "{slow}");
        assert!(
            slow.found.ends_with("20.0 buffers are returned per second, each after 1.6s (mostly tag labels)"),
            "{slow}"
        );
        assert_eq!(run(0, 1200).cause, Cause::LimitTooSmall);
        // Nothing is in use at the end of a program that lasts for seconds.
        assert_eq!(run(1, 140).cause, Cause::SlowConsumer);
    }

    #[test]
    fn six_threads_under_a_ceiling_of_four_buffers_need_six() {
        let (step_ns, woken_ns) = (SECOND_NS / 200, 60_000);
        let mut events = vec![(0, 0, Event::Ceiling { bytes: 4 * MIB })];
        // A thread puts a buffer and asks for the next one before the thread that is served by it has woken.
        for n in 0..4000_u64 {
            let put_ns = |n: u64| (n + 1) * step_ns;
            let asked_ns = n.checked_sub(6).map_or(1000, |before| put_ns(before) + 1000);
            let served_ns = n.checked_sub(4).map_or(asked_ns, |freed| put_ns(freed) + woken_ns);
            let thread = u32::try_from(n % 6).unwrap();
            events.push((served_ns, thread, get(n, 1, served_ns - asked_ns)));
            events.push((put_ns(n), thread, put(n)));
        }
        let judged = judged(&events).judgement;
        assert_eq!(
            (judged.cause, judged.setting),
            (Cause::LimitTooSmall, Some(("PINPOOL_MAX_BYTES", 6 * MIB))),
            "{judged}"
        );
    }

    /// A recording that marks waits, of a pool with these facts.
    fn marked(facts: &[(&str, &str)], events: &[(u64, u32, Event)]) -> PoolJudgement {
        let record = |&(time_ns, thread, event): &(u64, u32, Event)| Record { time_ns, thread, pool: 0, event };
        let facts = facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let pools = vec![PoolDescription { number: 0, facts }];
        let records = events.iter().map(record).collect();
        judge_recording(&Recording { records, pools, marks_waits: true, ..Recording::default() }).remove(0)
    }

    #[test]
    fn a_get_that_was_late_and_did_not_stand_in_the_queue_has_not_waited() {
        let run = |is_queued: bool| {
            let mut events = vec![(0, 0, Event::Ceiling { bytes: MIB })];
            for n in 1..200 {
                let at = n * SECOND_NS / 10;
                events.extend(is_queued.then_some((at, 0, Event::Waited)));
                events.extend([(at, 0, get(n, 0, 50_000_000)), (at + 1000, 1, put(n))]);
            }
            marked(&[("PINPOOL_LEDGER", "job")], &events)
        };
        let late = run(false);
        assert_eq!((late.judgement.is_alarm, late.slow_gets, late.judgement.lost.waiting_ns), (false, 0, 0));
        assert_eq!(run(true).slow_gets, 199);
    }

    #[test]
    fn a_get_that_is_refused_below_the_limit_of_its_pool_lacks_what_other_processes_hold() {
        let mut events = vec![(0, 0, Event::Ceiling { bytes: 256 * MIB })];
        for n in 1..200 {
            let refused = Event::Refused { bytes: MIB, class_bytes: MIB, tag: 0, took_ns: SECOND_NS / 20 };
            events.extend([(n * SECOND_NS / 10, 0, get(n, 0, 0)), (n * SECOND_NS / 10 + 1000, 0, put(n))]);
            events.push((n * SECOND_NS / 10 + 2000, 0, refused));
        }
        let judged = marked(&[("PINPOOL_LEDGER", "job")], &events);
        assert_eq!((judged.judgement.cause, judged.judgement.setting), (Cause::OtherProcess, None), "{judged:?}");
    }
}
