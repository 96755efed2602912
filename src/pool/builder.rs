//! The builder of a pool.
//!
//! The methods for settings are generated from the table in `config/settings.rs`. The module `config` decides what the settings
//! imply, and which settings contradict each other.

use std::fmt;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Pool;
use super::handle::Handle;
use super::start::PoolStart;
use crate::backend::{self, Backend};
use crate::config::{
    CodeOnlySettings, Config, HugeTlb, Limit, OnFull, Preset, ResolvedSettings, Rounding, Settings, SharedLimitChoice,
    StatsSocket, env, for_each_setting,
};
use crate::engine::ManualClock;
use crate::error::{Error, Result};
use crate::report::{LogSampler, PoolLog, RateCheckReport};

/// Collects the settings of a new pool. A setting that code does not set takes its value from the environment, or else its
/// default.
///
/// [`setting`](PoolBuilder::setting) lists all settings. Each also has a typed method.
#[must_use]
pub struct PoolBuilder {
    settings: Settings,
    /// Names and values passed to [`PoolBuilder::setting`].
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

/// Returns the same builder as [`Pool::builder`].
impl Default for PoolBuilder {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            texts: Vec::new(),
            env_prefix: Some(env::PREFIX.to_owned()),
            log: PoolLog::default(),
            clock: None,
            host_root: PathBuf::from("/"),
        }
    }
}

impl PoolBuilder {
    /// Ignores the `PINPOOL_*` variables. Settings that code does not set have their defaults.
    pub fn without_env(mut self) -> Self {
        self.env_prefix = None;
        self
    }

