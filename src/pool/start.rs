//! The start of a pool with resolved settings: joins the shared limit, determines the limit, chooses the source, opens the
//! recorder and creates the engine, in this order.

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
#[cfg(feature = "observe")]
use std::sync::atomic::Ordering;

use super::config_on_host::pin_options;
use crate::arena::Retention;
use crate::backend::{self, Backend, BuiltInSource, ChosenSource, PinnedBy, Source, VirtualMemory};
use crate::config::{Config, Limit, OnFull, Preset, ResolvedSettings, SharedLimitChoice, env};
use crate::engine::{
    ArenaSettings, ArenaSupply, HostLimit, ManualClock, Memory, MeteredSource, PoolCore, RegionSupply, Timekeeper,
    granule_bytes,
};
use crate::error::{Error, ErrorKind, Result};
use crate::quota::{Claim, ProcessMember};
use crate::report::{Finding, PoolLog};
use crate::size_class::Rounding;
use pinpool_observe::record::Recorder;
#[cfg(feature = "observe")]
use pinpool_observe::record::{self, FAILED_RECORDINGS, SET_IN_CODE, Unrecorded};
use pinpool_os::format::Size;
use pinpool_os::host::limits;
use pinpool_shared_limit::SharedLimit;

/// The resolved settings that a pool starts with.
pub(super) struct PoolStart {
    pub(super) settings: ResolvedSettings,
    pub(super) log: Arc<PoolLog>,
    pub(super) host_root: PathBuf,
    pub(super) clock: Option<ManualClock>,
}

impl PoolStart {
    /// Returns whether the backend can be chosen at the first use of the pool. This requires that nothing is reserved, that the
    /// choice would start the driver in this process, and that no step of the start can fail: an unknown NUMA node or a
    /// recording that cannot be opened would. Reserving addresses may fail, since
    /// [`start_deferred`](Self::start_deferred) then starts without an arena.
    pub(super) fn may_defer_start(&self) -> bool {
        let Config { backend, reserve, trace, numa_node, .. } = &self.settings.config;
        matches!(backend, Backend::Auto)
            && numa_node.is_none()
            && *reserve == 0
            && trace.is_none()
            && backend::may_start_driver()
    }

    /// Starts the engine at the first use of the pool. This must not fail, so if the arena gets no address space, the pool uses
    /// ordinary memory without an arena.
    pub(super) fn start_deferred(&self) -> Arc<PoolCore> {
        self.start_core(self.settings.config.clone(), None).unwrap_or_else(|why: Error| {
            let found = format!("the pool is `tensorflow` over `heap`, without an arena: {why}");
            self.log.found(&Finding::warning("address-space", found).remedy("raise `ulimit -v`"));
            self.start_over_heap()
        })
    }

    /// Starts the engine over ordinary memory, without an arena and without the driver.
    pub(super) fn start_over_heap(&self) -> Arc<PoolCore> {
        let (backend, preset, rounding) = (Backend::Heap, Preset::TensorFlow, Rounding::Pow2);
        let heap = Config { backend, preset, rounding, ..self.settings.config.clone() };
        self.start_core(heap, None).unwrap_or_else(|error| unreachable!("ordinary memory: {error}"))
    }

    /// Starts the engine with the settings `config`.
    pub(super) fn start_core(&self, mut config: Config, shared: Option<SharedLimit>) -> Result<Arc<PoolCore>> {
        let Self { log, host_root: root, .. } = self;
        if config.backend.may_use_gpu() && !self.settings.is_set("PINPOOL_DEVICE") {
            // The process may have chosen a GPU since the pool was built.
            config.device = backend::default_device(config.code_only.default_device);
        }
        let mut limit = HostLimit::new(root.clone(), if shared.is_some() { 1 } else { limits::local_ranks() });
        let is_auto = shared.is_none() && config.max_bytes == Limit::Auto;
        let member = ProcessMember::new(root.clone(), log.name.clone(), is_auto);
        let (mut max_bytes, origin) = limit.resolve(config.max_bytes, if is_auto { member.auto_bytes() } else { 0 });
        let chosen = backend::choose(&config.backend, pin_options(&config, root, max_bytes, &[]))?;
        max_bytes = chosen.lock_limit_bytes.or(max_bytes);
        limit.lock_limit_bytes = chosen.lock_limit_bytes;
        self.log_start(&config, &chosen, max_bytes, &origin);

        let recorder = self.recorder(&config, &*chosen.source)?;
        let source = MeteredSource::new(chosen.source, recorder.clone());
        let claim = Claim::under_new_budget(max_bytes, member, shared);
        let mut memory = self.memory(&config, source, claim)?;
        memory.pageable = (config.on_full == OnFull::Pageable).then(|| RegionSupply::pageable(max_bytes));
        let time = Timekeeper::new(self.clock.clone());
        let core = PoolCore::new(config, memory, time, log.clone(), recorder, limit);
        #[cfg(feature = "observe")]
        core.serve_statistics();
        core.watch_shared_limit();
        Ok(core)
    }

