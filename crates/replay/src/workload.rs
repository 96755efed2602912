//! A complete trace, read and checked once, which can be replayed under many settings.
//!
//! Contains everything that does not depend on a pool: the steps of each thread, the number of requests, and the peak of the
//! requested bytes. A trace of requests is read as a recording of one thread. Several pools are replayed as one pool.

use std::collections::BTreeSet;
use std::io;

use super::cost::TimedCall;
use super::format::{DURATION_US_MAX, Trace, TraceError};
use super::sim::move_ns;
use super::threads::{Step, Threads};
use pinpool_observe::diagnosis::words::counted;
use pinpool_observe::record::{Event, Record, Recording, SET_IN_CODE};

pub(super) const MAX_BYTES: &str = "PINPOOL_MAX_BYTES";
/// The variable of the preset. Each value of [`ROUNDING`] belongs to one preset.
pub(super) const PRESET: &str = "PINPOOL_PRESET";
pub(super) const ROUNDING: &str = "PINPOOL_ROUNDING";

/// A trace in which every return has its request.
#[derive(Debug, Clone, Default)]
pub struct Workload {
    pub(super) threads: Vec<Vec<Step>>,
    /// `true` if the threads of the program are known: a replay then blocks each thread while its request waits.
    pub is_closed: bool,
    /// `true` if requests waited when it was recorded.
    pub has_waited: bool,
    /// Requests of more than zero bytes.
    pub requests: u64,
    get_bytes: u64,
    /// Duration in microseconds; 0 without `t` lines.
    pub duration_us: u64,
    /// After each operation, its time in microseconds, and the requested bytes that are held.
    used: Vec<(u64, u64)>,
    /// The pin calls of a recording.
    pub pins: Vec<TimedCall>,
    /// The unpin calls of a recording.
    pub unpins: Vec<TimedCall>,
    /// Duration of the remaps of a recording, and the duration that the replay assumes, in nanoseconds.
    moves_ns: (u64, u64),
    /// The reason why the recording is incomplete.
    pub warning: Option<String>,
    /// Numbers of the pools with requests.
    pools: BTreeSet<u32>,
    /// Time at which the last buffer of a recording was returned, in microseconds.
    pub(super) ended_us: u64,
    /// Variables with the values that the pools of a recording used.
    settings: Vec<(String, String)>,
    /// Variables without effect because the program sets them in its code.
    set_in_code: Vec<String>,
    /// Requests that failed when it was recorded; no replay contains them.
    pub failed_requests: u64,
}

impl Workload {
    /// Creates the workload of a recording. A return with copies in flight counts at the time at which they have completed.
    ///
    /// # Errors
    ///
    /// If it lasts longer than a year.
    pub fn from_recording(recording: &Recording) -> Result<Self, TraceError> {
        // The workload begins at a whole microsecond, as a text trace does.
        Self::begun_at(recording.records.first().map_or(0, |record| record.time_ns / 1_000 * 1_000), recording, true)
    }

    fn begun_at(begun_ns: u64, recording: &Recording, is_closed: bool) -> Result<Self, TraceError> {
        let (mut threads, mut limit) = (Threads::default(), None);
        let mut workload = Self { is_closed, ..Self::default() };
        for (line, record) in (1..).zip(&recording.records) {
            let record = Record { time_ns: record.time_ns.saturating_sub(begun_ns), ..*record };
            match record.event {
                // An empty buffer has no memory.
                Event::Get { bytes: 0, .. } => continue,
                Event::Pin { bytes, took_ns, failed: false, .. } => workload.pins.push(TimedCall { bytes, took_ns }),
                Event::Unpin { bytes, took_ns, failed: false, .. } => {
                    workload.unpins.push(TimedCall { bytes, took_ns });
                }
                Event::Move { bytes, took_ns, .. } => {
                    // The first piece of a call carries the time of all pieces.
                    let model_ns = move_ns(bytes, took_ns > 0);
                    workload.moves_ns = (workload.moves_ns.0 + took_ns, workload.moves_ns.1 + model_ns);
                }
                Event::MaxBytes { bytes } => limit = Some(bytes),
                Event::Refused { .. } => workload.failed_requests += 1,
                Event::Get { bytes, .. } => {
                    workload.pools.insert(record.pool);
                    workload.requests += 1;
                    workload.get_bytes = workload.get_bytes.saturating_add(bytes);
                }
                _ => {}
            }
            if threads.add(line, &record) || matches!(record.event, Event::Cleared) || !is_closed {
                workload.duration_us = record.time_ns / 1_000;
                workload.used.push((workload.duration_us, threads.held_bytes));
            }
        }
        if workload.duration_us > DURATION_US_MAX {
            return Err(TraceError::Io(io::Error::other("it lasts longer than a year")));
        }
        let left_out = (workload.failed_requests > 0).then(|| {
            let left_out = counted(workload.failed_requests, "request");
            format!("left out: {left_out} that failed when it was recorded; the program needs more than this shows")
        });
        workload.warning = recording.warning.clone().or(left_out);
        (workload.ended_us, workload.has_waited) = (threads.last_put_ns / 1_000, threads.has_waited);
        workload.threads = threads.into_steps();
        // The limit comes from the records, not from the settings of the pools.
        let limit = limit.map(|bytes| if bytes == u64::MAX { "none".to_owned() } else { bytes.to_string() });
        workload.settings.extend(limit.map(|limit| (MAX_BYTES.to_owned(), limit)));
        for pool in recording.pools.iter().filter(|pool| workload.pools.contains(&pool.number)) {
            let set_in_code = pool.fact(SET_IN_CODE).unwrap_or_default();
            workload.set_in_code.extend(set_in_code.split_whitespace().map(str::to_owned));
            let settings = pool.facts.iter().filter(|(name, _)| name.starts_with("PINPOOL_") && name != MAX_BYTES);
            workload.settings.extend(settings.cloned());
        }
        Ok(workload)
    }

