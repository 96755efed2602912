//! From settings to a running pool.
//!
//! The methods for settings are generated from the table in `config/settings.rs`. Decides which source, limit and fallback the
//! settings mean; `config` decides what they imply and contradict.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Pool;
use super::handle::Handle;
use super::on_host::pin_options;
use crate::arena::Retention;
use crate::backend::{self, Backend};
#[cfg(feature = "observe")]
use crate::config::env::VariableReport;
use crate::config::{Config, EnvReport, Limit, OnFull, Preset, Settings, SharedLimitName, env, for_each_setting};
use crate::diag::{CheckReport, LogSampler, PoolLog, Start};
use crate::engine::{
    ArenaSettings, ArenaSupply, AutoLimit, CalledSource, Core, ManualClock, Memory, OneEach, Pageable, Timekeeper,
    granule_bytes,
};
use crate::error::{Error, ErrorKind, Result};
use crate::finding::Finding;
use crate::quota::{Budget, Claim, Member};
use crate::shared_limit::{self, SharedLimit};
use pinpool_observe::record::Recorder;
#[cfg(feature = "observe")]
use pinpool_observe::record::{PoolDescription, SET_IN_CODE, Unrecorded, count_failed};
use pinpool_os::host::limits;

/// Collects the settings of a new pool. A setting that code does not set comes from the environment, or has its default.
#[must_use]
pub struct PoolBuilder {
    settings: Settings,
    /// Names and values of [`PoolBuilder::setting`].
    texts: Vec<(String, String)>,
    /// Prefix of the variables; `None` if they are ignored.
    env_prefix: Option<String>,
    log: PoolLog,
    clock: Option<ManualClock>,
    host_root: PathBuf,
}

impl fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuilder")
            .field("settings", &self.settings)
            .field("texts", &self.texts)
            .finish_non_exhaustive()
    }
}

/// As [`Pool::builder`].
impl Default for PoolBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl PoolBuilder {
    pub(super) fn new() -> Self {
        Self {
            settings: Settings::default(),
            texts: Vec::new(),
            env_prefix: Some(env::PREFIX.to_owned()),
            log: PoolLog::new(),
            clock: None,
            host_root: PathBuf::from("/"),
        }
    }

    /// Ignores the `PINPOOL_*` variables: settings that code does not set have their defaults.
    pub fn without_env(mut self) -> Self {
        self.env_prefix = None;
        self
    }