    fn log_start(&self, config: &Config, chosen: &ChosenSource, max_bytes: Option<u64>, limit_origin: &str) {
        let (log, source, adaptive) = (&self.log, &*chosen.source, config.preset == Preset::Adaptive);
        let granules = source.virtual_memory().filter(|_| adaptive);
        let granule_of = |memory: &dyn VirtualMemory| granule_bytes(max_bytes, memory.granule_bytes() as u64);
        let facts = [
            ("preset", Some(config.preset.to_string())),
            ("backend", Some(source.name().to_owned())),
            ("pinned", Some(source.pinned_by().map_or("no", PinnedBy::name).to_owned())),
            ("max", Some(limit_origin.to_owned())),
            ("granule", granules.map(|memory| Size(granule_of(memory)).to_string())),
            ("thp", limits::memory_rules(&self.host_root).huge_pages),
            ("gpu", source.needs_gpu().then(|| config.device.to_string())),
            ("numa_node", source.numa_node().map(|node| node.to_string())),
            ("version", Some(env!("CARGO_PKG_VERSION").to_owned())),
            ("pid", Some(process::id().to_string())),
        ];
        let facts = facts.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        let mut text = facts.collect::<Vec<_>>().join(" ");
        let settings = env::origins(&self.settings.variables);
        if !settings.is_empty() {
            text += &format!("; {settings}");
        }
        // Backends of the same driver are usually skipped for the same reason.
        for alike in chosen.passed_over.chunk_by(|(_, one), (_, next)| one == next) {
            let names: Vec<_> = alike.iter().map(|&(name, _)| name).collect();
            text += &format!(" (skipped {}: {})", names.join(", "), alike[0].1);
        }
        log.created(&text);
        chosen.findings.iter().for_each(|finding| log.found(finding));
        if let Some(limit_bytes) = chosen.lock_limit_bytes {
            log.lock_limit(limit_bytes);
        }
    }

    #[cfg(not(feature = "observe"))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)] // The signature is the same as with the feature.
    fn recorder(&self, _: &Config, _: &dyn Source) -> Result<Option<Arc<dyn Recorder>>> {
        Ok(None)
    }

    /// Opens the recorder if `PINPOOL_TRACE` is set. If another process writes the file, warns and returns `None`.
    #[cfg(feature = "observe")]
    fn recorder(&self, config: &Config, source: &dyn Source) -> Result<Option<Arc<dyn Recorder>>> {
        let log = &self.log;
        let Some(path) = &config.trace else { return Ok(None) };
        let pinned = source.pinned_by().map_or("no", PinnedBy::name);
        let set_in_code = config.code_only.set_in_code.join(" ");
        let facts = [("backend", source.name()), ("pinned", pinned), (SET_IN_CODE, &*set_in_code)];
        let facts = facts.into_iter().chain(log.name.iter().map(|name| ("name", name.as_str())));
        let facts = facts.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let variables = self.settings.variables.iter().map(|set| (set.name.to_owned(), config.value_of(set.name)));
        match record::open(path, facts.chain(variables).collect()) {
            Ok(recorder) => {
                log.trace_started(recorder.path());
                Ok(Some(recorder))
            }
            Err(Unrecorded::Failed(why)) => {
                Err(ErrorKind::Setting { name: "PINPOOL_TRACE", value: path.display().to_string(), why }.into())
            }
            Err(Unrecorded::Taken) => {
                FAILED_RECORDINGS.fetch_add(1, Ordering::Relaxed);
                log.trace_taken(path);
                Ok(None)
            }
        }
    }

    fn memory(&self, config: &Config, source: MeteredSource, claim: Claim) -> Result<Memory> {
        let log = self.log.clone();
        if config.preset == Preset::TensorFlow {
            return Ok(Memory::with_regions(source, claim, log));
        }
        let idle_timeout_us = config.idle_timeout.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        let settings = ArenaSettings {
            may_grow: config.growth,
            pin_threads: config.pin_threads_on_host(),
            hugetlb: config.hugetlb,
            retention: Retention::after(idle_timeout_us),
        };
        let (what, pressure) = (format!("backend `{}`", source.name()), config.code_only.pressure.as_deref());
        let arena = ArenaSupply::new(source, claim, settings, log, pressure)
            .map_err(|error| Error::unavailable(what, error))?;
        Ok(Memory::with_arena(arena))
    }

    /// Takes a slot in the shared limit that `PINPOOL_LEDGER` selects, if there is one. A pool that finds no living member sets
    /// the limit.
    pub(super) fn join_shared_limit(&self) -> Result<Option<SharedLimit>> {
        let (config, log) = (&self.settings.config, &self.log);
        let name = match &config.ledger {
            SharedLimitChoice::None => return Ok(None),
            SharedLimitChoice::Auto if !env::is_one_of_several() => return Ok(None),
            SharedLimitChoice::Auto => "auto",
            SharedLimitChoice::Named(name) => name,
        };
        let requested_bytes = config.max_bytes.bytes();
        // All processes together get the limit that `auto` gives to one pool.
        let auto = || HostLimit::new(self.host_root.clone(), 1).resolve(Limit::Auto, 0).0;
        let max_bytes = requested_bytes.or_else(auto).unwrap_or(u64::MAX);
        match SharedLimit::attach(name, log.name.as_deref(), max_bytes) {
            Ok(shared) => {
                let report = shared.report();
                let others = report.members.len().saturating_sub(1);
                log.shared_limit_joined(name, report.max_bytes, report.held_bytes, others);
                if let Some(bytes) = requested_bytes.filter(|&bytes| report.max_bytes != Some(bytes)) {
                    log.shared_limit_differs(name, report.max_bytes, bytes);
                }
                Ok(Some(shared))
            }
            // The user did not name this shared limit, so the pool starts without it.
            Err(error) if config.ledger == SharedLimitChoice::Auto => {
                log.shared_limit_unused(&error);
                Ok(None)
            }
            Err(why) => Err(ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into()),
        }
    }
}
