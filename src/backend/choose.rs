//! The setting [`Backend`], and the choice of a source: the requested source, or the best source that works.
//!
//! | pool | `Auto` tries, in this order |
//! | --- | --- |
//! | with an arena (`adaptive`) | `vmm`, `register`, `cuda`, `mlock`, `heap` |
//! | without (`tensorflow`) | `cuda`, `mlock`, `heap`: each miss is an allocation, for which `vmm` and `register` are too slow |
//!
//! A driver source is chosen if a trial could allocate memory, copy from it and release it ([`trial`]); otherwise the refusal is
//! kept for the log line and the next source is tried. The trial of `vmm` creates no context, and copies only if there is a
//! context; the trials of `register` and `cuda` create a context. A source that the user names gets no
//! trial, except `vmm`; `gpu` tries each.

use std::path::Path;
use std::sync::Arc;

use super::heap::HeapSource;
use super::mlock::lock_limit;
use super::options::PinOptions;
use super::source::{BuiltInSource, Source};
use super::trial;
use crate::error::{Error, ErrorKind, Result};
use crate::report::{Finding, Severity};
use pinpool_os::format::Size;
use pinpool_os::host;

/// If `RLIMIT_MEMLOCK` limits a pool to less than this, `Auto` chooses `heap`, because a pool for one or two batches is useless.
const LOCKABLE_BYTES_MIN: u64 = 64 << 20;

/// The source from which a pool takes its memory.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum Backend {
    /// The first of `vmm`, `register`, `cuda`, `mlock` and `heap` that works; under the preset `tensorflow` the first of `cuda`,
    /// `mlock` and `heap`.
    #[default]
    Auto,
    /// The first of `vmm`, `register` and `cuda` that works; under the preset `tensorflow` only `cuda`. An error if none works.
    Gpu,
    /// Virtual host memory of the CUDA driver, which grows and shrinks without blocking copies. Only for `adaptive`.
    Vmm,
    /// Huge pages registered with the CUDA driver (`cuMemHostRegister`). Only for `adaptive`.
    Register,
    /// Memory pinned by the CUDA driver (`cuMemHostAlloc`).
    Cuda,
    /// Resident memory (`mlock`), which CUDA copies as pageable memory.
    Mlock,
    /// Ordinary pageable memory.
    Heap,
    /// A custom source. It acquires and releases whole regions; a wrapper around another source does not inherit its virtual
    /// memory.
    Source(Arc<dyn Source>),
}

impl Backend {
    /// Returns the name in settings, log lines and statistics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Gpu => "gpu",
            Self::Vmm => "vmm",
            Self::Register => "register",
            Self::Cuda => "cuda",
            Self::Mlock => "mlock",
            Self::Heap => "heap",
            Self::Source(source) => source.name(),
        }
    }

    pub(crate) fn may_use_gpu(&self) -> bool {
        matches!(self, Self::Auto | Self::Gpu | Self::Vmm | Self::Register | Self::Cuda)
    }
}

