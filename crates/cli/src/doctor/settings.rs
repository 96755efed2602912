//! The PINPOOL_ variables and their problems, for `pinpool doctor --settings` and for the other checks.

use std::fmt::Display;
use std::path::Path;

use pinpool::unstable::Finding;
use pinpool::unstable::config::Config;
use pinpool::unstable::config::env::{self, VariableReport};
use pinpool_observe::record::{Unrecorded, check_path};
use pinpool_os::host;

use pinpool_cli::exit::ExitError;
use pinpool_cli::table::columns_left;
use pinpool_cli::terminal::Terminal;

/// The check to which all problems of the settings belong.
pub(super) const CHECK: &str = "settings";

/// The variables that most programs need.
const COMMON: [&str; 8] = [
    "PINPOOL_MAX_BYTES",
    "PINPOOL_RESERVE",
    "PINPOOL_WAIT",
    "PINPOOL_ON_FULL",
    "PINPOOL_IDLE_TIMEOUT",
    "PINPOOL_LEDGER",
    "PINPOOL_TRACE",
    "PINPOOL_SOCKET",
];

/// Lists the variables. Exits with 2 if they are invalid or contradict each other.
pub(super) fn run(all: bool, terminal: &Terminal) -> Result<(), ExitError> {
    let report = env::report();
    let is_listed = |variable: &&VariableReport| all || COMMON.contains(&variable.name) || variable.origin != "default";
    let listed: Vec<_> = report.variables.iter().filter(is_listed).collect();
    let rows = listed.iter().map(|row| [row.name, &row.value, row.origin, &row.default, row.meaning]);
    let rows = std::iter::once(["variable", "value", "from", "default", "meaning"]).chain(rows);
    terminal.print(columns_left(&rows.map(|row| row.map(str::to_owned).to_vec()).collect::<Vec<_>>()).trim_end())?;
    let line = |level: &str, text: &dyn Display| terminal.write(format!("{level}: {text}\n").as_bytes());
    if let more @ 1.. = report.variables.len() - listed.len() {
        line("note", &format_args!("{more} more have their defaults: `pinpool doctor --settings --all` lists them"));
    }
    report.warnings.iter().for_each(|warning| line("warning", warning));
    report.errors.iter().for_each(|error| line("error", error));
    if report.errors.is_empty() { Ok(()) } else { Err(ExitError::Settings) }
}

/// Returns the settings from the environment, with `device` and `reserve` overridden, and their problems.
pub(super) fn checked(device: Option<u32>, reserve: Option<u64>) -> (Config, Vec<Finding>) {
    let set: Vec<_> = { std::env::vars_os() }
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, value)| name.starts_with(env::PREFIX) && !value.trim().is_empty())
        .collect();
    // A planned reserve is checked separately, so it must not contradict a setting here.
    let given = [
        ("PINPOOL_DEVICE", device.map(|device| device.to_string())),
        ("PINPOOL_RESERVE", reserve.map(|_| "0".to_owned())),
    ];
    let given: Vec<_> = given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    let is_kept = |pair: &&(String, String)| !given.iter().any(|(name, _)| *name == pair.0);
    let report = env::report_of(&set.iter().filter(is_kept).chain(&given).cloned().collect::<Vec<_>>());
    let warnings = report.warnings.iter().map(|warning| Finding::warning(CHECK, warning.clone()));
    let errors = report.errors.iter().map(|error| Finding::error(CHECK, error.to_string()));
    let mut findings: Vec<_> =
        warnings.chain(errors).map(|finding| finding.remedy("correct the variable or unset it")).collect();
    // Problems that these settings have on this machine.
    findings.extend([numa_node(&report.config), trace(&report.config), socket(&report.config)].into_iter().flatten());
    if findings.is_empty() {
        let mut set: Vec<_> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        set.sort();
        findings.push(Finding::ok(CHECK, if set.is_empty() { "all default".to_owned() } else { set.join(" ") }));
    }
    (report.config, findings)
}

fn numa_node(config: &Config) -> Option<Finding> {
    let (node, nodes) = (config.numa_node?, host::numa_nodes(Path::new("/")));
    let found = format!("PINPOOL_NUMA_NODE={node}: this machine has the nodes {nodes:?}");
    (!nodes.contains(&node)).then(|| Finding::warning(CHECK, found).remedy("set one of these, or auto"))
}

fn trace(config: &Config) -> Option<Finding> {
    let path = config.trace.as_deref()?;
    let found = missing_directory(path).map(|why| why + "; name another file").or_else(|| match check_path(path) {
        Err(Unrecorded::Failed(why)) => Some(format!("{} {why}", path.display())),
        _ => None,
    })?;
    let (found, remedy) = found.rsplit_once("; ")?;
    Some(Finding::error(CHECK, format!("PINPOOL_TRACE: {found}")).remedy(remedy))
}

fn socket(config: &Config) -> Option<Finding> {
    let Some(pinpool::StatsSocket::Path(path)) = &config.socket else { return None };
    let found = missing_directory(path)?;
    Some(Finding::warning(CHECK, format!("PINPOOL_SOCKET: {found}")).remedy("create it, or name another path"))
}

fn missing_directory(path: &Path) -> Option<String> {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty())?;
    (!directory.is_dir()).then(|| format!("the directory {} does not exist", directory.display()))
}
