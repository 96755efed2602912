//! Programs in virtual time: the log, `why`, `top` and `report` must name the same cause for each.
//!
//! ```text
//!   script ──requests, returns──▶ pool on a manual clock ──▶ its log
//!                            ├── socket ──▶ `why`, `top`, `report` of a process
//!                            └── recording ──▶ `why`, `report` of a recording
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `causes.rs` | a program for each cause |
//! | `healthy.rs` | healthy programs that resemble one of them |
//! | `mixed.rs` | programs with one fault among ordinary activity |

mod causes;
mod healthy;
mod mixed;

use std::fs;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pinpool::unstable::{ManualClock, run_due_work};
use pinpool::{Backend, Cause, GetFuture, PinnedBuf, Pool, PoolBuilder};
use pinpool_replay::SimSource;
use pinpool_testing::{SinkGate, SinkMemory, SinkStream};
use tempfile::TempDir;

use crate::captured_log::{lines, listen};
use crate::recordings::read_recording;
use crate::tool::{Ran, finish, on, pinpool, until};

pub(crate) const MIB: usize = 1 << 20;
/// Time between two steps of a program.
const STEP_US: u64 = 50_000;
const STEPS_IN_A_SECOND: u64 = 1_000_000 / STEP_US;
/// The thread of a waiting request, and the request.
type PendingRequest = (u32, Pin<Box<GetFuture>>);

/// A program with its pools.
struct Program {
    pools: Vec<Pool>,
    clock: ManualClock,
    dir: TempDir,
    asked: Vec<PendingRequest>,
    /// State of the pseudorandom numbers.
    random: u64,
}

/// The diagnosis of a program's pool by each command.
#[derive(Debug)]
struct Diagnoses {
    pool: String,
    /// The log lines with a diagnosis.
    log: Vec<String>,
    /// The result of `why` for these lines: pool, alarm and cause.
    logged: (String, bool, String),
    causes: Vec<(&'static str, String)>,
    alarms: Vec<bool>,
}

impl Program {
    /// Creates pools with these names and the settings of `set`. Memory is simulated by default.
    fn new(names: &[&str], set: impl Fn(PoolBuilder) -> PoolBuilder) -> Self {
        listen();
        let (dir, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
        let at = |file: &str| dir.path().join(file).to_str().unwrap().to_owned();
        let build = |name: &&str| {
            let memory = Arc::new(SimSource::new(SimSource::DEFAULT_TOTAL_BYTES));
            let builder = Pool::builder().without_env().name(*name).unstable_clock(clock.clone());
            let builder = builder.unstable_settings(|only| only.pressure = Some("/dev/null".into()));
            let builder = builder.setting("socket", at("s")).trace(std::path::PathBuf::from(at("real.trace")));
            set(builder.backend(Backend::Source(memory)).max_bytes(4 << 30)).build().unwrap()
        };
        let pools = names.iter().map(build).collect();
        Self { pools, clock, dir, asked: Vec::new(), random: 1 }
    }

    fn one(set: impl Fn(PoolBuilder) -> PoolBuilder) -> Self {
        Self::new(&["train"], set)
    }

    /// Requests a buffer. Returns `None` if the request was refused or waits. [`served`](Self::served) returns later buffers.
    fn get(&mut self, thread: u32, tag: &str, len: usize) -> Option<PinnedBuf> {
        self.get_of(0, thread, tag, len)
    }

    fn get_of(&mut self, pool: usize, thread: u32, tag: &str, len: usize) -> Option<PinnedBuf> {
        let mut asked: PendingRequest = (thread, Box::pin(self.pools[pool].tagged(tag).get_async(len)));
        let polled = Self::poll(&mut asked);
        if polled.is_none() {
            self.asked.push(asked);
        }
        polled.flatten()
    }

    /// Requests a buffer, which must be available immediately.
    fn must_get(&mut self, tag: &str, len: usize) -> PinnedBuf {
        self.get(0, tag, len).expect("there is memory")
    }

    /// Returns `None` if the request waits, and `Some(None)` if it was refused.
    fn poll((_, get): &mut PendingRequest) -> Option<Option<PinnedBuf>> {
        match get.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(buffer) => Some(buffer.ok()),
            Poll::Pending => None,
        }
    }

    /// Returns the buffers of waiting requests that were served, with their threads.
    fn served(&mut self) -> Vec<(u32, PinnedBuf)> {
        let mut served = Vec::new();
        for mut asked in std::mem::take(&mut self.asked) {
            match Self::poll(&mut asked) {
                Some(buffer) => served.extend(buffer.map(|buffer| (asked.0, buffer))),
                None => self.asked.push(asked),
            }
        }
        served
    }

    /// Returns a buffer on another thread.
    fn put_elsewhere(buffer: PinnedBuf) {
        std::thread::spawn(|| drop(buffer)).join().unwrap();
    }

    /// Returns a buffer with a copy that begins when the gate of the stream is dropped.
    fn copy(buffer: PinnedBuf, stream: &SinkStream, device: &mut SinkMemory) -> SinkGate {
        let gate = stream.hold();
        buffer.copy_to(stream, device).unwrap();
        gate
    }

    fn step(&mut self) {
        self.clock.advance_us(STEP_US);
        self.pools.iter().for_each(run_due_work);
    }

    /// Calls `act` with the number of each step for this many seconds.
    fn run(&mut self, seconds: u64, mut act: impl FnMut(&mut Self, u64)) {
        for step in 0..seconds * STEPS_IN_A_SECOND {
            act(self, step);
            self.step();
        }
    }

