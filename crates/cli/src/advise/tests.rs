//! Random programs are recorded under several limits. Advised settings must cost them no more time than the given settings, and
//! no more memory unless they save time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use indicatif::ProgressBar;
use pinpool_replay::{Event, PoolDescription, Record, Recording, Replay, Workload};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::costs::{Column, Costs};
use super::search::Search;

const MS: u64 = 1_000_000;
const MIB: u64 = 1 << 20;
/// The thread that returns the buffers of other threads.
const CONSUMER: u32 = 100;

#[derive(Debug, Clone, Copy)]
enum Op {
    /// A request for this many bytes.
    Get(u64),
    /// A return, followed by copies of this duration in nanoseconds.
    Put(u64),
}

/// An action of a thread on a buffer, and its time if the thread does not wait.
#[derive(Debug, Clone, Copy)]
struct Act {
    at_ns: u64,
    thread: u32,
    name: u64,
    op: Op,
}

/// An act of a thread, `gap_ns` after the thread's previous act and after the buffer is available.
#[derive(Debug, Clone, Copy)]
struct Step {
    gap_ns: u64,
    name: u64,
    op: Op,
}

/// A running program: its threads wait for memory, in order of arrival, and for the buffers that they return.
#[derive(Default)]
struct Run {
    steps: BTreeMap<u32, VecDeque<Step>>,
    ended_ns: HashMap<u32, u64>,
    /// Times at which threads act, or at which the copies of a buffer complete (without a thread).
    due: BinaryHeap<Reverse<(u64, u64, Option<u32>)>>,
    got_ns: HashMap<u64, u64>,
    held: HashMap<u64, u64>,
    used_bytes: u64,
    line: VecDeque<(u32, u64)>,
    blocked: HashMap<u64, u32>,
    records: Vec<Record>,
}

impl Run {
    fn of(acts: &[Act]) -> Self {
        let (mut steps, mut ended, mut got) = (BTreeMap::<u32, VecDeque<Step>>::new(), HashMap::new(), HashMap::new());
        for &Act { at_ns, thread, name, op } in acts {
            let before_ns = ended.insert(thread, at_ns).unwrap_or(0);
            let since_ns = match op {
                Op::Get(_) => {
                    got.insert(name, at_ns);
                    before_ns
                }
                Op::Put(_) => before_ns.max(got[&name]),
            };
            steps.entry(thread).or_default().push_back(Step { gap_ns: at_ns - since_ns, name, op });
        }
        Self { steps, ..Self::default() }
    }

    fn plan(&mut self, thread: u32) {
        let Some(&Step { gap_ns, name, op }) = self.steps[&thread].front() else { return };
        let ended_ns = self.ended_ns.get(&thread).copied().unwrap_or(0);
        let since_ns = match op {
            Op::Get(_) => ended_ns,
            Op::Put(_) => match self.got_ns.get(&name) {
                Some(&got_ns) => ended_ns.max(got_ns),
                None => {
                    self.blocked.insert(name, thread);
                    return;
                }
            },
        };
        self.due.push(Reverse((since_ns + gap_ns, name, Some(thread))));
    }

    fn end_step(&mut self, thread: u32, now_ns: u64) {
        self.steps.get_mut(&thread).unwrap().pop_front();
        self.ended_ns.insert(thread, now_ns);
        self.plan(thread);
    }

    fn record(&mut self, time_ns: u64, thread: u32, event: Event) {
        self.records.push(Record { time_ns, thread, pool: 0, event });
    }

    fn free(&mut self, name: u64) {
        self.used_bytes -= self.held.remove(&name).unwrap();
    }

    /// Serves the head of the queue while there is memory.
    fn serve(&mut self, max_bytes: u64, now_ns: u64) {
        while let Some(&(thread, asked_ns)) = self.line.front() {
            let &Step { name, op: Op::Get(bytes), .. } = self.steps[&thread].front().unwrap() else { return };
            let class_bytes = class_bytes(bytes);
            if self.used_bytes > 0 && self.used_bytes + class_bytes > max_bytes {
                return;
            }
            self.line.pop_front();
            self.used_bytes += class_bytes;
            self.held.insert(name, class_bytes);
            self.got_ns.insert(name, now_ns);
            let took_ns = now_ns - asked_ns;
            if took_ns > 0 {
                self.record(now_ns, thread, Event::Waited);
            }
            self.record(now_ns, thread, Event::Get { id: name, bytes, class_bytes, tag: 0, took_ns });
            self.end_step(thread, now_ns);
            if let Some(blocked) = self.blocked.remove(&name) {
                self.plan(blocked);
            }
        }
    }