    /// Reads variables that begin with `prefix` in place of `PINPOOL_`: with `EVAL_PINPOOL_`, the limit is read from
    /// `EVAL_PINPOOL_MAX_BYTES`. For programs with several pools that need different settings.
    pub fn env_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.env_prefix = Some(prefix.into());
        self
    }

    /// Sets what the variable `name` sets, in the form of the variable: for settings without a method below, and for settings that
    /// come as text from a file or another language. The name may be in lower case and without `PINPOOL_`. `background_thread` and
    /// `call_stacks`, which no variable sets, are accepted too. An empty text sets nothing. A retired name is a warning when the pool
    /// is built.
    ///
    /// [`build`](Self::build) fails if there is no such setting, its value is invalid, or code has set another value.
    ///
    /// ```
    /// let pool = pinpool::Pool::builder().setting("backend", "heap").setting("PINPOOL_MAX_BYTES", "1.5G").build()?;
    /// assert_eq!(pool.stats().limits.max_bytes, Some(3 << 29));
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    pub fn setting(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.texts.push((env::full_name(name), value.to_string()));
        self
    }

    /// The settings that a pool built now would have: what code sets, else the environment, else the defaults.
    ///
    /// # Errors
    ///
    /// [`Error::is_setting`](crate::Error::is_setting), as [`build`](Self::build).
    #[doc(hidden)]
    pub fn config(&self) -> Result<Config> {
        let report = self.examine();
        Error::first_of(report.errors).map_or(Ok(report.config), Err)
    }

    /// The settings and their errors. The default GPU depends on the process.
    fn examine(&self) -> EnvReport {
        let mut settings = self.settings.clone();
        let set = |(name, text): &(String, String)| env::set(&mut settings, name, text).err();
        let mut errors: Vec<_> = self.texts.iter().filter_map(set).collect();
        let mut report = env::examine(&settings, self.env_prefix.as_deref());
        errors.append(&mut report.errors);
        report.errors = errors;
        // A pool that pins without a driver does not look for one: a child that another thread forks meanwhile may find the
        // dynamic linker at work.
        let may_use_gpu = matches!(
            report.config.backend,
            Backend::Auto | Backend::Gpu | Backend::Vmm | Backend::Register | Backend::Cuda
        );
        if may_use_gpu && report.errors.is_empty() && !report.is_set("PINPOOL_DEVICE") {
            report.config.device = backend::default_device();
        }
        report
    }

    /// Whether the process's maintenance thread serves the pool (the default), so that idle memory is released and statistics are
    /// current while the program makes no calls. Without a background thread, call [`Pool::maintain`] periodically.
    pub fn background_thread(mut self, polls: bool) -> Self {
        self.settings.code.background_thread = Some(polls);
        self
    }

    /// Keeps the call stack of one request in `every`, drawn at random, so that a recording, the diagnosis of a leak and the list of
    /// buffers in use name the line that it came from; 0 (the default): none. Every request then takes the slow path.
    #[cfg(feature = "observe")]
    pub fn call_stacks(mut self, every: u64) -> Self {
        self.settings.code.call_stacks = every;
        self
    }

    /// Sets how the pool learns that a copy is over, for benchmarks. It may change or go at any time.
    #[doc(hidden)]
    pub fn unstable_fence(mut self, fence: crate::FenceKind) -> Self {
        self.settings.code.fence = fence;
        self
    }

    /// Sets the number of threads that touch new memory, for benchmarks. It may change or go at any time.
    #[doc(hidden)]
    pub fn unstable_pin_threads(mut self, threads: usize) -> Self {
        self.settings.code.pin_threads = Some(threads.max(1));
        self
    }

    /// Sets how long the pool waits for copies when it ends, for tests. It may change or go at any time.
    #[doc(hidden)]
    pub fn unstable_close_wait(mut self, wait: Duration) -> Self {
        self.settings.code.close_wait = Some(wait);
        self
    }

    /// Reads memory pressure from `file`, for tests. It may change or go at any time.
    #[doc(hidden)]
    pub fn unstable_pressure(mut self, file: impl Into<PathBuf>) -> Self {
        self.settings.code.pressure = Some(file.into());
        self
    }

    /// Name of the pool in its log lines (`pool[loader] created: ...`) and statistics. TensorFlow's two lines carry no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.log.name = Some(name.into());
        self
    }

    /// Takes the time from `clock`: for replays and tests. The pool then has no maintenance thread,
    /// unless [`background_thread`](Self::background_thread) asks for one.
    #[doc(hidden)]
    pub fn unstable_clock(mut self, clock: ManualClock) -> Self {
        self.clock = Some(clock);
        self.settings.code.background_thread.get_or_insert(false);
        self
    }

    /// Reads the memory of the machine, its nodes and its control groups below `root`: for tests.
    #[doc(hidden)]
    pub fn unstable_host_root(mut self, root: impl Into<PathBuf>) -> Self {
        self.host_root = root.into();
        self
    }

    /// Counts this pool's checks with `log_sampler` instead of with all pools of the process.
    #[doc(hidden)]
    pub fn unstable_log_sampler(mut self, log_sampler: LogSampler) -> Self {
        self.log.log_sampler = log_sampler;
        self
    }

    /// Calls `listener` after every check of the rates, printed or not, on the thread that returned a buffer and so triggered
    /// the check, outside of all pool locks. A panic of the listener ends there: it reaches neither the return nor the pool.
    #[doc(hidden)]
    pub fn unstable_on_check(mut self, listener: impl Fn(&CheckReport) + Send + Sync + 'static) -> Self {
        self.log.listener = Some(Arc::new(listener));
        self
    }

    /// Builds the pool. Keeps nothing pinned except its reserve. With `PINPOOL_RESERVE_WAIT=0`, about the
    /// first 8 MiB of it are pinned when this returns.
    ///
    /// [`Backend::Auto`] tries each driver backend until one works: it pins, touches, copies and releases 2 MiB. Under `adaptive` this
    /// creates no context on a device without one, unless the driver refuses `vmm` or needs a context for it. The release on
    /// `register` and `cuda` waits for the device's work. A backend that is set explicitly is tried by the first request, except
    /// `vmm`, which is tried here.
    ///
    /// If the process has not started the driver, `Auto` tries the backends at the first use of the pool, so that children forked
    /// before it have CUDA; a pool with a reserve, a recording, a NUMA node or a shared limit tries them here.
    ///
    /// # Errors
    ///
    /// - [`Error::is_setting`](crate::Error::is_setting) if a value is invalid, in code as in a variable
    ///   (`max_bytes(0)`), two settings contradict each other, or one needs a feature that this build lacks,
    /// - [`Error::is_backend`](crate::Error::is_backend) if the chosen backend is not available, or cannot pin the
    ///   reserve.
    pub fn build(self) -> Result<Pool> {
        let EnvReport { variables, errors, warnings, config, .. } = self.examine();
        let log = PoolLog { number: PoolLog::next_number(), log_every: config.log_every, ..self.log };
        log.unused_variables(&warnings);
        if let Some(error) = Error::first_of(errors) {
            return Err(error);
        }
        let log = Arc::new(log);
        let root = self.host_root;
        // Before the driver opens descriptors: see `shared_memory` for the order in which the descriptors of a process are
        // closed.
        let shared = join_shared_limit(&config, &log, &root)?;
        let begins_late = shared.is_none() && may_begin_late(&config);
        let late_log = log.clone();
        let heap = Config { backend: Backend::Heap, preset: Preset::TensorFlow, ..config.clone() };
        let reserve_bytes = config.reserve_bytes;
        let begin = move |config: &Config, shared: Option<SharedLimit>| {
            let mut limit = AutoLimit::new(root.clone());
            let is_auto = shared.is_none() && config.max_bytes == Limit::Auto;
            let member = Member::new(root.clone(), log.name.clone(), is_auto);
            let (mut max_bytes, limit_origin) =
                limit.set(config.max_bytes, if is_auto { member.auto_bytes() } else { 0 });
            let chosen = backend::choose(&config.backend, pin_options(config, &root, max_bytes, &[]))?;
            max_bytes = chosen.lock_limit_bytes.or(max_bytes);
            limit.lock_limit_bytes = chosen.lock_limit_bytes;
            let (source, has_arena) = (&*chosen.source, config.preset == Preset::Adaptive);
            log.started(&Start {
                preset: config.preset.name(),
                backend: source.name(),
                is_pinned: source.is_pinned(),
                limit: &limit_origin,
                device: source.needs_gpu().then_some(config.device),
                numa_node: source.numa_node(),
                granule_bytes: source
                    .virtual_memory()
                    .filter(|_| has_arena)
                    .map(|memory| granule_bytes(max_bytes, memory.granule_bytes() as u64)),
                huge_pages: limits::memory_rules(&root).huge_pages.as_deref(),
                settings: &env::origins(&variables),
                passed_over: &chosen.passed_over,
            });
            chosen.findings.iter().for_each(|finding| log.found(finding));
            chosen.lock_limit_bytes.iter().for_each(|&limit_bytes| log.lock_limited(limit_bytes));

            #[cfg(feature = "observe")]
            let recorder = recorder(config, &variables, &log, &*chosen.source)?;
            #[cfg(not(feature = "observe"))]
            let recorder: Option<Arc<Recorder>> = None;
            let source = CalledSource::new(chosen.source, recorder.clone());
            let pageable = (config.on_full == OnFull::Pageable).then(|| Pageable::new(max_bytes));
            let claim = Budget::of_pool(max_bytes, member, shared);
            let memory = memory(config, (source, claim), pageable, &log, root.clone())?;
            let time = Timekeeper::new(self.clock.clone());
            let core = Core::new(config.clone(), memory, time, log.clone(), recorder, limit);
            #[cfg(feature = "observe")]
            core.serve_statistics();
            core.watch_shared_limit();
            Ok(core)
        };
        if begins_late {
            // The arena may get no addresses; ordinary memory without an arena needs none.
            let begin = move || {
                begin(&config, None).or_else(|why: Error| {
                    let found = format!("the pool is `tensorflow` over `heap`, without an arena: {why}");
                    late_log.found(&Finding::warning("address-space", found).remedy("raise `ulimit -v`"));
                    begin(&heap, None)
                })
            };
            let begin = move || begin().unwrap_or_else(|error| unreachable!("ordinary memory: {error}"));
            return Ok(Pool { handle: Arc::new(Handle::new(Box::new(begin))) });
        }
        let pool = Pool::of(begin(&config, shared)?);
        if reserve_bytes > 0 {
            pool.reserve(reserve_bytes)?;
        }
        Ok(pool)
    }
}