/// The source that a pool takes its memory from, and what its log reports about the choice: see
/// `Config::choose_source`.
#[derive(Debug)]
#[non_exhaustive]
pub struct ChosenSource {
    /// The source.
    pub source: Arc<dyn Source>,
    /// `RLIMIT_MEMLOCK` in bytes, if it applies to this process and is below the pool's limit, which it then replaces.
    pub lock_limit_bytes: Option<u64>,
    /// Better sources that do not work here, each with the reason.
    pub passed_over: Vec<(&'static str, String)>,
    /// Disadvantages of the choice, such as an unused GPU or pageable memory.
    pub findings: Vec<Finding>,
}

impl ChosenSource {
    fn new(source: Arc<dyn Source>) -> Self {
        Self { source, lock_limit_bytes: None, passed_over: Vec::new(), findings: Vec::new() }
    }
}

/// Returns the source for `backend` under `options`.
pub(crate) fn choose(backend: &Backend, options: PinOptions<'_>) -> Result<ChosenSource> {
    choose_on(backend, options, cfg!(target_os = "linux"))
}

/// Chooses a source as [`choose`] does, on Linux or on another system. On systems other than Linux no memory is pinned.
fn choose_on(backend: &Backend, options: PinOptions<'_>, is_linux: bool) -> Result<ChosenSource> {
    let options = PinOptions { node: existing_node(options.root, options.node)?, ..options };
    let unavailable = |why: String| Error::unavailable(format!("backend `{}`", backend.name()), why);
    let mut chosen = match backend {
        Backend::Heap => ChosenSource::new(Arc::new(HeapSource::new().for_pool(&options))),
        Backend::Source(source) => ChosenSource::new(source.clone()),
        Backend::Auto if is_linux => best_available(options),
        Backend::Auto => {
            let found = Finding::warning("pinning", "memory is not pinned, which needs Linux")
                .remedy("set PINPOOL_BACKEND=heap to accept this");
            ChosenSource { findings: vec![found], ..ChosenSource::new(Arc::new(HeapSource::new().for_pool(&options))) }
        }
        _ if !is_linux => Err(unavailable("needs Linux; use heap or a custom source on this system".to_owned()))?,
        Backend::Gpu => best_of_driver(options).map_err(|passed_over| {
            let Finding { found: gpu, remedy, .. } = gpu_finding(options.device);
            let reasons = passed_over.iter().map(|(name, why)| format!("{name}: {why}"));
            unavailable([gpu].into_iter().chain(remedy).chain(reasons).collect::<Vec<_>>().join("; "))
        })?,
        Backend::Vmm | Backend::Register if !options.has_arena => {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow each miss is a separate allocation and each eviction \
                       a release, which this backend makes slower than cuda does";
            let (name, value) = ("PINPOOL_BACKEND", backend.name().to_owned());
            return Err(ErrorKind::Setting { name, value, why: why.to_owned() }.into());
        }
        Backend::Vmm | Backend::Register | Backend::Cuda => {
            ChosenSource::new(driver_source(backend.name(), options, true).map_err(unavailable)?)
        }
        Backend::Mlock => ChosenSource::new(Arc::new(HeapSource::locked().for_pool(&options))),
    };
    chosen.findings.extend(node_ignored(&*chosen.source, options.node));
    chosen.findings.extend(options.hugetlb.finding(options.root));
    chosen.findings.extend(chosen.source.findings());
    Ok(chosen)
}

/// Returns the finding that `source` ignores the requested node; `None` if it does not, or if no node is requested.
fn node_ignored(source: &dyn Source, node: Option<u32>) -> Option<Finding> {
    let node = node.filter(|_| source.numa_node() != node)?;
    let what = format!("backend {} cannot choose the NUMA node: PINPOOL_NUMA_NODE={node} has no effect", source.name());
    Some(Finding::warning("numa-node", what).remedy("use vmm, register, mlock or heap, or leave PINPOOL_NUMA_NODE out"))
}

/// Returns the requested node; `None` if no node is requested, or if the machine has one node or its nodes are unknown.
fn existing_node(root: &Path, node: Option<u32>) -> Result<Option<u32>> {
    let Some(requested) = node else { return Ok(None) };
    let nodes = host::numa_nodes(root);
    if nodes.len() < 2 {
        return Ok(None);
    }
    if nodes.contains(&requested) {
        return Ok(node);
    }
    let why = format!("no such NUMA node, the machine has {nodes:?}");
    Err(ErrorKind::Setting { name: "PINPOOL_NUMA_NODE", value: requested.to_string(), why }.into())
}

/// Returns the driver sources that suit a pool with or without an arena, best first.
fn driver_sources(has_arena: bool) -> &'static [&'static str] {
    if has_arena { &["vmm", "register", "cuda"] } else { &["cuda"] }
}

