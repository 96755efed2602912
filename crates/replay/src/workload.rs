//! A complete trace: read once, checked and measured, so that it can be replayed under many settings.
//!
//! Owns what does not depend on a pool: the held names, the number of requests, and the peak of the requested bytes. Ignores the
//! settings of the header and the `p` lines, which belong to the comparison with TensorFlow's pool: a workload has one pool,
//! and the replay sets its limit and rounding. It counts how many pools that merges.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use super::cost::TimedCall;
use super::format::{TraceError, TraceOp, TraceReader};
use super::input::Input;
use super::open::{Trace, read_file};
use super::priced::move_ns;
use super::recorded::RecordedSettings;
use super::threads::{Step, Threads};
use crate::format::DEFAULT_ALIGN;
use pinpool_observe::judge::words::counted;
use pinpool_observe::judge::{PoolJudgement, judge_recording};
use pinpool_observe::record::{Event, Recording};

/// Longest duration of a workload: a replay polls the pool once a second.
const MAX_DURATION_US: u64 = 366 * 24 * 3_600 * 1_000_000;

/// A trace in which every return has its request.
#[derive(Debug, Clone, Default)]
pub struct Workload {
    lines: Vec<(u64, TraceOp)>,
    totals: WorkloadTotals,
    pins: Vec<TimedCall>,
    unpins: Vec<TimedCall>,
    /// Duration of the remaps of a recording, and the duration that the replay assumes, in nanoseconds.
    moves_ns: (u64, u64),
    warning: Option<String>,
    /// Numbers of the pools with requests.
    pools: BTreeSet<u64>,
    /// The steps of each thread; `None` if threads are unknown.
    threads: Option<Vec<Vec<Step>>>,
    /// When the last buffer of a recording was returned.
    pub(super) ended_us: u64,
    recorded: RecordedSettings,
    failed_gets: u64,
    judged: Vec<PoolJudgement>,
}

/// Totals of the lines read so far.
#[derive(Debug, Clone, Default)]
struct WorkloadTotals {
    held_bytes: HashMap<u64, u64>,
    requested_bytes: u64,
    peak_requested_bytes: u64,
    gets: u64,
    duration_us: u64,
    requested_byte_us: u128,
}

