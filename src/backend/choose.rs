//! Which source serves here: the one asked for, or the best that works.
//!
//! | preset | `Auto` tries, in this order |
//! | --- | --- |
//! | `adaptive` | `vmm`, `register`, `cuda`, `mlock`, `heap` |
//! | `tensorflow` | `cuda`, `mlock`, `heap`: each miss is an allocation of its own there, for which the first two are not made |
//!
//! Why each better one was passed over is kept for the log line. Trying asks a driver what it can do, and creates no
//! context.

use std::path::Path;
use std::sync::Arc;

use super::mlock::LockLimit;

use super::{Backend, HeapSource, MlockSource, SimSource, Source};
use crate::config::Preset;
use crate::error::{ErrorKind, Result};
use crate::host;

/// Below this much lockable memory, `Auto` takes `heap`: a pool that can hold no more than a batch or two is no pool.
const LEAST_LOCKABLE_BYTES: u64 = 64 << 20;

/// A source, and what there is to say about the choice.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) source: Arc<dyn Source>,
    /// The kernel lets this process lock no more than this, and less than the ceiling asked for.
    pub(crate) lock_limit_bytes: Option<u64>,
    /// Better sources that were passed over, each with the reason.
    pub(crate) passed_over: Vec<(&'static str, String)>,
}

impl Chosen {
    fn just(source: Arc<dyn Source>) -> Self {
        Self { source, lock_limit_bytes: None, passed_over: Vec::new() }
    }
}

/// What the memory is near to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PinOptions {
    /// Ordinal of the GPU.
    pub(crate) device: u32,
    /// Memory node asked for; `None` is the GPU's.
    pub(crate) node: Option<u32>,
    /// Threads that touch fresh pages at once.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "sources without a driver are told with each reserve")
    )]
    pub(crate) threads: usize,
}

/// The node, where there is a choice of nodes.
fn checked(root: &Path, node: Option<u32>) -> Result<Option<u32>> {
    let Some(asked) = node else { return Ok(None) };
    let nodes = host::numa_nodes(root);
    match nodes.len() {
        0 | 1 => Ok(None),
        _ if nodes.contains(&asked) => Ok(node),
        _ => {
            let why = format!("no such memory node, the machine has {nodes:?}");
            Err(ErrorKind::Setting { name: "PINPOOL_NUMA_NODE", value: asked.to_string(), why }.into())
        }
    }
}

fn mlock_on(node: Option<u32>) -> MlockSource {
    node.map_or_else(MlockSource::new, MlockSource::on_node)
}

/// Finds the source for `backend` under the rules of `preset`; `max_bytes` is the ceiling that the user set, if any.
pub(crate) fn choose(backend: &Backend, preset: Preset, place: PinOptions, max_bytes: Option<u64>) -> Result<Chosen> {
    let place = PinOptions { node: checked(Path::new("/"), place.node)?, ..place };
    match backend {
        Backend::Auto => Ok(best(preset, place, max_bytes)),
        Backend::Vmm | Backend::Register if preset == Preset::Tensorflow => {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow each miss is an allocation of its own and each eviction \
                       a release, which this back-end makes slower than cuda does";
            Err(ErrorKind::Setting { name: "PINPOOL_BACKEND", value: backend.name().to_owned(), why: why.to_owned() }
                .into())
        }
        Backend::Vmm | Backend::Register | Backend::Cuda => {
            let name = backend.name();
            of_driver(name, place).map(Chosen::just).map_err(|why| ErrorKind::Unavailable { backend: name, why }.into())
        }
        Backend::Mlock => Ok(Chosen::just(Arc::new(mlock_on(place.node)))),
        Backend::Heap => Ok(Chosen::just(Arc::new(HeapSource::new()))),
        Backend::Sim { total_bytes } => Ok(Chosen::just(Arc::new(SimSource::new(*total_bytes)))),
        Backend::Source(source) => Ok(Chosen::just(source.clone())),
    }
}

/// The back-ends of the driver that suit `preset`, best first.
fn of_driver_for(preset: Preset) -> &'static [&'static str] {
    match preset {
        Preset::Adaptive => &["vmm", "register", "cuda"],
        Preset::Tensorflow => &["cuda"],
    }
}

fn best(preset: Preset, place: PinOptions, max_bytes: Option<u64>) -> Chosen {
    let mut passed_over = Vec::new();
    for &name in of_driver_for(preset) {
        match of_driver(name, place) {
            Ok(source) => return Chosen { source, lock_limit_bytes: None, passed_over },
            Err(why) => passed_over.push((name, why)),
        }
    }
    let mlock = mlock_on(place.node);
    match usable_lock_limit(&mlock, max_bytes) {
        Ok(lock_limit_bytes) => Chosen { source: Arc::new(mlock), lock_limit_bytes, passed_over },
        Err(why) => {
            passed_over.push(("mlock", why));
            Chosen { source: Arc::new(HeapSource::new()), lock_limit_bytes: None, passed_over }
        }
    }
}