    /// Reads variables that begin with `prefix` in place of `PINPOOL_`. With the prefix `EVAL_PINPOOL_`, for example, the limit
    /// is read from `EVAL_PINPOOL_MAX_BYTES`. For programs with several pools that need different settings.
    pub fn env_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.env_prefix = Some(prefix.into());
        self
    }

    /// Returns the settings that a pool built now would have: what code sets, else the environment, else the defaults.
    ///
    /// # Errors
    ///
    /// [`Error::is_setting`](crate::Error::is_setting), as for [`build`](Self::build).
    #[doc(hidden)]
    pub fn unstable_config(&self) -> Result<Config> {
        let report = self.examine();
        Error::first_of(report.errors).map_or(Ok(report.config), Err)
    }

    /// Resolves the settings and collects their errors. If a driver backend is possible and no device is set, chooses the GPU
    /// that this process already uses, or else the first GPU.
    fn examine(&self) -> ResolvedSettings {
        let mut settings = self.settings.clone();
        let set = |(name, text): &(String, String)| env::set(&mut settings, name, text).err();
        let errors: Vec<_> = self.texts.iter().filter_map(set).collect();
        let mut report = env::examine(&settings, self.env_prefix.as_deref());
        report.errors.splice(0..0, errors);
        let in_code = report.variables.iter().filter(|set| set.origin == "builder").map(|set| set.name);
        report.config.code_only.set_in_code = in_code.collect();
        // A pool that pins without a driver does not search for a driver: a child that another thread forks during the search
        // could inherit a locked dynamic linker.
        if report.config.backend.may_use_gpu() && report.errors.is_empty() && !report.is_set("PINPOOL_DEVICE") {
            report.config.device = backend::default_device(None);
        }
        report
    }

    /// Sets whether the process's maintenance thread serves the pool (the default). The thread releases idle memory
    /// and keeps statistics current while the program makes no calls. Without it, call [`Pool::maintain`] periodically. Async
    /// requests, awaited copies, a shared limit, pinning (`register`, a reserve) and releases of idle GPU memory start threads
    /// in any case.
    pub fn maintenance_thread(mut self, is_enabled: bool) -> Self {
        self.settings.code_only.maintenance_thread = Some(is_enabled);
        self
    }

    /// Records the call stack of one request in `every`, chosen at random, so that a recording, the diagnosis of a leak and the
    /// logged list of buffers that outlive the pool's handles name the calling line. 0 (the default) records none. While call
    /// stacks are recorded, every request takes the slow path.
    #[cfg(feature = "observe")]
    pub fn call_stacks(mut self, every: u64) -> Self {
        self.settings.code_only.call_stacks = every;
        self
    }

    /// Changes settings that have no variable, for tests and benchmarks.
    #[doc(hidden)]
    pub fn unstable_settings(mut self, change: impl FnOnce(&mut CodeOnlySettings)) -> Self {
        change(&mut self.settings.code_only);
        self
    }

    /// Sets the name of the pool in its log lines (`pool[loader] created: ...`) and statistics. The two lines of the preset `tensorflow`
    /// have no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.log.name = Some(name.into());
        self
    }

    /// Takes the time from `clock`, for replays and tests. The pool then has no maintenance thread unless
    /// [`maintenance_thread`](Self::maintenance_thread) enables it.
    #[doc(hidden)]
    pub fn unstable_clock(mut self, clock: ManualClock) -> Self {
        self.clock = Some(clock);
        self.settings.code_only.maintenance_thread.get_or_insert(false);
        self
    }

    /// Reads the memory of the machine, its NUMA nodes and its cgroups below `root`, for tests.
    #[doc(hidden)]
    pub fn unstable_host_root(mut self, root: impl Into<PathBuf>) -> Self {
        self.host_root = root.into();
        self
    }

    /// Counts this pool's checks with `log_sampler` instead of with all pools of the process.
    #[doc(hidden)]
    pub fn unstable_log_sampler(mut self, log_sampler: LogSampler) -> Self {
        self.log.log_sampler = Some(log_sampler);
        self
    }

    /// Calls `listener` after every check of the rates, printed or not. The thread that triggered the check by returning a buffer
    /// makes the call, outside all pool locks. A panic in the listener is caught.
    #[doc(hidden)]
    pub fn unstable_on_check(mut self, listener: impl Fn(&RateCheckReport) + Send + Sync + 'static) -> Self {
        self.log.listener = Some(Arc::new(listener));
        self
    }

    /// Builds the pool. Only its reserve is pinned when this returns: as much as [`Pool::reserve`] pins, or with
    /// `PINPOOL_RESERVE_WAIT=0` about the first 8 MiB.
    ///
    /// [`Backend::Auto`] tries each driver backend until one works. A trial acquires at most 2 MiB (one granule with `vmm`),
    /// copies one word to the device and back, and releases the memory. The trial of `vmm` creates no context, and makes no
    /// copy on a device without one. The trials of `register` and `cuda` create a context, and their release waits for all
    /// device work. A named `gpu` or `vmm` is tried here as well; any other named backend is not used before the first
    /// request.
    ///
    /// If the process has not started the driver, `auto` postpones the trials to [`Pool::start`] or another first call on the
    /// pool, which makes them on the calling thread. An async program should call `start` on a thread that may block. A child
    /// forked before that call starts the pool for itself, and can use CUDA. With a reserve, a recording, a NUMA node or a
    /// shared limit the trials are not postponed. If a postponed start finds no address space, the pool warns and works as
    /// `tensorflow` over `heap`.
    ///
    /// # Errors
    ///
    /// - [`Error::is_setting`](crate::Error::is_setting) if a value is invalid, in code as in a variable (`max_bytes(0)`), two
    ///   settings contradict each other, or a setting needs a feature that this build lacks,
    /// - [`Error::is_backend`](crate::Error::is_backend) if the chosen backend is not available, or cannot pin the
    ///   reserve; [`Error::is_limit`](crate::Error::is_limit) if the reserve exceeds the limit `auto` or a shared limit.
    pub fn build(self) -> Result<Pool> {
        let mut settings = self.examine();
        let log = PoolLog { number: PoolLog::next_number(), log_every: settings.config.log_every, ..self.log };
        log.ineffective_settings(&settings.warnings);
        if let Some(error) = Error::first_of(mem::take(&mut settings.errors)) {
            return Err(error);
        }
        let start = Arc::new(PoolStart { settings, log: log.into(), host_root: self.host_root, clock: self.clock });
        // Join before the driver opens its descriptors. Linux 6.18 closes an exiting process's descriptors from the highest
        // number down, so the driver then unpins the memory before the lock of the shared limit is dropped. The kernel does not
        // guarantee this order.
        let shared = start.join_shared_limit()?;
        let pool = Pool { handle: Arc::new(Handle::new(start.clone(), None)) };
        if shared.is_none() && start.may_defer_start() {
            return Ok(pool);
        }
        let config = &start.settings.config;
        let core = start.start_core(config.clone(), shared)?;
        pool.handle.start_core_once(|| core);
        if config.reserve > 0 {
            pool.reserve(config.reserve)?;
        }
        pool.core().recorder().into_iter().for_each(|recorder| recorder.begin());
        Ok(pool)
    }
}

macro_rules! setters {
    ($(group $group:literal; $(
        #[doc = $doc:literal] $(#[doc = $in_code:literal])?
        $variable:literal = $default:expr, $name:ident($argument:ty): $type:ty as $format:expr;
    )+)+) => {
        impl PoolBuilder {
            /// Sets the setting `name` from text, as its variable does. Use it for values from a file or
            /// another language. The name may be in lower case and without `PINPOOL_`. Empty text sets nothing.
            ///
            /// | variable | meaning |
            /// | --- | --- |
            $($(#[doc = concat!("| `", $variable, "` |", $doc, " |")])+)+
            ///
            /// The names `maintenance_thread` and `call_stacks` (with the feature `observe`), which have no variable, are
            /// accepted too. [`build`](Self::build) fails if there is no such setting, if its value is invalid, or if it
            /// contradicts an earlier value for the same variable. A retired setting is ignored with a warning.
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
        }

        /// The settings. A value that code sets overrides the variable.
        impl PoolBuilder {
            $($(
                #[doc = concat!("Sets `", $variable, "`.", $doc)] $(#[doc = $in_code])?
                ///
                #[doc = concat!("Default: `", stringify!($default), "`, unless other settings or the machine change it.")]
                pub fn $name(mut self, value: $argument) -> Self {
                    self.settings.$name = Some(value.into());
                    self
                }
            )+)+
        }
    };
}
for_each_setting!(setters);