impl Workload {
    /// Reads the trace at `path`, plain or compressed by gzip; `-` is stdin.
    ///
    /// # Errors
    ///
    /// The errors of [`Workload::read`], and one if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Self::read_file(Input::open(path)?)
    }

    /// Reads a trace from a file that is open, as [`Workload::open`] does.
    ///
    /// # Errors
    ///
    /// The errors of [`Workload::read`].
    pub fn read_file(input: Input) -> Result<Self, TraceError> {
        match read_file(input)? {
            Trace::Recording(recording) => Self::of(&recording),
            Trace::Text(mut reader) => Self::read(&mut reader),
        }
    }

    /// The requests and returns of a recording. A return with copies in flight counts when they have completed. Lost records are
    /// reconstructed: a buffer that is requested again was returned before; a return without a request is ignored.
    ///
    /// # Errors
    ///
    /// If it lasts longer than a year.
    pub fn of(recording: &Recording) -> Result<Self, TraceError> {
        let refused = recording.records.iter().filter(|record| matches!(record.event, Event::Refused { .. })).count();
        let failed_gets = refused as u64;
        let left_out = (refused > 0).then(|| {
            let left_out = counted(failed_gets, "get");
            format!("left out: {left_out} that failed when it was recorded; the program needs more than this shows")
        });
        let warning = recording.warning.clone().or(left_out);
        let mut workload = Self { warning, failed_gets, judged: judge_recording(recording), ..Self::default() };
        let (mut names, mut threads) = (Names::default(), Threads::new(&workload.judged));
        let mut last_us = recording.records.first().map_or(0, |record| record.time_ns / 1_000);
        for (line, record) in (1..).zip(&recording.records) {
            let now_us = (record.time_ns / 1_000).max(last_us);
            if let Event::Pin { took_ns, .. } | Event::Unpin { took_ns, .. } | Event::Move { took_ns, .. } =
                record.event
            {
                threads.called(record.thread, took_ns);
            }
            let operations = match record.event {
                Event::Pin { bytes, took_ns, failed: false, .. } => {
                    workload.pins.push(TimedCall { bytes, took_ns });
                    continue;
                }
                Event::Unpin { bytes, took_ns, failed: false, .. } => {
                    workload.unpins.push(TimedCall { bytes, took_ns });
                    continue;
                }
                Event::Move { bytes, took_ns, .. } => {
                    // The first piece of a call carries the time of all pieces.
                    let model_ns = move_ns(bytes, took_ns > 0);
                    workload.moves_ns = (workload.moves_ns.0 + took_ns, workload.moves_ns.1 + model_ns);
                    continue;
                }
                Event::MaxBytes { bytes } => {
                    workload.recorded.set_limit(bytes);
                    continue;
                }
                event => {
                    let held = event.buffer().and_then(|id| names.held.get(&(record.pool, id)).copied());
                    let operations = names.operations(record.pool, event);
                    threads.add(line, record, held, names.last);
                    operations
                }
            };
            if let Event::Get { .. } = record.event {
                workload.pools.insert(record.pool.into());
            }
            for operation in operations.into_iter().flatten() {
                if now_us > last_us {
                    workload.add(line, TraceOp::Advance { micros: now_us - last_us })?;
                    last_us = now_us;
                }
                workload.add(line, operation)?;
            }
        }
        workload.ended_us = threads.ended_ns() / 1_000;
        workload.threads = Some(threads.into_steps());
        let has_gets = |number: u32| workload.pools.contains(&number.into());
        recording.pools.iter().filter(|pool| has_gets(pool.number)).for_each(|pool| workload.recorded.add(pool));
        Ok(workload)
    }

    /// The settings of a recording of one pool; none for a trace of requests alone.
    pub fn recorded(&self) -> &[(String, String)] {
        if self.pools.len() > 1 { &[] } else { self.recorded.values() }
    }

    /// Requests that failed when it was recorded: no replay contains them.
    pub fn failed_gets(&self) -> u64 {
        self.failed_gets
    }

    /// Whether the program set in its code what the variable `name` sets, so that the variable has no effect. Preset and rounding
    /// imply each other.
    pub fn is_set_in_code(&self, name: &str) -> bool {
        self.recorded.is_in_code(name)
    }

    /// The diagnoses of the pools of a recording, the worst first.
    pub fn judged(&self) -> &[PoolJudgement] {
        &self.judged
    }

    /// Whether a replay knows the threads, and blocks each while its requests wait.
    pub fn is_closed(&self) -> bool {
        self.threads.is_some()
    }

    /// The same program if no backend call had taken time, and no thread had queued behind another that waited for memory: its
    /// threads continue that much sooner.
    #[must_use]
    pub fn hurried(&self) -> Self {
        let mut hurried = self.clone();
        for step in hurried.threads.iter_mut().flatten().flatten() {
            step.gap_ns = step.gap_ns.saturating_sub(step.calls_ns.max(step.queued_ns));
        }
        hurried
    }

    /// Whether requests waited when it was recorded.
    pub fn has_waited(&self) -> bool {
        self.judged.iter().any(|judged| judged.judgement.lost.waiting_ns > 0)
    }

    pub(super) fn threads(&self) -> Option<&[Vec<Step>]> {
        self.threads.as_deref()
    }

    fn add(&mut self, line: u64, operation: TraceOp) -> Result<(), TraceError> {
        self.totals.add(operation).map_err(|why| error_at(line, operation, why))?;
        self.lines.push((line, operation));
        Ok(())
    }

    /// Reads all of `reader`.
    ///
    /// # Errors
    ///
    /// If it cannot be read, requests a held name, returns a name that is not held, or lasts longer than a year.
    pub fn read(reader: &mut TraceReader) -> Result<Self, TraceError> {
        let (mut workload, mut pool) = (Self::default(), 0);
        while let Some(operation) = reader.next() {
            let operation = operation?;
            match operation {
                TraceOp::Pool { index } => pool = index as u64,
                TraceOp::Get { .. } | TraceOp::Steps { .. } => _ = workload.pools.insert(pool),
                _ => {}
            }
            workload.add(reader.line(), operation)?;
        }
        Ok(workload)
    }

    /// The operations, each with the number of its line.
    pub fn lines(&self) -> &[(u64, TraceOp)] {
        &self.lines
    }

    /// Duration of the workload; 0 without `t` lines.
    pub fn duration_us(&self) -> u64 {
        self.totals.duration_us
    }

    /// The bytes requested and not returned, averaged over the time of the trace; `None` for a trace without time.
    pub fn mean_requested_bytes(&self) -> Option<u64> {
        let mean = self.totals.requested_byte_us.checked_div(self.totals.duration_us.into())?;
        u64::try_from(mean).ok()
    }

    /// The pin calls of a recording.
    pub fn pins(&self) -> &[TimedCall] {
        &self.pins
    }

    /// The unpin calls of a recording.
    pub fn unpins(&self) -> &[TimedCall] {
        &self.unpins
    }

    /// Duration of the remaps of a recording relative to the duration that the replay assumes; 1 without any.
    pub fn move_scale(&self) -> f64 {
        let (took_ns, model_ns) = self.moves_ns;
        if took_ns == 0 { 1.0 } else { took_ns as f64 / model_ns as f64 }
    }

    /// Whether the peak use grows by a twentieth in each eighth of the time, so that a longer run would use more. A workload
    /// with stepwise growing sizes does not count.
    pub fn grows(&self) -> bool {
        let (mut peaks, mut held, mut used, mut now_us) = ([0_u64; 8], HashMap::new(), 0_u64, 0_u64);
        for (_, operation) in &self.lines {
            match *operation {
                TraceOp::Get { id, bytes, .. } => {
                    held.insert(id, bytes as u64);
                    used += bytes as u64;
                }
                TraceOp::Put { id } => used -= held.remove(&id).unwrap_or(0),
                TraceOp::Advance { micros } => now_us += micros,
                _ => {}
            }
            let part = (now_us * 8).checked_div(self.duration_us()).map_or(0, |part| part.min(7));
            let peak = &mut peaks[usize::try_from(part).unwrap_or(7)];
            *peak = used.max(*peak);
        }
        peaks.windows(2).all(|pair| pair[1] > pair[0] + pair[0] / 20)
    }

    /// Why the recording is incomplete, if it is.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Number of the pools that are replayed as one; `None` if only one has requests.
    pub fn pools_merged(&self) -> Option<usize> {
        Some(self.pools.len()).filter(|&pools| pools > 1)
    }

    /// A note about [`pools_merged`](Self::pools_merged) for users.
    pub fn pools_note(&self) -> Option<String> {
        self.pools_merged().map(|pools| {
            format!(
                "it has {pools} pools, which are played as one: the statistics and limits describe one pool that serves \
                 all of them, and a PINPOOL_* variable holds for each pool of a process by itself"
            )
        })
    }

    /// Requests of more than zero bytes.
    pub fn gets(&self) -> u64 {
        self.totals.gets
    }

    /// Mean bytes of a request; 0 without any.
    pub fn mean_get_bytes(&self) -> u64 {
        let bytes = |(_, operation): &(u64, TraceOp)| match *operation {
            TraceOp::Get { bytes, .. } => Some(bytes as u64),
            _ => None,
        };
        let (count, sum) =
            self.lines.iter().filter_map(bytes).fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
        sum.checked_div(count).unwrap_or(0)
    }

    /// Peak of the bytes requested and not returned, without rounding.
    pub fn peak_requested_bytes(&self) -> u64 {
        self.totals.peak_requested_bytes
    }
}

