//! What the settings ask of this machine and it does not have: cheap looks, without a page-lock.

use std::fs;
use std::path::Path;

use pinpool::Limit;
use pinpool::unstable::config::{Config, EnvReport};
use pinpool::unstable::{Finding, Level, backend};
use pinpool_os::host;
use pinpool_replay::Input;

use super::memory::{limits_on_host, reserve_problem, too_much};
use crate::input::RECORDING;

/// What the settings of the environment `env` ask for and this machine does not have, one finding for each setting; none if
/// no pool is built with them. Pins nothing, opens no trace and no socket.
pub(super) fn unmet(env: &EnvReport) -> Vec<Finding> {
    if !env.errors.is_empty() {
        return Vec::new();
    }
    let config = &env.config;
    let device = env.is_set("PINPOOL_DEVICE").then(|| device(config)).flatten();
    [reserve(config), limit(config), numa_node(config), device, trace(config), socket(config)]
        .into_iter()
        .flatten()
        .collect()
}

fn reserve(config: &Config) -> Option<Finding> {
    let memory = host::memory(Path::new("/"));
    let max_bytes = config.limit_on_host().0;
    let (found, remedy) = reserve_problem(config, max_bytes, memory.as_ref(), config.reserve_bytes, false)?;
    Some(Finding::error("PINPOOL_RESERVE", found).remedy(remedy))
}

fn limit(config: &Config) -> Option<Finding> {
    let (Limit::Bytes(bytes), memory) = (config.max_bytes, host::memory(Path::new("/"))?) else { return None };
    let ranks = limits_on_host(config);
    let found = too_much(ranks, bytes, &memory).filter(|_| ranks.saturating_mul(bytes) > memory.total_bytes)?;
    Some(Finding::warning("PINPOOL_MAX_BYTES", found).remedy("lower it, or set auto"))
}

fn numa_node(config: &Config) -> Option<Finding> {
    let (node, nodes) = (config.numa_node?, host::numa_nodes(Path::new("/")));
    let found = || match &nodes[..] {
        [] | [_] => "the machine has one NUMA node".to_owned(),
        nodes => format!("the NUMA nodes are {nodes:?}"),
    };
    (!nodes.contains(&node)).then(|| {
        let found = format!("there is no node {node}: {}", found());
        Finding::warning("PINPOOL_NUMA_NODE", found).remedy("set one of these, or auto")
    })
}

fn device(config: &Config) -> Option<Finding> {
    let Finding { level, found, remedy, .. } = backend::gpu(config.device);
    let remedy = remedy.unwrap_or_else(|| "memory is pinned for no GPU".to_owned());
    (level > Level::Ok).then(|| Finding::warning("PINPOOL_DEVICE", found).remedy(remedy))
}

fn trace(config: &Config) -> Option<Finding> {
    let path = config.trace.as_deref()?;
    if let Some(folder) = missing_folder(path) {
        return Some(Finding::error("PINPOOL_TRACE", folder).remedy("make it, or name a file in another one"));
    }
    let is_other = |input: Input| !input.first().starts_with(RECORDING);
    let holds_other = fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0)
        && Input::open(path).is_ok_and(is_other);
    let found = format!("{} is no recording, and is not overwritten", path.display());
    holds_other.then(|| Finding::error("PINPOOL_TRACE", found).remedy("name another file, or remove this one"))
}

fn socket(config: &Config) -> Option<Finding> {
    let folder = missing_folder(config.socket.as_deref()?)?;
    Some(Finding::warning("PINPOOL_SOCKET", folder).remedy("make it, or name a path in another one"))
}

/// That the folder of `path` is missing, if it is.
fn missing_folder(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    (!folder.is_dir()).then(|| format!("there is no folder {}", folder.display()))
}
