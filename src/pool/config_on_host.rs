//! The settings resolved for this machine: the limit in bytes, the threads that pin, the source of memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backend::{self, ChosenSource, PinOptions, Source};
use crate::config::{Config, Preset};
use crate::engine::HostLimit;
use crate::error::Result;
use crate::report::{Finding, Severity};

impl Config {
    /// Returns the limit of a pool with these settings on this machine in bytes (`None` without a limit), and a text that states
    /// its origin. The limit of locked memory may be lower: [`ChosenSource::lock_limit_bytes`].
    #[doc(hidden)]
    pub fn limit_on_host(&self) -> (Option<u64>, String) {
        HostLimit::new(PathBuf::from("/"), pinpool_os::host::limits::local_ranks()).resolve(self.max_bytes, 0)
    }

    /// Chooses the source of memory for a pool with these settings as [`PoolBuilder::build`](crate::PoolBuilder::build) does, and
    /// reports why better sources were skipped. The backends named in `without`, each with a reason, are not tried. Use
    /// `without` to exclude backends of a driver that would terminate this process; `gpu` excludes all driver backends.
    ///
    /// # Errors
    ///
    /// [`Error::is_setting`](crate::Error::is_setting) or [`Error::is_backend`](crate::Error::is_backend), as for
    /// [`PoolBuilder::build`](crate::PoolBuilder::build).
    #[doc(hidden)]
    pub fn choose_source(&self, without: &[(&'static str, String)]) -> Result<ChosenSource> {
        backend::choose(&self.backend, pin_options(self, Path::new("/"), self.limit_on_host().0, without))
    }

    /// Returns the driver source with this name (`vmm`, `register` or `cuda`), whether or not a pool with these settings would
    /// choose it. [`try_out`](crate::backend::try_out) tries the source.
    ///
    /// # Errors
    ///
    /// The reason that the source is unavailable: a note if there is no GPU or no such source, otherwise a warning.
    #[doc(hidden)]
    pub fn driver_source(&self, name: &'static str) -> Result<Arc<dyn Source>, Finding> {
        if !["vmm", "register", "cuda"].contains(&name) {
            return Err(Finding::note(name, "not a driver backend"));
        }
        let options = pin_options(self, Path::new("/"), self.limit_on_host().0, &[]);
        backend::driver_source(name, options, self.backend.name() == name).map_err(|why| {
            match backend::gpu_finding(self.device).severity {
                Severity::Ok => Finding::warning(name, why),
                _ => Finding::note(name, "needs a GPU and its driver"),
            }
        })
    }

    /// Returns the number of threads that touch new memory in a pool with these settings: one for each core that the process may
    /// use, unless code sets another number.
    #[doc(hidden)]
    pub fn pin_threads_on_host(&self) -> usize {
        self.code_only.pin_threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }
}

/// Returns the options for pinning memory in a pool with these settings and a limit of `max_bytes`, on the machine with its files
/// below `root`.
pub(super) fn pin_options<'a>(
    config: &Config,
    root: &'a Path,
    max_bytes: Option<u64>,
    excluded: &'a [(&'static str, String)],
) -> PinOptions<'a> {
    PinOptions {
        root,
        device: config.device,
        node: config.numa_node,
        has_arena: config.preset == Preset::Adaptive,
        max_bytes,
        hugetlb: config.hugetlb,
        excluded,
    }
}