    fn record_all(mut self, max_bytes: Option<u64>, facts: &[(&str, &str)]) -> Recording {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        self.record(0, 0, Event::MaxBytes { bytes: max_bytes });
        let threads: Vec<_> = self.steps.keys().copied().collect();
        threads.into_iter().for_each(|thread| self.plan(thread));
        while let Some(Reverse((now_ns, name, thread))) = self.due.pop() {
            match thread.map(|thread| (thread, self.steps[&thread][0].op)) {
                Some((thread, Op::Get(_))) => self.line.push_back((thread, now_ns)),
                Some((thread, Op::Put(copies_ns))) => {
                    let in_flight = copies_ns > 0;
                    self.record(now_ns, thread, Event::Put { id: name, in_flight });
                    if in_flight {
                        self.due.push(Reverse((now_ns + copies_ns, name, None)))
                    } else {
                        self.free(name)
                    }
                    self.end_step(thread, now_ns);
                }
                None => {
                    self.record(now_ns, CONSUMER + 1, Event::Completed { id: name });
                    self.free(name);
                }
            }
            self.serve(max_bytes, now_ns);
        }
        self.record(self.records.last().unwrap().time_ns, 0, Event::End);
        recording(self.records, facts)
    }
}

/// Returns a recording of one pool with these facts.
fn recording(records: Vec<Record>, facts: &[(&str, &str)]) -> Recording {
    let facts = facts.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    Recording { records, pools: vec![PoolDescription { number: 0, facts }], ..Recording::default() }
}

/// Returns the bytes of the size class, in steps of an eighth of a power of two.
fn class_bytes(bytes: u64) -> u64 {
    let step = (bytes.next_power_of_two() / 16).max(4096);
    bytes.div_ceil(step) * step
}

/// Returns the most bytes that are in use at one time.
fn peak_bytes(acts: &[Act]) -> u64 {
    let mut edges = Vec::new();
    let mut sizes = HashMap::new();
    for act in acts {
        match act.op {
            Op::Get(bytes) => {
                sizes.insert(act.name, class_bytes(bytes));
                edges.push((act.at_ns, 1, act.name));
            }
            Op::Put(copies_ns) => edges.push((act.at_ns + copies_ns, 0, act.name)),
        }
    }
    edges.sort_unstable();
    let (mut used, mut peak) = (0, 0);
    for (_, is_got, name) in edges {
        used = if is_got == 1 { used + sizes[&name] } else { used - sizes[&name] };
        peak = peak.max(used);
    }
    peak
}