/// Backends that do not work here, each with the reason.
type PassedOver = Vec<(&'static str, String)>;

/// Returns the best driver source that works. If none works, the error contains all of them, each with the reason.
fn best_of_driver(options: PinOptions<'_>) -> Result<ChosenSource, PassedOver> {
    let mut passed_over = Vec::new();
    for &name in driver_sources(options.has_arena) {
        match tried_source(name, options) {
            Ok(chosen) => return Ok(ChosenSource { passed_over, ..chosen }),
            Err(why) => passed_over.push((name, why)),
        }
    }
    Err(passed_over)
}

/// Returns the best source that works; `heap` if no other source works.
fn best_available(options: PinOptions<'_>) -> ChosenSource {
    let mut passed_over = match best_of_driver(options) {
        Ok(chosen) => return chosen,
        Err(passed_over) => passed_over,
    };
    let mut findings: Vec<_> = unused_gpu(options, &passed_over).into_iter().collect();
    let mlock = Arc::new(HeapSource::locked().for_pool(&options));
    match usable_lock_limit(&mlock, options.max_bytes) {
        Ok(lock_limit_bytes) => ChosenSource { source: mlock, lock_limit_bytes, passed_over, findings },
        Err(why) => {
            findings.push(Finding::warning("pinning", format!("memory is not pinned: {why}")).remedy(
                "raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK; set \
                             PINPOOL_BACKEND=heap to accept this",
            ));
            passed_over.push(("mlock", why));
            ChosenSource { passed_over, findings, ..ChosenSource::new(Arc::new(HeapSource::new().for_pool(&options))) }
        }
    }
}

/// Returns the driver source called `name`, after it has passed its trial.
fn tried_source(name: &'static str, options: PinOptions<'_>) -> Result<ChosenSource, String> {
    let mut chosen = ChosenSource::new(driver_source(name, options, false)?);
    // Creating the source `vmm` has tested a granule already.
    if name != "vmm" {
        let trial = trial::run(&*chosen.source, Some(options.device), options.max_bytes);
        let untested = trial.map_err(|error| error.to_string())?.and_then(|trial| trial.untested);
        chosen.findings.extend(untested.map(|error| trial::untested(name, &error)));
    }
    Ok(chosen)
}

/// Returns the finding about a GPU that is present but not used by any backend; `None` if there is no GPU.
fn unused_gpu(options: PinOptions<'_>, passed_over: &[(&'static str, String)]) -> Option<Finding> {
    let excluded = options.excluded.iter().find(|(name, _)| *name == "gpu");
    let gpu = excluded.map_or_else(|| gpu_finding(options.device), |(name, why)| Finding::warning(name, why.clone()));
    match (gpu.severity, passed_over.last()) {
        (Severity::Note, _) => None,
        (Severity::Ok, Some((name, why))) => {
            let found = format!("the GPU is not used although it is available ({}): {name}: {why}", gpu.found);
            Some(Finding::warning(gpu.check, found).remedy("`pinpool doctor` tries every backend"))
        }
        _ => Some(Finding { found: format!("the GPU is not used: {}", gpu.found), ..gpu }),
    }
}

/// Returns the finding about the GPU with this ordinal: [`Severity::Ok`] if the driver provides the GPU, [`Severity::Note`] if there
/// is neither GPU nor driver, otherwise [`Severity::Warning`] with the cause and a remedy. Creates no context.
#[cfg(feature = "cuda")]
pub fn gpu_finding(device: u32) -> Finding {
    crate::driver::state::find(device)
}

/// Returns the finding about the GPU in a build without the feature `cuda`: [`Severity::Warning`] if the machine has a GPU, otherwise
/// [`Severity::Note`].
#[cfg(not(feature = "cuda"))]
pub fn gpu_finding(_device: u32) -> Finding {
    const WHY: &str = "built without the `cuda` feature";
    match host::limits::nvidia_devices(Path::new("/")).first() {
        Some(sign) => Finding::warning("gpu", format!("{WHY}, and a GPU is present ({sign})"))
            .remedy("build with the feature `cuda`"),
        None => Finding::note("gpu", format!("{WHY}, and no GPU is present")),
    }
}

/// Returns the default GPU of a pool that starts now: the GPU that this process uses, else `preferred` if the driver lists it,
/// else the first. A pool for another GPU would create a context on that GPU, which takes GPU memory. Starts the driver only to
/// check `preferred`.
pub(crate) fn default_device(preferred: Option<u32>) -> u32 {
    #[cfg(feature = "cuda")]
    let in_use = crate::driver::device::in_use(preferred);
    #[cfg(not(feature = "cuda"))]
    let in_use = None;
    in_use.or_else(|| preferred.filter(|&ordinal| crate::check_cuda_device(ordinal).is_ok())).unwrap_or(0)
}

