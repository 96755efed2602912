//! Settings from the environment, read once, at the first `cuInit`.
//!
//! The documentation of the crate explains them. An invalid value or an unknown name with the prefix is reported on stderr and fails
//! `cuInit`.

use std::env;
use std::ffi::OsString;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use crate::adversarial::{self, Deviation};
use crate::call::Outcome;
use crate::code::Code;
use crate::{counts, faults};

const PREFIX: &str = "MOCK_DRIVER_";

/// The parsed settings; tests get the default.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    /// Delay of each copy.
    pub(crate) copy_delay: Duration,
    /// Whether counts are reported at the end of the process.
    report: bool,
    /// A call of this name ends the process.
    pub(crate) abort: Option<String>,
    /// A call of this name never returns.
    hang: Option<String>,
    /// Switches that are on, a bit each.
    pub(crate) deviations: u64,
    failures: Vec<Failure>,
}

static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();

/// Reads the environment once. Fails at each call if the environment cannot be parsed.
pub(crate) fn read() -> Outcome {
    let settings = SETTINGS.get_or_init(|| {
        let settings = parse(env::vars_os()).inspect_err(|why| eprintln!("mock driver: {why}"))?;
        for (name, nth, times, code) in &settings.failures {
            faults::fail(name, *nth, *times, *code);
        }
        // A call that hangs waits at a gate that nobody opens.
        settings.hang.iter().for_each(|name| faults::hold(name, true));
        if settings.report {
            counts::report_at_exit();
        }
        // If the environment sets no switch, the switches that a test has turned on stay on.
        if settings.deviations != 0 {
            adversarial::set(settings.deviations);
        }
        Ok(settings)
    });
    settings.as_ref().map(drop).map_err(|_| Code::INVALID_VALUE)
}

/// Returns the settings that were read, or the default before that.
pub(crate) fn get() -> &'static Settings {
    static DEFAULT: LazyLock<Settings> = LazyLock::new(Settings::default);
    SETTINGS.get().and_then(|settings| settings.as_ref().ok()).unwrap_or(&DEFAULT)
}

/// The name of a function, the number of the first call that fails, how many fail, and their code.
type Failure = (String, u64, u64, Code);

fn parse(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Settings, String> {
    let mut settings = Settings::default();
    for (name, value) in variables {
        let Some(name) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let text = value.to_string_lossy();
        let each = || text.split(',').map(str::trim).filter(|one| !one.is_empty());
        let mut set = || {
            match name {
                "COPY_DELAY" => settings.copy_delay = Duration::from_millis(text.parse().ok()?),
                "REPORT" if text == "stderr" => settings.report = true,
                "FAIL" => settings.failures = each().map(failure).collect::<Option<_>>()?,
                "ADVERSARIAL" => {
                    settings.deviations =
                        each().map(|one| Deviation::named(one).map(Deviation::bit)).sum::<Option<_>>()?
                }
                "ABORT" => settings.abort = Some(text.to_string()),
                "HANG" => settings.hang = Some(text.to_string()),
                _ => return None,
            }
            Some(())
        };
        set().ok_or_else(|| {
            format!("{PREFIX}{name}={text}: no such setting or value; see the documentation of the crate")
        })?;
    }
    Ok(settings)
}

/// Parses `NAME:N=CODE`, for one call, or `NAME:N+=CODE`, for that call and all later ones.
fn failure(text: &str) -> Option<Failure> {
    let (name, rest) = text.split_once(':')?;
    let (nth, code) = rest.split_once('=')?;
    let (number, times) = nth.strip_suffix('+').map_or((nth, 1), |number| (number, u64::MAX));
    let (nth, code) = (number.parse().ok().filter(|&nth| nth > 0)?, code.parse().ok().filter(|&code| code > 0)?);
    name.starts_with("cu").then(|| (name.to_owned(), nth, times, Code(code)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_or_value_is_refused_by_name() {
        for wrong in [
            ("MOCK_DRIVER_COPY_DELAY", "fast"),
            ("MOCK_DRIVER_REPORT", "1"),
            ("MOCK_DRIVER_COSTS", "measured"),
            ("MOCK_DRIVER_ADVERSARIAL", "kind"),
            ("MOCK_DRIVER_FAIL", "cuMemMap"),
            ("MOCK_DRIVER_FAIL", "cuMemMap:0=2"),
            ("MOCK_DRIVER_FAIL", "cuMemMap:1=0"),
            ("MOCK_DRIVER_FAIL", "cuMemMap:=2"),
            ("MOCK_DRIVER_FAIL", "cuMemMap:1"),
            ("MOCK_DRIVER_FAIL", "malloc:1=2"),
            ("MOCK_DRIVER_FAIL", "cuMemMap:3=2,nothing"),
        ] {
            let why = parse([(wrong.0.into(), wrong.1.into())]).unwrap_err();
            assert!(why.contains(&format!("{}={}", wrong.0, wrong.1)), "{why}");
        }
    }
}