/// Returns the acts of a random program.
fn random_acts(seed: u64) -> Vec<Act> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let threads: u32 = random.random_range(1..9);
    let gets: u64 = random.random_range(200..1200);
    let sizes: Vec<u64> = (0..random.random_range(1..10)).map(|_| 1 << random.random_range(12..25)).collect();
    let (is_ragged, is_consumed, drifts) = (random.random_bool(0.4), random.random_bool(0.5), random.random_bool(0.2));
    let gap_ns = random.random_range(1..40) * MS;
    let hold_ns = random.random_range(1..120) * MS;
    let copies_ns = if random.random_bool(0.4) { random.random_range(1..30) * MS } else { 0 };
    let burst = if random.random_bool(0.3) { random.random_range(5..60) } else { 0 };
    let pause_ns = if random.random_bool(0.3) { random.random_range(1..200) * 1000 * MS } else { 0 };
    let leaked = if random.random_bool(0.1) { random.random_range(10..60) } else { u64::MAX };
    let mut acts = Vec::new();
    let (mut free_ns, mut consumed_ns) = (vec![0; threads as usize], 0);
    for name in 1..=gets {
        let thread = u32::try_from(name % u64::from(threads)).unwrap();
        let mut at_ns = free_ns[thread as usize] + random.random_range(gap_ns / 2..gap_ns * 2);
        if pause_ns > 0 && name % (gets / 3) == 0 {
            at_ns += pause_ns;
        }
        let mut bytes = sizes[random.random_range(0..sizes.len())];
        if is_ragged {
            bytes = random.random_range(bytes / 2..bytes * 2).max(1);
        }
        if drifts {
            bytes += bytes * 2 * name / gets;
        }
        let is_in_burst = burst > 0 && name % (4 * burst) < burst;
        let held_ns = if is_in_burst { hold_ns * 8 } else { random.random_range(hold_ns / 2..hold_ns * 2) };
        // A thread that returns its own buffer is busy until then. If the consumer returns it, the thread continues immediately.
        free_ns[thread as usize] = if is_in_burst || is_consumed { at_ns } else { at_ns + held_ns };
        acts.push(Act { at_ns, thread, name, op: Op::Get(bytes) });
        if name % leaked != leaked - 1 {
            let by = if is_consumed || is_in_burst { CONSUMER } else { thread };
            let mut put_ns = at_ns + held_ns;
            if by == CONSUMER {
                consumed_ns = put_ns.max(consumed_ns);
                put_ns = consumed_ns;
            }
            acts.push(Act { at_ns: put_ns, thread: by, name, op: Op::Put(copies_ns) });
        }
    }
    acts.sort_by_key(|act| act.at_ns);
    acts
}

/// Returns the advice for requests of one thread, 10 ms apart, each returned `held` requests later.
fn advised_for(held: u64, bytes: impl Fn(u64) -> u64, facts: &[(&str, &str)]) -> Option<Vec<String>> {
    let mut acts = Vec::new();
    for name in 1..1000 {
        acts.push(Act { at_ns: name * 10 * MS, thread: 0, name, op: Op::Get(bytes(name)) });
        let put_ns = (name + held) * 10 * MS + 5 * MS;
        acts.push(Act { at_ns: put_ns, thread: CONSUMER, name, op: Op::Put(0) });
    }
    acts.sort_by_key(|act| act.at_ns);
    let workload = Workload::from_recording(&Run::of(&acts).record_all(Some(6 << 30), facts)).unwrap();
    let settings = Search::new(&workload, &[], &ProgressBar::hidden()).advise().unwrap().advised?.settings;
    Some(settings.into_iter().map(|(name, value)| format!("{name}={value}")).collect())
}

#[test]
fn a_steady_loop_gets_no_advice_and_a_growing_one_no_limit() {
    let adaptive = [("PINPOOL_PRESET", "adaptive"), ("PINPOOL_ROUNDING", "eighths")];
    assert_eq!(advised_for(4, |_| 16 * MIB, &adaptive), None);
    let [preset, rounding] = adaptive;
    let reserved = [preset, rounding, ("PINPOOL_RESERVE", "134217728"), ("PINPOOL_GROWTH", "0")];
    assert_eq!(advised_for(4, |_| 16 * MIB, &reserved), None);
    // Memory is released between requests and pinned again: keeping it saves time, but no limit would fit a longer run.
    let released = [preset, rounding, ("PINPOOL_IDLE_TIMEOUT", "1ms")];
    let grows = advised_for(0, |name| MIB + name * 50_000 + name % 3 * 4096, &released);
    assert_eq!(grows, Some(vec!["PINPOOL_IDLE_TIMEOUT=none".to_owned()]));
}

/// Returns a program that trains with one buffer at a time, and evaluates with 64 buffers every half minute.
fn evaluations() -> Vec<Act> {
    let mut acts = Vec::new();
    let mut held = |name: u64, from_ms: u64, to_ms: u64| {
        acts.push(Act { at_ns: from_ms * MS, thread: 0, name, op: Op::Get(4 * MIB) });
        acts.push(Act { at_ns: to_ms * MS, thread: 0, name, op: Op::Put(0) });
    };
    for round in 0..4 {
        let (first, begun_ms) = (round * 1000, round * 30_000);
        (0..500).for_each(|step| held(first + step, begun_ms + step * 50, begun_ms + step * 50 + 25));
        (500..564).for_each(|step| held(first + step, begun_ms + 25_500 + step, begun_ms + 27_000 + step));
    }
    acts.sort_by_key(|act| act.at_ns);
    acts
}