    /// Requests a buffer at each step, and returns it `held` steps later.
    fn load(&mut self, seconds: u64, held: usize, mut len: impl FnMut(&mut Self, u64) -> usize) {
        let mut queue = std::collections::VecDeque::new();
        self.run(seconds, |program, step| {
            let len = len(program, step);
            queue.extend(program.get(0, "images", len));
            if queue.len() > held {
                drop(queue.pop_front());
            }
        });
    }

    /// A pseudorandom number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.random >> 33).unwrap() % end
    }

    /// Returns the diagnoses of the pool that is listed first. `held` is dropped afterwards.
    fn diagnosed<H>(self, held: H) -> Diagnoses {
        let at = |file: &str| self.dir.path().join(file);
        let (socket, page, trace) = (at("s"), at("page.html"), at("t.trace"));
        let report = |target: &Path| {
            finish(pinpool(&["report", "--seconds", "1", "-o"]).args([&page, target])).exits(0);
            fs::read_to_string(&page).unwrap()
        };
        let why = |target: &Path| on("why", target, &["--json"]);
        let (outside, live) = (why(&socket), report(&socket));
        let top = on("top", &socket, &[]).exits(0);
        let own: Vec<_> =
            self.pools.iter().map(|pool| (pool.stats().name.unwrap_or_default(), pool.diagnose())).collect();
        let log: Vec<_> = lines().into_iter().filter(|line| line.contains("] diagnosis: ")).collect();
        fs::write(at("log"), log.join("\n")).unwrap();
        let logged = first(&why(&at("log")));
        // The copied recording looks as if the process had been killed now.
        let snapshots = || read_recording(&at("real.trace")).map_or(0, |recording| recording.snapshots.len());
        until("all snapshots are written", || {
            let before = snapshots();
            std::thread::sleep(std::time::Duration::from_millis(200));
            before > 0 && snapshots() == before
        });
        fs::copy(at("real.trace"), &trace).unwrap();
        drop((held, self.asked));
        let (recorded, page) = (why(&trace), report(&trace));

        let (pool, alarm, cause) = first(&outside);
        let (pool_recorded, alarm_recorded, cause_recorded) = first(&recorded);
        let own = own.iter().find(|(name, _)| *name == pool).map(|(_, why)| why).unwrap();
        let marked = |page: &str| {
            let mark = page.split_once("\"diagnoses\":[{\"name\":\"").unwrap().1.split_once('"').unwrap().0;
            mark.strip_prefix(&format!("{pool}: ")).unwrap_or(mark).to_owned()
        };
        assert_eq!(pool_recorded, pool);
        Diagnoses {
            causes: vec![
                ("Pool::diagnose", own.cause.name().to_owned()),
                ("why of a process", cause),
                ("top", shown(&top, &pool)),
                ("report of a process", marked(&live)),
                ("why of a recording", cause_recorded),
                ("report of a recording", marked(&page)),
            ],
            alarms: vec![own.is_alarm, alarm, alarm_recorded, logged.1],
            logged,
            pool,
            log,
        }
    }
}

/// Name, alarm and cause of the pool that `why` names first.
fn first(why: &Ran) -> (String, bool, String) {
    let said = &why.figures()["pools"][0];
    let text = |name: &str| said[name].as_str().unwrap().to_owned();
    let is_alarm = said["is_alarm"].as_bool().unwrap();
    assert_eq!(why.code(), i32::from(is_alarm), "{}", why.stdout);
    (text("pool"), is_alarm, text("cause"))
}

/// Returns the cause that `top` prints for the pool.
fn shown(top: &Ran, pool: &str) -> String {
    let line = top.stdout.lines().find_map(|line| line.strip_prefix(&format!("{pool}: ")));
    cause_in(line.unwrap_or_default()).to_owned()
}

/// Returns the cause with which a line begins.
fn cause_in(line: &str) -> &str {
    Cause::NAMES.iter().copied().find(|cause| line.starts_with(&format!("{cause}: "))).unwrap_or(line)
}

impl Diagnoses {
    /// Returns the causes in the log lines of the pool.
    fn causes_logged(&self) -> Vec<&str> {
        let begin = format!("pool[{}] diagnosis: ", self.pool);
        self.log.iter().filter_map(|line| line.strip_prefix(&begin)).map(cause_in).collect()
    }

    /// Checks that all commands name this cause, and that the log names it last.
    fn check(&self, cause: &str, is_alarm: bool) {
        assert!(self.causes.iter().all(|(_, found)| found == cause), "{cause}: {self:?}");
        assert!(self.alarms.iter().all(|&alarm| alarm == is_alarm), "{cause}: {self:?}");
        assert_eq!((self.logged.0.as_str(), self.logged.2.as_str()), (self.pool.as_str(), cause), "{self:?}");
    }

    /// Checks that commands and log contain no alarm, and only these causes (the log also `healthy` and `warming_up`).
    fn check_calm(&self, causes: &[&str]) {
        assert!(self.causes.iter().all(|(_, found)| causes.contains(&found.as_str())), "{self:?}");
        assert!(self.alarms.iter().all(|&alarm| !alarm), "{self:?}");
        let calm = [&["healthy", "warming_up"], causes].concat();
        assert!(self.causes_logged().iter().all(|found| calm.contains(found)), "{self:?}");
    }
}
