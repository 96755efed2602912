//! How a workload is replayed: the settings of the pool, and the memory that is simulated.
//!
//! One thread replays, and the pool reads the replay's clock alone, so a file gives the same figures on every machine.

use std::sync::Arc;
use std::time::Duration;

use super::format::TraceError;
use super::kind::SourceKind;
use super::player::Player;
use super::priced::{Ledger, PricedSource};
use super::report::{ReplayOutcome, ReplayReport};
use super::sim::SimSource;
use super::watch::Watch;
use super::workload::Workload;
use pinpool::Backend;
use pinpool::unstable::{CheckReport, LogSampler, ManualClock};
use pinpool::{OnFull, Pool, Preset, Rounding};
use pinpool_os::sync::plain::Mutex;

/// Where the files of a machine are looked for: below a file that has none.
const NO_MACHINE: &str = "/dev/null";

/// Settings of a replay; `None` stands for the preset's default.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Rules that the pool follows.
    pub preset: Option<Preset>,
    /// Memory of the pool.
    pub source: SourceKind,
    /// How sizes become classes.
    pub rounding: Option<Rounding>,
    /// Most idle buffers kept at the start.
    pub pool_size_limit: Option<u64>,
    /// Whether that limit may rise.
    pub auto_resize: Option<bool>,
    /// How long memory stays idle before it is released; the inner `None` keeps it.
    pub idle_timeout: Option<Option<Duration>>,
    /// Ceiling in bytes; `None` for no ceiling.
    pub max_bytes: Option<u64>,
    /// Longest wait of a get at the ceiling, in virtual time.
    pub wait: Duration,
    /// Settings that few replays change.
    pub others: OtherSettings,
}

/// Settings that few replays change; `None` stands for the default.
#[derive(Debug, Clone, Default)]
pub struct OtherSettings {
    /// Bytes pinned at the start and kept.
    pub reserve_bytes: Option<u64>,
    /// Whether the pool may pin more than that.
    pub growth: Option<bool>,
    /// Most bytes kept idle; the inner `None` is no limit.
    pub max_idle_bytes: Option<Option<u64>>,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            preset: None,
            source: SourceKind::default(),
            rounding: None,
            pool_size_limit: None,
            auto_resize: None,
            idle_timeout: None,
            max_bytes: None,
            wait: Duration::from_millis(100),
            others: OtherSettings::default(),
        }
    }
}

impl Replay {
    /// Replays all of `workload` on a new pool, then lets a minute pass.
    ///
    /// # Errors
    ///
    /// If the settings contradict each other, or the workload requests more than any pool can provide.
    pub fn play(&self, workload: &Workload) -> Result<ReplayReport, TraceError> {
        Ok(self.play_fully(workload, None)?.report)
    }

    /// Replays `workload` as [`play`](Replay::play) does; `watch` sees the pool on the way.
    ///
    /// # Errors
    ///
    /// The errors of [`play`](Replay::play).
    pub fn play_watched(&self, workload: &Workload, watch: Option<Watch<'_>>) -> Result<ReplayReport, TraceError> {
        Ok(self.play_fully(workload, watch)?.report)
    }

    /// Replays `workload` as [`play`](Replay::play) does, and also returns what TensorFlow's lines would say and what the
    /// back-end was called for.
    ///
    /// # Errors
    ///
    /// The errors of [`play`](Replay::play).
    pub fn play_with_lines(&self, workload: &Workload) -> Result<ReplayOutcome, TraceError> {
        self.play_fully(workload, None)
    }

    fn play_fully(&self, workload: &Workload, watch: Option<Watch<'_>>) -> Result<ReplayOutcome, TraceError> {
        let clock = ManualClock::default();
        let checks = Arc::<Mutex<Checks>>::default();
        let (pool, ledger) = self.pool(clock.clone(), checks.clone())?;
        let player = Player::new(pool, clock, ledger, self.source, self.max_bytes, self.wait, watch);
        let mut outcome = player.play(workload)?;
        let checks = checks.lock();
        (outcome.checks, outcome.last_lines) = (checks.count, checks.last.map(|last| last.to_string()));
        Ok(outcome)
    }

    /// A pool that reads neither the machine nor the environment nor the system's clock, so that two replays of a workload
    /// end in the same words.
    fn pool(&self, clock: ManualClock, checks: Arc<Mutex<Checks>>) -> Result<(Pool, Arc<Ledger>), TraceError> {
        let sim = match self.source {
            SourceKind::Virtual => SimSource::new(SimSource::DEFAULT_TOTAL_BYTES),
            SourceKind::Discrete => SimSource::discrete(SimSource::DEFAULT_TOTAL_BYTES),
        };
        let (source, ledger) = PricedSource::new(sim);
        let mut builder = Pool::builder()
            .without_env()
            .host_root(NO_MACHINE)
            .log_sampler(LogSampler::new())
            .clock(clock)
            .on_check(move |check| checks.lock().count(check))
            .unstable_pressure("/dev/null")
            .backend(Backend::Source(Arc::new(source)))
            .max_bytes(self.max_bytes)
            // Tickets wait instead of threads: no virtual time passes while a thread sleeps.
            .wait(Duration::ZERO)
            .on_full(OnFull::Error);
        if let Some(preset) = self.preset {
            builder = builder.preset(preset);
        }
        if let Some(rounding) = self.rounding {
            builder = builder.rounding(rounding);
        }
        if let Some(buffers) = self.pool_size_limit {
            builder = builder.pool_size_limit(buffers);
        }
        if let Some(yes) = self.auto_resize {
            builder = builder.auto_resize(yes);
        }
        if let Some(idle_timeout) = self.idle_timeout {
            builder = builder.idle_timeout(idle_timeout);
        }
        let OtherSettings { reserve_bytes, growth, max_idle_bytes } = self.others;
        if let Some(bytes) = reserve_bytes {
            builder = builder.reserve_bytes(bytes);
        }
        if let Some(yes) = growth {
            builder = builder.growth(yes);
        }
        if let Some(max_bytes) = max_idle_bytes {
            builder = builder.max_idle_bytes(max_bytes);
        }
        Ok((builder.build()?, ledger))
    }
}

/// The checks of the rates, and the last of them.
#[derive(Debug, Default)]
struct Checks {
    count: u64,
    last: Option<CheckReport>,
}

impl Checks {
    fn count(&mut self, check: &CheckReport) {
        self.count += 1;
        self.last = Some(*check);
    }
}
