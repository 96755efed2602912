//! The table of `PINPOOL_*` variables: one row each, one reader.
//!
//! A bad or unknown variable is a [`Warning`], never a panic and never silent; the default holds instead. This is the
//! only reader of the process environment, and it prints nothing.

use std::fmt;

use super::quantity::{format_bytes, parse_bytes, parse_duration};
use super::{Config, Settings, words};
use crate::error::Result;

/// What every variable begins with.
pub const PREFIX: &str = "PINPOOL_";

/// One row of the table.
#[derive(Debug)]
pub struct Variable {
    /// Full name.
    pub name: &'static str,
    /// What holds if it is not set.
    pub default: &'static str,
    /// What it does, and when to change it.
    pub meaning: &'static str,
    read: fn(&mut Settings, &str) -> Result<(), String>,
    show: fn(&Config) -> String,
}

/// A variable that could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    variable: String,
    value: String,
    why: String,
    instead: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}; {}", self.variable, self.value, self.why, self.instead)
    }
}

/// Every variable there is.
pub static VARIABLES: [Variable; 23] = [
    Variable {
        name: "PINPOOL_BACKEND",
        default: "auto",
        meaning: "where memory comes from: auto, vmm, register, cuda, mlock, heap, sim or sim:SIZE",
        read: |settings, text| set(&mut settings.backend, text.parse()),
        show: |config| config.backend.name().to_owned(),
    },
    Variable {
        name: "PINPOOL_DEVICE",
        default: "0",
        meaning: "ordinal of the GPU that the copies are for",
        read: |settings, text| set(&mut settings.device, ordinal(text)),
        show: |config| config.device.to_string(),
    },
    Variable {
        name: "PINPOOL_NUMA_NODE",
        default: "auto",
        meaning: "memory node to pin on, where the machine has several: a number, or auto, that of the GPU",
        read: |settings, text| set(&mut settings.numa_node, node(text)),
        show: |config| config.numa_node.map_or_else(|| "auto".to_owned(), |node| node.to_string()),
    },
    Variable {
        name: "PINPOOL_PRESET",
        default: "adaptive",
        meaning: "rules that the pool follows: adaptive, or tensorflow (exact to its PoolAllocator)",
        read: |settings, text| set(&mut settings.preset, text.parse()),
        show: |config| config.preset.name().to_owned(),
    },
    Variable {
        name: "PINPOOL_POOL_SIZE_LIMIT",
        default: "100",
        meaning: "most idle buffers kept at the start; 0 keeps none and implies no auto-resize",
        read: |settings, text| set(&mut settings.pool_size_limit, count(text)),
        show: |config| config.pool_size_limit.to_string(),
    },
    Variable {
        name: "PINPOOL_AUTO_RESIZE",
        default: "1",
        meaning: "may the limit rise by a tenth while evictions and misses stay frequent: 0 or 1",
        read: |settings, text| set(&mut settings.auto_resize, words::switch(text)),
        show: |config| u8::from(config.auto_resize).to_string(),
    },
    Variable {
        name: "PINPOOL_ROUNDING",
        default: "eighths",
        meaning: "how sizes become classes: eighths under adaptive; pow2 (the default there) or exact under tensorflow, which they imply",
        read: |settings, text| set(&mut settings.rounding, text.parse()),
        show: |config| config.rounding.name().to_owned(),
    },
    Variable {
        name: "PINPOOL_MAX_BYTES",
        default: "auto",
        meaning: "ceiling on all bytes held, in use and idle: a size like 2GiB, none (the default under tensorflow), or auto: a \
                  quarter of the memory that the control group, else the machine, has",
        read: |settings, text| set(&mut settings.max_bytes, text.parse()),
        show: |config| config.max_bytes.to_string(),
    },
    Variable {
        name: "PINPOOL_POOLS_PER_HOST",
        default: "1",
        meaning: "pools (loader processes) on this host that share what auto allows",
        read: |settings, text| set(&mut settings.pools_per_host, at_least_one(text)),
        show: |config| config.pools_per_host.to_string(),
    },
    Variable {
        name: "PINPOOL_WAIT",
        default: "100ms",
        meaning: "longest wait of a get for room under the ceiling; 0 is the default under tensorflow",
        read: |settings, text| set(&mut settings.wait, parse_duration(text)),
        show: |config| format!("{:?}", config.wait),
    },
    Variable {
        name: "PINPOOL_ON_FULL",
        default: "auto",
        meaning: "what a get does after that wait: error, pageable (memory that is not pinned), or auto: pageable where \
                  PINPOOL_BACKEND=auto finds no GPU, else error",
        read: |settings, text| set(&mut settings.on_full, text.parse()),
        show: |config| config.on_full.to_string(),
    },
    Variable {
        name: "PINPOOL_IDLE_TIMEOUT",
        default: "45s",
        meaning: "how long memory stays idle before it goes back to the system; raise it for bursts far apart; none keeps all",
        read: |settings, text| set(&mut settings.idle_timeout, words::retain(text)),
        show: |config| config.idle_timeout.map_or_else(|| "none".to_owned(), |time| format!("{time:?}")),
    },
    Variable {
        name: "PINPOOL_RELEASE_POLICY",
        default: "idle",
        meaning: "when register and cuda give memory back, which waits for the device: idle, only while no copy of the pool is in \
                  flight; force, at the ceiling a get waits for those copies first (a buffer that was copied and is still held counts \
                  until it is put back or written to)",
        read: |settings, text| set(&mut settings.release_policy, text.parse()),
        show: |config| config.release_policy.to_string(),
    },
    Variable {
        name: "PINPOOL_PRESSURE",
        default: "on",
        meaning: "give idle memory back when the kernel says that memory is short: on, off, or a file in the format of \
                  /proc/pressure/memory",
        read: |settings, text| set(&mut settings.pressure, text.parse()),
        show: |config| config.pressure.to_string(),
    },
    Variable {
        name: "PINPOOL_RESERVE",
        default: "0",
        meaning: "bytes pinned at the start, the fastest way there is, and kept: a size like 2GiB",
        read: |settings, text| set(&mut settings.reserve_bytes, parse_bytes(text)),
        show: |config| if config.reserve_bytes == 0 { "0".to_owned() } else { format_bytes(config.reserve_bytes) },
    },
    Variable {
        name: "PINPOOL_PIN_THREADS",
        default: "auto",
        meaning: "threads that touch new memory at once, in a reserve and under register: a number, or auto, one for each core \
                  that the process may use; lower it where others need the cores",
        read: |settings, text| set(&mut settings.pin_threads, threads(text)),
        show: |config| config.pin_threads.map_or_else(|| "auto".to_owned(), |threads| threads.to_string()),
    },
    Variable {
        name: "PINPOOL_GROWTH",
        default: "1",
        meaning: "may the pool pin more than its reserve: 0 or 1 (TensorFlow's allow_growth)",
        read: |settings, text| set(&mut settings.growth, words::switch(text)),
        show: |config| u8::from(config.growth).to_string(),
    },
    Variable {
        name: "PINPOOL_POLL",
        default: "0",
        meaning: "a thread that gives idle memory back while the program is silent, twice a second: 0 or 1",
        read: |settings, text| set(&mut settings.background_poll, words::switch(text)),
        show: |config| u8::from(config.background_poll).to_string(),
    },
    Variable {
        name: "PINPOOL_LOG_EVERY",
        default: "10",
        meaning: "one check of the rates in this many is printed; 1 prints each",
        read: |settings, text| set(&mut settings.log_every, at_least_one(text)),
        show: |config| config.log_every.to_string(),
    },
    Variable {
        name: "PINPOOL_CLOSE_WAIT",
        default: "30s",
        meaning: "longest wait for copies in flight when the pool ends; their memory is left alone after it",
        read: |settings, text| set(&mut settings.close_wait, parse_duration(text)),
        show: |config| format!("{:?}", config.close_wait),
    },
    Variable {
        name: "PINPOOL_FENCE",
        default: "auto",
        meaning: "how the end of a copy is learnt: event (cheap to set, asked of the driver), timeline (dearer to set, asked \
                  by a load), or auto: event until threads crowd at the question",
        read: |settings, text| set(&mut settings.fence, text.parse()),
        show: |config| config.fence.to_string(),
    },
    Variable {
        name: "PINPOOL_STUCK_AFTER",
        default: "30s",
        meaning: "a buffer longer in flight than this is warned of, once",
        read: |settings, text| set(&mut settings.stuck_after, parse_duration(text)),
        show: |config| format!("{:?}", config.stuck_after),
    },
    Variable {
        name: "PINPOOL_REQUIRE_GPU",
        default: "0",
        meaning: "tests only: a GPU test without a GPU fails instead of being skipped: 0 or 1",
        read: |_, text| words::switch(text).map(drop),
        show: |_| std::env::var("PINPOOL_REQUIRE_GPU").unwrap_or_else(|_| "0".to_owned()),
    },
];