/// Whether the first use of the pool is soon enough to choose its backend: no step can fail, nothing is reserved, and the driver,
/// which the choice starts, is not started yet.
fn may_begin_late(config: &Config) -> bool {
    let Config { backend, reserve_bytes, trace, numa_node, .. } = config;
    matches!(backend, Backend::Auto)
        && numa_node.is_none()
        && *reserve_bytes == 0
        && trace.is_none()
        && backend::may_start_driver()
}

macro_rules! setters {
    ($(group $group:literal; $(
        #[doc = $doc:literal]
        $variable:literal = $default:expr, $name:ident $(($argument:ty))?: $type:ty as $format:expr;
    )+)+) => {
        /// The most common settings; [`setting`](Self::setting) has all. A value that code sets overrides the variable.
        impl PoolBuilder {
            $($($(
                #[doc = $doc]
                ///
                #[doc = concat!("Variable `", $variable, "`, default `", stringify!($default), "`.")]
                pub fn $name(mut self, value: $argument) -> Self {
                    self.settings.$name = Some(value.into());
                    self
                }
            )?)+)+
        }
    };
}
for_each_setting!(setters);

/// The recorder, if `PINPOOL_TRACE` is set.
#[cfg(feature = "observe")]
fn recorder(
    config: &Config,
    variables: &[VariableReport],
    log: &PoolLog,
    source: &dyn backend::Source,
) -> Result<Option<Arc<Recorder>>> {
    let Some(path) = &config.trace else { return Ok(None) };
    let pinned = if source.is_pinned() { "yes" } else { "no" };
    let mut facts = vec![("backend".to_owned(), source.name().to_owned()), ("pinned".to_owned(), pinned.to_owned())];
    facts.extend(log.name.iter().map(|name| ("name".to_owned(), name.clone())));
    facts.extend(variables.iter().map(|of| (of.name.to_owned(), config.value_of(of.name))));
    let set_in_code: Vec<_> = variables.iter().filter(|of| of.origin == "builder").map(|of| of.name).collect();
    facts.push((SET_IN_CODE.to_owned(), set_in_code.join(" ")));
    match Recorder::open(path, PoolDescription { number: 0, facts }) {
        Ok((recorder, earlier)) => {
            earlier.iter().for_each(|earlier| log.earlier_recording(recorder.path(), earlier));
            log.recording(recorder.path());
            Ok(Some(recorder))
        }
        Err(Unrecorded::Failed(why)) => {
            Err(ErrorKind::Setting { name: "PINPOOL_TRACE", value: path.display().to_string(), why }.into())
        }
        Err(other) => {
            let why = match other {
                Unrecorded::Taken => "another process writes it; put %p, the number of the process, into the name",
                _ => "another thread of this process was opening a trace for too long",
            };
            count_failed();
            log.not_recording(path, why);
            Ok(None)
        }
    }
}