#[test]
fn memory_repinned_for_each_evaluation_gets_a_reserve() {
    let adaptive = [("PINPOOL_PRESET", "adaptive"), ("PINPOOL_ROUNDING", "eighths"), ("PINPOOL_IDLE_TIMEOUT", "10s")];
    let mut recording = Run::of(&evaluations()).record_all(Some(6 << 30), &adaptive);
    // The cost of a call depends on its bytes alone, so that a reserve seems as expensive as growth.
    let pin = |bytes: u64| Event::Pin { address: 1, bytes, took_ns: 2 * bytes, failed: false };
    let pins = (1..9).map(|n| Record { time_ns: 0, thread: 200, pool: 0, event: pin(2 * n * MIB) });
    recording.records.splice(0..0, pins);
    let workload = Workload::from_recording(&recording).unwrap();
    let better = super::search(&workload, &[], &ProgressBar::hidden()).unwrap().advised.unwrap();
    assert!(better.settings.iter().any(|(name, _)| *name == "PINPOOL_RESERVE"), "{better:?}");
    assert_eq!(better.cost.outcome.pin_calls, 1, "{better:?}");
}

#[test]
fn settings_made_in_code_are_not_advised_as_variables() {
    let lines = |set_in_code| {
        let acts = [Act { at_ns: 0, thread: 0, name: 1, op: Op::Get(MIB) }];
        let workload =
            Workload::from_recording(&Run::of(&acts).record_all(None, &[("set_in_code", set_in_code)])).unwrap();
        let advised = [("PINPOOL_PRESET", "adaptive"), ("PINPOOL_ROUNDING", "eighths"), ("PINPOOL_MAX_BYTES", "7")];
        super::exports(&workload, advised.map(|(name, value)| (name.to_owned(), value.to_owned()))).0
    };
    let all = "export PINPOOL_PRESET=adaptive\nexport PINPOOL_ROUNDING=eighths\nexport PINPOOL_MAX_BYTES=7\n";
    assert_eq!((lines(""), lines("PINPOOL_BACKEND PINPOOL_TRACE")), (all.to_owned(), all.to_owned()));
    // Each rounding belongs to one preset.
    let (variables, in_code) =
        ("export PINPOOL_MAX_BYTES=7\n", "# PINPOOL_PRESET=adaptive\n# PINPOOL_ROUNDING=eighths\n");
    for set_in_code in ["PINPOOL_PRESET", "PINPOOL_ROUNDING PINPOOL_BACKEND"] {
        let lines = lines(set_in_code);
        assert!(lines.starts_with(variables) && lines.ends_with(in_code), "{lines}");
    }
}

/// Returns a loader with a full pool: four threads alternately wait for memory, and a fifth thread passes filled buffers to a
/// device, which reads each buffer for 8 of 10 ms. `last_bytes` is the limit at the end.
fn full_pool(last_bytes: u64) -> Workload {
    let record = |time_ns, thread, event| Record { time_ns, thread, pool: 0, event };
    let class = class_bytes(4 * MIB);
    let round = |n: u64| {
        let (at_ns, thread) = (n * 10 * MS, u32::try_from(n % 4).unwrap());
        let took_ns = if n == 0 { 0 } else { 10 * MS };
        [
            record(at_ns, thread, Event::Completed { id: n.max(1) - 1 }),
            record(at_ns, thread, if n == 0 { Event::Cleared } else { Event::Waited }),
            record(at_ns, thread, Event::Get { id: n, bytes: 4 * MIB, class_bytes: class, tag: 0, took_ns }),
            record(at_ns + 2 * MS, CONSUMER, Event::Put { id: n, in_flight: true }),
        ]
    };
    let mut records = vec![record(0, 0, Event::MaxBytes { bytes: 4 * MIB })];
    records.extend((0..400).flat_map(round));
    records.push(record(4010 * MS, 0, Event::MaxBytes { bytes: last_bytes }));
    let facts = [("PINPOOL_PRESET", "adaptive"), ("PINPOOL_ROUNDING", "eighths"), ("PINPOOL_WAIT", "30s")];
    Workload::from_recording(&recording(records, &facts)).unwrap()
}