/// Reads `pairs` (names with the prefix among any others) into settings, and says what could not be used.
pub(crate) fn read(pairs: impl IntoIterator<Item = (String, String)>) -> (Settings, Vec<Warning>) {
    let mut settings = Settings::default();
    let mut warnings = Vec::new();
    let mut pairs: Vec<_> = pairs.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    // The environment has no order worth keeping; warnings should come out the same each time.
    pairs.sort();
    for (name, value) in pairs {
        let (why, instead) = match VARIABLES.iter().find(|variable| variable.name == name) {
            None => ("there is no such variable".to_owned(), "ignored, `pinpool env` lists those there are".to_owned()),
            Some(variable) => match (variable.read)(&mut settings, value.trim()) {
                Ok(()) => continue,
                Err(why) => (why, format!("using the default {} instead", variable.default)),
            },
        };
        warnings.push(Warning { variable: name, value, why, instead });
    }
    (settings, warnings)
}

/// The same from the environment of the process.
pub(crate) fn read_process() -> (Settings, Vec<Warning>) {
    read(process_pairs())
}

/// What is no Unicode is shown with replacement characters, so that it can be named in a warning.
fn process_pairs() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// One line of `pinpool env`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Full name of the variable.
    pub name: &'static str,
    /// What holds.
    pub value: String,
    /// Where that comes from: `environment`, `default` or `implied`.
    pub origin: &'static str,
    /// What holds if the variable is not set.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

