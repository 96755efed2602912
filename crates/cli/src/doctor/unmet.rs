//! What the settings ask of this machine and it does not have: cheap looks, without a page-lock.

use std::path::Path;

use pinpool::config::EnvReport;
use pinpool::{Config, Finding, Level, PressureSource, backend};
use pinpool_os::host;

use super::memory::reserve_problem;

/// What the settings of the environment `env` ask for and this machine does not have, one finding for each setting; none where
/// two of them contradict each other. Pins nothing, opens no trace and no socket.
pub(crate) fn unmet(env: &EnvReport) -> Vec<Finding> {
    if !env.contradictions.is_empty() {
        return Vec::new();
    }
    let config = &env.config;
    let is_set = |name| env.variables.iter().any(|variable| variable.name == name && variable.origin == "environment");
    let device = is_set("PINPOOL_DEVICE").then(|| device(config)).flatten();
    [reserve(config), numa_node(config), pressure(config), device, trace(config), socket(config)]
        .into_iter()
        .flatten()
        .collect()
}

fn reserve(config: &Config) -> Option<Finding> {
    let available_bytes = host::memory(Path::new("/")).map_or(u64::MAX, |memory| memory.available_bytes);
    let max_bytes = config.ceiling_on_host().0;
    let (found, remedy) = reserve_problem(config, max_bytes, available_bytes, config.reserve_bytes, false)?;
    Some(Finding::error("PINPOOL_RESERVE", found).remedy(remedy))
}

fn numa_node(config: &Config) -> Option<Finding> {
    let (node, nodes) = (config.numa_node?, host::numa_nodes(Path::new("/")));
    let found = || match &nodes[..] {
        [] | [_] => "the machine has one memory node".to_owned(),
        nodes => format!("the memory nodes are {nodes:?}"),
    };
    (!nodes.contains(&node)).then(|| {
        let found = format!("there is no node {node}: {}", found());
        Finding::warning("PINPOOL_NUMA_NODE", found).remedy("set one of these, or auto")
    })
}

fn pressure(config: &Config) -> Option<Finding> {
    let PressureSource::File(path) = &config.pressure else { return None };
    let error = std::fs::read(path).err()?;
    let found = format!("{} cannot be read: {error}", path.display());
    Some(Finding::warning("PINPOOL_PRESSURE", found).remedy("name a file like /proc/pressure/memory, or set on or off"))
}

fn device(config: &Config) -> Option<Finding> {
    let Finding { level, found, remedy, .. } = backend::gpu(config.device);
    let remedy = remedy.unwrap_or_else(|| "memory is pinned for no GPU".to_owned());
    (level > Level::Ok).then(|| Finding::warning("PINPOOL_DEVICE", found).remedy(remedy))
}

fn trace(config: &Config) -> Option<Finding> {
    let folder = missing_folder(config.trace.as_deref()?)?;
    Some(Finding::error("PINPOOL_TRACE", folder).remedy("make it, or name a file in another one"))
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