/// The held buffers of a recording, under names that are each used once.
#[derive(Default)]
struct Names {
    held: HashMap<(u32, u64), u64>,
    in_flight: HashSet<(u32, u64)>,
    last: u64,
}

impl Names {
    /// The operations of a workload for `event` of `pool`.
    fn operations(&mut self, pool: u32, event: Event) -> [Option<TraceOp>; 2] {
        match event {
            Event::Get { id, bytes, .. } => {
                let unseen_put = self.put((pool, id));
                self.last += 1;
                self.held.insert((pool, id), self.last);
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                [unseen_put, Some(TraceOp::Get { id: self.last, bytes, align: DEFAULT_ALIGN })]
            }
            Event::Put { id, in_flight: true } if self.held.contains_key(&(pool, id)) => {
                self.in_flight.insert((pool, id));
                [None; 2]
            }
            Event::Put { id, .. } | Event::Gone { id } => [self.put((pool, id)), None],
            Event::Completed { id } if self.in_flight.contains(&(pool, id)) => [self.put((pool, id)), None],
            Event::Cleared => [Some(TraceOp::Clear), None],
            _ => [None; 2],
        }
    }

    fn put(&mut self, buffer: (u32, u64)) -> Option<TraceOp> {
        self.in_flight.remove(&buffer);
        self.held.remove(&buffer).map(|id| TraceOp::Put { id })
    }
}