/// Every variable with the value that holds in this process, and warnings about those that could not be used.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting) if two variables contradict each other.
pub fn report() -> Result<(Vec<Entry>, Vec<Warning>)> {
    report_of(process_pairs())
}

fn report_of(pairs: impl IntoIterator<Item = (String, String)>) -> Result<(Vec<Entry>, Vec<Warning>)> {
    let pairs: Vec<_> = pairs.into_iter().collect();
    let (settings, warnings) = read(pairs.iter().cloned());
    let config = settings.resolve()?;
    let usable = |name: &str| pairs.iter().any(|(set, _)| set == name) && !warnings.iter().any(|w| w.variable == name);
    let entries = VARIABLES
        .iter()
        .map(|&Variable { name, default, meaning, show, .. }| {
            let value = show(&config);
            let origin = match () {
                () if usable(name) => "environment",
                () if value == default => "default",
                () => "implied",
            };
            Entry { name, value, origin, default, meaning }
        })
        .collect();
    Ok((entries, warnings))
}

fn set<T>(slot: &mut Option<T>, value: Result<T, String>) -> Result<(), String> {
    *slot = Some(value?);
    Ok(())
}

fn ordinal(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "not a device number (0, 1, ...)".to_owned())
}

fn node(text: &str) -> Result<Option<u32>, String> {
    if text.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| "neither auto nor the number of a memory node (0, 1, ...)".to_owned())
}

fn threads(text: &str) -> Result<Option<u64>, String> {
    if text.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    at_least_one(text).map(Some).map_err(|why| format!("neither auto nor a number of threads: {why}"))
}

fn count(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "not a whole number".to_owned())
}