/// The limit to keep under, `None` where there is none or the ceiling is below it; or why `mlock` will not do.
fn usable_lock_limit(mlock: &MlockSource, max_bytes: Option<u64>) -> Result<Option<u64>, String> {
    let region = mlock.acquire(super::PAGE_BYTES).map_err(|error| error.to_string())?;
    #[allow(unsafe_code)] // Gives back the region of the probe.
    // SAFETY: acquired on the line above from the same source, no reference into it exists.
    unsafe { mlock.release(region) }.map_err(|error| error.to_string())?;
    match mlock.lock_limit() {
        LockLimit::None => Ok(None),
        LockLimit::Bytes(limit_bytes) if max_bytes.is_some_and(|max_bytes| max_bytes <= limit_bytes) => Ok(None),
        LockLimit::Bytes(limit_bytes) if limit_bytes >= LEAST_LOCKABLE_BYTES => Ok(Some(limit_bytes)),
        LockLimit::Bytes(limit_bytes) => {
            Err(format!("RLIMIT_MEMLOCK lets this process lock only {limit_bytes} B, under {LEAST_LOCKABLE_BYTES} B"))
        }
    }
}

#[cfg(feature = "cuda")]
fn of_driver(name: &str, place: PinOptions) -> Result<Arc<dyn Source>, String> {
    match name {
        "vmm" => super::VmmSource::new(place.device, place.node).map(|source| Arc::new(source) as _),
        "register" => super::RegisterSource::new(place.device, place.node)
            .map(|source| Arc::new(source.touched_by(place.threads)) as _),
        _ => super::CudaSource::new(place.device).map(|source| Arc::new(source) as _),
    }
    .map_err(|error| error.to_string())
}

#[cfg(not(feature = "cuda"))]
fn of_driver(_name: &str, place: PinOptions) -> Result<Arc<dyn Source>, String> {
    Err(format!("built without the `cuda` feature: device {} is out of reach", place.device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_always_finds_a_source_and_says_why_not_the_better_ones() {
        for preset in [Preset::Adaptive, Preset::Tensorflow] {
            let chosen = choose(&Backend::Auto, preset, PinOptions::default(), None).unwrap();
            let order: Vec<&str> = of_driver_for(preset).iter().copied().chain(["mlock", "heap"]).collect();
            let rank = order.iter().position(|&name| name == chosen.source.name()).unwrap();
            let passed_over: Vec<&str> = chosen.passed_over.iter().map(|(name, _)| *name).collect();
            assert_eq!(passed_over, order[..rank]);
            assert!(chosen.passed_over.iter().all(|(_, why)| !why.is_empty()));
        }
    }

    #[test]
    fn a_source_asked_for_is_the_source_taken() {
        for backend in [Backend::Mlock, Backend::Heap, Backend::Sim { total_bytes: 1 << 20 }] {
            assert_eq!(
                choose(&backend, Preset::Adaptive, PinOptions::default(), None).unwrap().source.name(),
                backend.name()
            );
        }
    }

    #[cfg(not(miri))]
    #[test]
    fn a_memory_node_that_is_not_there_is_named_and_one_node_is_no_choice() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/node");
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(checked(root.path(), Some(3)).unwrap(), None, "nobody says");
        std::fs::write(folder.join("online"), "0\n").unwrap();
        assert_eq!(checked(root.path(), Some(3)).unwrap(), None);
        std::fs::write(folder.join("online"), "0-1\n").unwrap();
        assert_eq!(checked(root.path(), Some(1)).unwrap(), Some(1));
        let error = checked(root.path(), Some(3)).unwrap_err();
        assert!(error.is_setting() && error.to_string().contains("PINPOOL_NUMA_NODE=3"), "{error}");
    }

    #[test]
    fn what_is_made_for_an_arena_is_refused_without_one() {
        for backend in [Backend::Vmm, Backend::Register] {
            let error = choose(&backend, Preset::Tensorflow, PinOptions::default(), None).unwrap_err();
            assert!(error.is_setting(), "{error}");
            for word in [backend.name(), "PINPOOL_BACKEND", "PINPOOL_PRESET=adaptive"] {
                assert!(error.to_string().contains(word), "{error}");
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn cuda_without_its_feature_is_an_error_that_says_so() {
        let error = choose(&Backend::Cuda, Preset::Adaptive, PinOptions::default(), None).unwrap_err();
        assert!(error.is_backend() && error.to_string().contains("feature"), "{error}");
    }
}