/// An error at `operation`.
pub(super) fn error_at(line: u64, operation: TraceOp, why: String) -> TraceError {
    TraceError::Line { line, text: text_of(operation), why }
}

/// The operation as a line of a trace.
fn text_of(operation: TraceOp) -> String {
    match operation {
        TraceOp::Get { id, bytes, align: DEFAULT_ALIGN } => format!("a {id} {bytes}"),
        TraceOp::Get { id, bytes, align } => format!("a {id} {bytes} {align}"),
        TraceOp::Put { id } => format!("f {id}"),
        TraceOp::Steps { count, bytes, step: 0 } => format!("r {count} {bytes}"),
        TraceOp::Steps { count, bytes, step } => format!("s {count} {bytes} {step}"),
        TraceOp::Clear => "c".to_owned(),
        TraceOp::Pool { index } => format!("p {index}"),
        TraceOp::Advance { micros } => format!("t {micros}"),
    }
}

impl WorkloadTotals {
    fn add(&mut self, operation: TraceOp) -> Result<(), String> {
        match operation {
            TraceOp::Get { id, bytes, .. } => {
                self.request(bytes as u64)?;
                if self.held_bytes.insert(id, bytes as u64).is_some() {
                    return Err(format!("buffer {id} is held already"));
                }
            }
            TraceOp::Put { id } => {
                self.requested_bytes -= self.held_bytes.remove(&id).ok_or_else(|| format!("no buffer {id} is held"))?;
            }
            TraceOp::Steps { count, bytes, step } => {
                let Some(more) = count.checked_sub(1) else { return Ok(()) };
                let last = (step as u64).checked_mul(more).and_then(|grown| grown.checked_add(bytes as u64));
                let last = last.ok_or("the sizes pass 2^64")?;
                self.request(last)?;
                self.requested_bytes -= last;
                // `request` counted one request. Only the first can be empty, unless the size does not grow.
                let empty = if bytes > 0 {
                    0
                } else if step > 0 {
                    1
                } else {
                    count
                };
                let more = count.saturating_sub(empty) - u64::from(last > 0);
                self.gets = self.gets.checked_add(more).ok_or("the requests pass 2^64")?;
            }
            TraceOp::Advance { micros } => {
                self.duration_us = self.duration_us.saturating_add(micros);
                self.requested_byte_us += u128::from(self.requested_bytes) * u128::from(micros);
                if self.duration_us > MAX_DURATION_US {
                    return Err("the clock passes a year".to_owned());
                }
            }
            TraceOp::Clear | TraceOp::Pool { .. } => {}
        }
        Ok(())
    }

    fn request(&mut self, bytes: u64) -> Result<(), String> {
        self.requested_bytes = self.requested_bytes.checked_add(bytes).ok_or("the bytes held pass 2^64")?;
        self.peak_requested_bytes = self.peak_requested_bytes.max(self.requested_bytes);
        self.gets = self.gets.checked_add(u64::from(bytes > 0)).ok_or("the requests pass 2^64")?;
        Ok(())
    }
}