fn at_least_one(text: &str) -> Result<u64, String> {
    count(text).ok().filter(|&n| n > 0).ok_or_else(|| "not a whole number of at least 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::config::{Ceiling, FenceKind, OnFull, PressureSource};
    use crate::size_class::Rounding;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn every_default_in_the_table_is_the_default_that_holds() {
        let (entries, warnings) = report_of(pairs(&[])).unwrap();
        assert!(warnings.is_empty());
        for entry in entries {
            assert_eq!((entry.value.as_str(), entry.origin), (entry.default, "default"), "{}", entry.name);
        }
    }

    #[test]
    fn every_default_can_be_set_explicitly() {
        for variable in &VARIABLES {
            let (_, warnings) = read(pairs(&[(variable.name, variable.default)]));
            assert_eq!(warnings, [], "{}", variable.name);
        }
    }

    #[test]
    fn nonsense_in_any_variable_is_named_with_its_value_and_what_holds_instead() {
        for variable in &VARIABLES {
            let (_, warnings) = read(pairs(&[(variable.name, "purple")]));
            let text = warnings.first().map(ToString::to_string).unwrap_or_default();
            for part in [variable.name, "purple", variable.default] {
                assert!(text.contains(part), "{}: {text}", variable.name);
            }
        }
    }

    #[test]
    fn unknown_variables_of_ours_are_named_and_others_left_alone() {
        let (_, warnings) = read(pairs(&[("PINPOOL_MAXBYTES", "1"), ("PATH", "/bin"), ("PINPOOLX", "1")]));
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].to_string().contains("PINPOOL_MAXBYTES=1"), "{}", warnings[0]);
    }

    #[test]
    fn values_are_read() {
        let (settings, warnings) = read(pairs(&[
            ("PINPOOL_BACKEND", "sim:3GiB"),
            ("PINPOOL_DEVICE", "2"),
            ("PINPOOL_POOL_SIZE_LIMIT", "7"),
            ("PINPOOL_AUTO_RESIZE", "off"),
            ("PINPOOL_ROUNDING", "EXACT"),
            ("PINPOOL_MAX_BYTES", "64MiB"),
            ("PINPOOL_IDLE_TIMEOUT", "none"),
            ("PINPOOL_ON_FULL", "pageable"),
            ("PINPOOL_PRESSURE", "/tmp/psi"),
            ("PINPOOL_LOG_EVERY", "1"),
            ("PINPOOL_CLOSE_WAIT", "250ms"),
            ("PINPOOL_FENCE", "timeline"),
            ("PINPOOL_STUCK_AFTER", "2s"),
            ("PINPOOL_PIN_THREADS", "8"),
        ]));
        assert_eq!(warnings, []);
        let config = settings.resolve().unwrap();
        assert!(matches!(config.backend, Backend::Sim { total_bytes } if total_bytes == 3 << 30));
        assert_eq!((config.device, config.pool_size_limit, config.auto_resize), (2, 7, false));
        assert_eq!(
            (config.rounding, config.max_bytes, config.log_every),
            (Rounding::Exact, Ceiling::Bytes(64 << 20), 1)
        );
        assert_eq!((config.close_wait.as_millis(), config.idle_timeout, config.on_full), (250, None, OnFull::Pageable));
        assert_eq!((config.fence, config.stuck_after.as_secs()), (FenceKind::Timeline, 2));
        assert_eq!(config.pin_threads, Some(8));
        assert_eq!(config.pressure, PressureSource::File("/tmp/psi".into()));
    }

    #[test]
    fn a_ceiling_of_nothing_is_refused_and_none_is_no_ceiling() {
        let (settings, warnings) = read(pairs(&[("PINPOOL_MAX_BYTES", "0")]));
        assert_eq!((settings.max_bytes, warnings.len()), (None, 1));
        let (settings, warnings) = read(pairs(&[("PINPOOL_MAX_BYTES", "none")]));
        assert_eq!((settings.max_bytes, warnings.len()), (Some(Ceiling::None), 0));
    }

    #[test]
    fn the_report_says_where_a_value_comes_from() {
        let set = pairs(&[("PINPOOL_POOL_SIZE_LIMIT", "0"), ("PINPOOL_LOG_EVERY", "x")]);
        let (entries, warnings) = report_of(set).unwrap();
        let origin = |name| entries.iter().find(|entry| entry.name == name).map(|entry| entry.origin);
        assert_eq!(origin("PINPOOL_POOL_SIZE_LIMIT"), Some("environment"));
        assert_eq!(origin("PINPOOL_AUTO_RESIZE"), Some("implied"));
        assert_eq!(origin("PINPOOL_LOG_EVERY"), Some("default"));
        assert_eq!(warnings.len(), 1);
    }
}