    /// Returns the settings of a recording of one pool. Returns none for several pools, or for a trace of requests.
    pub fn settings(&self) -> &[(String, String)] {
        if self.pools.len() > 1 { &[] } else { &self.settings }
    }

    /// Returns whether the variable has no effect because the program's code sets it. Preset and rounding count as one
    /// variable, since each rounding fits only one preset.
    pub fn is_set_in_code(&self, name: &str) -> bool {
        let is_set = |name: &str| self.set_in_code.iter().any(|set| set == name);
        is_set(name) || [PRESET, ROUNDING].contains(&name) && (is_set(PRESET) || is_set(ROUNDING))
    }

    /// Returns the workload that the same program would have if backend calls took no time, and if no thread queued behind
    /// another thread that waits for memory. Its steps follow each other sooner.
    pub fn without_delays(&self) -> Self {
        let mut workload = self.clone();
        for step in workload.threads.iter_mut().flatten() {
            step.gap_ns = step.gap_ns.saturating_sub(step.calls_ns.max(step.queued_ns));
        }
        workload
    }

    /// Creates the workload of a trace of requests.
    ///
    /// # Errors
    ///
    /// If it lasts longer than a year.
    pub fn of_trace(trace: Trace) -> Result<Self, TraceError> {
        let Trace { mut records, ended_ns: time_ns, .. } = trace;
        records.push(Record { time_ns, thread: 0, pool: 0, event: Event::End });
        Self::begun_at(0, &Recording { records, ..Recording::default() }, false)
    }

    /// Returns the bytes requested and not returned, averaged over the time of the trace; `None` for a trace without time.
    pub fn mean_requested_bytes(&self) -> Option<u64> {
        let spans = self.used.windows(2).map(|pair| u128::from(pair[0].1) * u128::from(pair[1].0 - pair[0].0));
        u64::try_from(spans.sum::<u128>().checked_div(self.duration_us.into())?).ok()
    }

    /// Returns the duration of the remaps of a recording, relative to the duration that the replay assumes; 1 without remaps.
    pub fn move_scale(&self) -> f64 {
        let (took_ns, model_ns) = self.moves_ns;
        if took_ns == 0 { 1.0 } else { took_ns as f64 / model_ns as f64 }
    }

    /// Returns whether the peak use grows by a twentieth in each eighth of the time, so that a longer run would use more.
    pub fn grows(&self) -> bool {
        let mut peaks = [0_u64; 8];
        for &(at_us, used_bytes) in &self.used {
            let part = (at_us * 8).checked_div(self.duration_us).map_or(0, |part| part.min(7));
            let peak = &mut peaks[usize::try_from(part).unwrap_or(7)];
            *peak = used_bytes.max(*peak);
        }
        peaks.windows(2).all(|pair| pair[1] > pair[0] + pair[0] / 20)
    }

    /// Returns the number of pools that are replayed as one, or `None` if at most one has requests.
    pub fn pools_merged(&self) -> Option<usize> {
        Some(self.pools.len()).filter(|&pools| pools > 1)
    }

    /// Returns a note about [`pools_merged`](Self::pools_merged) for users.
    pub fn pools_note(&self) -> Option<String> {
        self.pools_merged()
            .map(|pools| format!("it has {pools} pools, which are played as one; PINPOOL_* variables apply to each"))
    }

    /// Returns the mean bytes of a request; 0 without requests.
    pub fn mean_get_bytes(&self) -> u64 {
        self.get_bytes.checked_div(self.requests).unwrap_or(0)
    }

    /// Returns the peak of the bytes requested and not returned, without rounding.
    pub fn peak_requested_bytes(&self) -> u64 {
        self.used.iter().map(|(_, used_bytes)| *used_bytes).max().unwrap_or(0)
    }
}