/// Returns whether trying the driver's backends would start the driver for the first time in this process.
pub(crate) fn may_start_driver() -> bool {
    #[cfg(feature = "cuda")]
    return crate::driver::is_present() && !crate::driver::is_started();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Returns `RLIMIT_MEMLOCK` if it limits the pool. Fails if no memory can be locked, or if it limits the pool to less than
/// [`LOCKABLE_BYTES_MIN`].
fn usable_lock_limit(mlock: &HeapSource, max_bytes: Option<u64>) -> Result<Option<u64>, String> {
    trial::run(mlock, None, Some(host::PAGE_BYTES as u64)).map_err(|error| error.to_string())?;
    match lock_limit().filter(|&limit_bytes| max_bytes.is_none_or(|max_bytes| max_bytes > limit_bytes)) {
        Some(limit_bytes) if limit_bytes < LOCKABLE_BYTES_MIN => {
            let (limit, least) = (Size(limit_bytes), Size(LOCKABLE_BYTES_MIN));
            Err(format!("RLIMIT_MEMLOCK lets this process lock only {limit}, less than {least}"))
        }
        binding => Ok(binding),
    }
}

/// Creates a driver source; creating `vmm` includes its trial. `is_named` says whether the user named the source.
#[cfg(feature = "cuda")]
pub(crate) fn driver_source(name: &str, options: PinOptions<'_>, is_named: bool) -> Result<Arc<dyn Source>, String> {
    use super::cuda::CudaSource;
    use super::register::RegisterSource;
    use super::vmm::VmmSource;

    if let Some((_, why)) = options.excluded.iter().find(|(excluded, _)| *excluded == name) {
        return Err(why.clone());
    }
    match name {
        "vmm" => VmmSource::for_pool(&options, is_named).map(|source| Arc::new(source) as _),
        "register" => RegisterSource::for_pool(&options).map(|source| Arc::new(source) as _),
        "cuda" => CudaSource::new(options.device).map(|source| Arc::new(source) as _),
        _ => return Err(format!("{name} is not a driver backend")),
    }
    .map_err(|error| error.to_string())
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn driver_source(_name: &str, options: PinOptions<'_>, _is_named: bool) -> Result<Arc<dyn Source>, String> {
    Err(format!("built without the `cuda` feature: device {} is unavailable", options.device))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(has_arena: bool) -> PinOptions<'static> {
        PinOptions { has_arena, ..PinOptions::new(0, None) }
    }

    #[test]
    fn auto_always_finds_a_source_and_gives_the_reasons_against_better_ones() {
        for has_arena in [true, false] {
            let chosen = choose(&Backend::Auto, options(has_arena)).unwrap();
            let order: Vec<&str> = driver_sources(has_arena).iter().copied().chain(["mlock", "heap"]).collect();
            let rank = order.iter().position(|&name| name == chosen.source.name()).unwrap();
            let passed_over: Vec<&str> = chosen.passed_over.iter().map(|(name, _)| *name).collect();
            assert_eq!(passed_over, order[..rank]);
            assert!(chosen.passed_over.iter().all(|(_, why)| !why.is_empty()));
            let unlocked = chosen.findings.iter().any(|finding| finding.check == "pinning");
            assert_eq!(unlocked, chosen.source.name() == "heap", "{:?}", chosen.findings);
        }
    }

    #[test]
    fn without_linux_memory_is_not_pinned_and_other_backends_are_refused() {
        let choose = |backend: &Backend| choose_on(backend, options(true), false);
        let chosen = choose(&Backend::Auto).unwrap();
        assert_eq!((chosen.source.name(), chosen.findings[0].severity), ("heap", Severity::Warning));
        for backend in [Backend::Heap, Backend::Source(chosen.source)] {
            assert!(choose(&backend).unwrap().findings.is_empty());
        }
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda, Backend::Mlock] {
            let error = choose(&backend).unwrap_err().to_string();
            assert!(error.contains(backend.name()) && error.contains("needs Linux"), "{error}");
        }
        #[cfg(feature = "cuda")]
        assert_eq!(driver_source("cud", options(true), true).unwrap_err(), "cud is not a driver backend");
    }

    #[cfg(not(miri))]
    #[test]
    fn a_missing_numa_node_is_an_error_unless_there_is_no_choice() {
        use host::tree;

        const ONLINE: &str = "/sys/devices/system/node/online";
        let root = tree::of(&[(ONLINE, "")]);
        assert_eq!(existing_node(root.path(), Some(3)).unwrap(), None, "nodes unknown");
        tree::write(&root, ONLINE, "0\n");
        assert_eq!(existing_node(root.path(), Some(3)).unwrap(), None);
        tree::write(&root, ONLINE, "0-1\n");
        assert_eq!(existing_node(root.path(), Some(1)).unwrap(), Some(1));
        let error = existing_node(root.path(), Some(3)).unwrap_err();
        assert!(error.is_setting() && error.to_string().contains("PINPOOL_NUMA_NODE=3"), "{error}");
    }
}