#[test]
fn a_full_pool_with_waiting_threads_gets_a_higher_limit() {
    let better = super::search(&full_pool(4 * MIB), &[], &ProgressBar::hidden()).unwrap().advised.unwrap();
    let (_, limit) = better.settings.iter().find(|(name, _)| *name == "PINPOOL_MAX_BYTES").unwrap();
    assert!((8..64).contains(&(limit.parse::<u64>().unwrap() / MIB)), "{better:?}");
    assert!(better.cost.outcome.ended_us < 2_500_000, "{better:?}");
}

#[test]
fn a_recording_that_a_replay_cannot_reproduce_gets_no_advice() {
    // The limit was raised at the end, but a replay has the last limit from the start.
    let error = super::search(&full_pool(64 * MIB), &[], &ProgressBar::hidden()).unwrap_err().to_string();
    assert!(error.starts_with("this recording cannot be replayed faithfully: "), "{error}");
}

/// Returns whether settings are advised. Fails if the advice is wrong.
fn is_advised(what: &str, workload: &Workload) -> bool {
    let advice = Search::new(workload, &[], &ProgressBar::hidden()).advise().unwrap();
    let Some(better) = advice.advised else { return false };
    let set: Vec<_> = better.settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let costs = Costs::of(workload);
    let play = |set: &[(String, String)]| {
        Column::play("", workload, &Replay::with_recorded_settings(workload, set).unwrap(), &costs).unwrap()
    };
    let (given, advised) = (play(&[]), play(&set));
    let [peak, peak_given] = [&advised, &given].map(|cost| cost.outcome.peak_pinned_bytes);
    let [late, late_given] = [&advised, &given].map(|cost| cost.outcome.timeouts);
    let is_larger = peak as f64 > peak_given as f64 * 1.02;
    let costs_more = advised.lost_seconds > given.lost_seconds || late > late_given;
    let is_exact =
        (advised.lost_seconds - better.cost.lost_seconds).abs() < 1e-9 && peak == better.cost.outcome.peak_pinned_bytes;
    let is_wrong = costs_more || !is_exact || (is_larger && advised.lost_seconds >= given.lost_seconds);
    assert!(!is_wrong, "{what}: {set:?}\n  given {given:?}\n  advised {advised:?}\n  told {:?}", better.cost);
    true
}

/// Returns whether settings are advised for a random program under random settings.
fn is_random_advised(seed: u64) -> bool {
    let acts = random_acts(seed);
    let mut random = ChaCha8Rng::seed_from_u64(seed + 1_000_000);
    let mut one_of = |values: &[&'static str]| values[random.random_range(0..values.len())];
    let mut facts = vec![("PINPOOL_WAIT", one_of(&["100ms", "30s", "30s"]))];
    match one_of(&["adaptive", "adaptive", "tensorflow"]) {
        "tensorflow" => facts.extend([
            ("PINPOOL_PRESET", "tensorflow"),
            ("PINPOOL_ROUNDING", one_of(&["pow2", "exact"])),
            ("PINPOOL_POOL_SIZE_LIMIT", one_of(&["1", "2", "8", "100"])),
        ]),
        _ => facts.extend([
            ("PINPOOL_PRESET", "adaptive"),
            ("PINPOOL_ROUNDING", "eighths"),
            ("PINPOOL_IDLE_TIMEOUT", one_of(&["1s", "10s", "60s", "none"])),
        ]),
    }
    let percent = one_of(&["40", "75", "100", "120", "150", "1000", ""]).parse().ok();
    let max_bytes = percent.map(|percent: u64| (peak_bytes(&acts) / 100 * percent).max(MIB));
    let recording = Run::of(&acts).record_all(max_bytes, &facts);
    is_advised(&format!("seed {seed}, {facts:?}, under {max_bytes:?}"), &Workload::from_recording(&recording).unwrap())
}

#[test]
fn advised_settings_cost_no_more_for_random_programs() {
    // `ADVISE_SEEDS` overrides the number of seeds.
    let seeds: usize = std::env::var("ADVISE_SEEDS").map_or(24, |seeds| seeds.parse().unwrap());
    let advised = (0..seeds as u64).filter(|&seed| is_random_advised(seed)).count();
    assert!(advised < seeds && advised > seeds / 6, "{advised} of {seeds}");
}