/// A slot in the shared limit, if `PINPOOL_LEDGER` names one. Its first owner sets its limit.
fn join_shared_limit(config: &Config, log: &PoolLog, root: &Path) -> Result<Option<SharedLimit>> {
    let name = match &config.ledger {
        SharedLimitName::Disabled => return Ok(None),
        SharedLimitName::Auto if !env::is_one_of_several() => return Ok(None),
        SharedLimitName::Auto => "auto",
        SharedLimitName::Named(name) => name,
    };
    let refused = |why: String| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into();
    if let Some(problem) = shared_limit::problem_of(name) {
        return Err(refused(problem.to_owned()));
    }
    let asked_bytes = if let Limit::Bytes(bytes) = config.max_bytes { Some(bytes) } else { None };
    // All processes together have what `auto` gives to one pool.
    let auto = || AutoLimit::new(root.to_owned()).set(Limit::Auto, 0).0;
    let max_bytes = asked_bytes.or_else(auto).unwrap_or(u64::MAX);
    match SharedLimit::attach(name, log.name.as_deref(), max_bytes) {
        Ok(shared) => {
            let report = shared.report();
            log.joined_shared_limit(&report);
            let other_bytes = asked_bytes.filter(|&bytes| report.max_bytes != Some(bytes));
            other_bytes.iter().for_each(|&bytes| log.shared_limit_differs(name, report.max_bytes, bytes));
            Ok(Some(shared))
        }
        // This shared limit was not requested by name.
        Err(error) if config.ledger == SharedLimitName::Auto => {
            log.shared_limit_unused(&error);
            Ok(None)
        }
        Err(error) => Err(refused(error)),
    }
}

fn memory(
    config: &Config,
    (source, claim): (CalledSource, Claim),
    pageable: Option<Pageable>,
    log: &Arc<PoolLog>,
    root: PathBuf,
) -> Result<Memory> {
    match config.preset {
        Preset::TensorFlow => Ok(Memory::one_each(OneEach::new(source, claim, log.clone()), pageable)),
        Preset::Adaptive => {
            let idle_timeout_us = config.idle_timeout.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
            let backend = source.name();
            let settings = ArenaSettings {
                may_grow: config.growth,
                pin_threads: config.pin_threads_on_host(),
                // Miri takes a thread that does not end for a leak.
                background_thread: config.may_poll(),
                retention: Retention::after(idle_timeout_us),
            };
            let files = (root, config.code.pressure.as_deref());
            ArenaSupply::new(source, claim, settings, log.clone(), files)
                .map(|arena| Memory::of_arena(Arc::new(arena), pageable))
                .map_err(|error| ErrorKind::Unavailable { backend, why: error.to_string() }.into())
        }
    }
}
