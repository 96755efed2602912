//! Settings of the environment, read once, at the first `cuInit`.
//!
//! Owns names and grammar; the crate's docs have the table of meanings. Tests use the control calls instead. A value or a
//! prefixed name that cannot be parsed is reported on stderr and fails `cuInit`: a bench over a double that ignored its
//! settings would print wrong results.

use std::env;
use std::ffi::OsString;
use std::sync::OnceLock;

use crate::call::Outcome;
use crate::code::Code;
use crate::cruel::{self, Cruelty};
use crate::faults::{self, ScriptedFailure};
use crate::{ledger, link};

const PREFIX: &str = "DRIVER_DOUBLE_";
const COPY_RATE: &str = "DRIVER_DOUBLE_COPY_RATE";
const COPY: &str = "DRIVER_DOUBLE_COPY";
const COSTS: &str = "DRIVER_DOUBLE_COSTS";
const REPORT: &str = "DRIVER_DOUBLE_REPORT";
const ACCESS: &str = "DRIVER_DOUBLE_ACCESS";
const FAIL: &str = "DRIVER_DOUBLE_FAIL";
const ABORT: &str = "DRIVER_DOUBLE_ABORT";
const HANG: &str = "DRIVER_DOUBLE_HANG";
const CRUEL: &str = "DRIVER_DOUBLE_CRUEL";
const DEVICES: &str = "DRIVER_DOUBLE_DEVICES";

const UNITS: [(&str, f64); 9] = [
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("B", 1.0),
    ("", 1.0),
];
/// Above this a copy of a granule takes less than the clock can measure.
const FASTEST: f64 = 1e15;

/// The parsed settings; tests get the default.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Bytes per second on each link; 0 is as fast as memory.
    pub(crate) copy_rate: u64,
    /// Copies take their time and move nothing.
    pub(crate) hollow: bool,
    /// Calls take as long as on a real device.
    pub(crate) measured_costs: bool,
    /// The end of the process reports counts.
    pub(crate) report: bool,
    /// Setting the access of several handles in one call costs as much as in one call for each.
    pub(crate) access_of_each: bool,
    /// A call of this name ends the process.
    pub(crate) abort: Option<&'static str>,
    /// A call of this name never returns.
    pub(crate) hang: Option<&'static str>,
    /// Switches that are on, a bit each.
    pub(crate) cruel: u64,
    /// The number of devices; 0 is one.
    pub(crate) devices: usize,
}

static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();

/// Reads the environment once; fails each time if it cannot be parsed.
pub(crate) fn read() -> Outcome {
    let settings = SETTINGS.get_or_init(|| {
        let (settings, failures) = parse(env::vars_os()).inspect_err(|why| eprintln!("driver double: {why}"))?;
        failures.iter().for_each(faults::script);
        if settings.copy_rate > 0 {
            link::set_rate(settings.copy_rate);
        }
        if settings.report {
            ledger::report_at_exit();
        }
        // A test may have turned others on before.
        if settings.cruel != 0 {
            cruel::set(settings.cruel);
        }
        Ok(settings)
    });
    settings.as_ref().map(drop).map_err(|_| Code::INVALID_VALUE)
}

/// The settings that were read; the default before that.
pub(crate) fn get() -> Settings {
    SETTINGS.get().and_then(|settings| settings.as_ref().ok()).copied().unwrap_or_default()
}

/// Ends the process or never returns, if the environment asks that of this call.
pub(crate) fn end_process_in(call: &str) {
    let Settings { abort, hang, .. } = get();
    if abort == Some(call) {
        std::process::abort();
    }
    while hang == Some(call) {
        std::thread::park();
    }
}

/// The reason why a test cannot run in this environment, if there is one.
pub(crate) fn why_no_test() -> Option<String> {
    match parse(env::vars_os()) {
        Ok((settings, _)) => settings.hollow.then(|| format!("{COPY}=hollow: no data arrives that a test could check")),
        Err(why) => Some(why),
    }
}

fn parse(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<(Settings, Vec<ScriptedFailure>), String> {
    let (mut settings, mut failures) = (Settings::default(), Vec::new());
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let text = value.to_string_lossy();
        match (name, text.as_ref()) {
            (COPY_RATE, text) => {
                settings.copy_rate = rate(text).ok_or_else(|| {
                    format!("{name}={text}: not a rate in bytes a second, such as 4e9, 4GB or 512MiB")
                })?;
            }
            (COPY, "real") => settings.hollow = false,
            (COPY, "hollow") => settings.hollow = true,
            (COPY, text) => return Err(format!("{name}={text}: neither real nor hollow")),
            (COSTS, "none") => settings.measured_costs = false,
            (COSTS, "measured") => settings.measured_costs = true,
            (COSTS, text) => return Err(format!("{name}={text}: neither none nor measured")),
            (REPORT, "none") => settings.report = false,
            (REPORT, "stderr") => settings.report = true,
            (REPORT, text) => return Err(format!("{name}={text}: neither none nor stderr")),
            (ACCESS, "call") => settings.access_of_each = false,
            (ACCESS, "handle") => settings.access_of_each = true,
            (ACCESS, text) => return Err(format!("{name}={text}: neither call nor handle")),
            (FAIL, text) => {
                let each = text.split(',').filter(|one| !one.is_empty()).map(|one| {
                    failure(one.trim()).ok_or_else(|| {
                        format!("{name}={text}: {one} is no failure such as cuMemMap:3=2 or cuMemCreate:1+=801")
                    })
                });
                failures = each.collect::<Result<_, _>>()?;
            }
            (CRUEL, "all") => settings.cruel = Cruelty::ALL.iter().fold(0, |bits, each| bits | each.bit()),
            (CRUEL, text) => {
                let known = || Cruelty::ALL.iter().map(|each| each.name()).collect::<Vec<_>>().join(", ");
                for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
                    let switch = Cruelty::named(one);
                    let switch = switch.ok_or_else(|| format!("{name}={text}: {one} is none of {}, all", known()))?;
                    settings.cruel |= switch.bit();
                }
            }
            (DEVICES, text) => {
                let count = text.parse().ok().filter(|count| (1..=64).contains(count));
                settings.devices = count.ok_or_else(|| format!("{name}={text}: not a number of devices, 1 to 64"))?;
            }
            // Read once for a process.
            (ABORT, text) => settings.abort = Some(text.to_owned().leak()),
            (HANG, text) => settings.hang = Some(text.to_owned().leak()),
            (name, text) => {
                return Err(format!(
                    "{name}={text}: no such setting; there are {COPY_RATE}, {COPY}, {COSTS}, {REPORT}, {ACCESS}, {FAIL}, {ABORT}, {HANG}, {CRUEL}, {DEVICES}"
                ));
            }
        }
    }
    if settings.hollow && settings.copy_rate == 0 {
        return Err(format!("{COPY}=hollow without {COPY_RATE}: such copies would take no time at all"));
    }
    Ok((settings, failures))
}

/// `NAME:N=CODE` for one call, `NAME:N+=CODE` for it and all later ones.
fn failure(text: &str) -> Option<ScriptedFailure> {
    let (name, rest) = text.split_once(':')?;
    let (nth, code) = rest.split_once('=')?;
    let (number, later) = nth.strip_suffix('+').map_or((nth, false), |number| (number, true));
    let (nth, code) = (number.parse().ok().filter(|&nth| nth > 0)?, code.parse().ok().filter(|&code| code > 0)?);
    name.starts_with("cu").then(|| ScriptedFailure { name: name.to_owned(), nth, later, code: Code(code) })
}

fn rate(text: &str) -> Option<u64> {
    let (number, unit) =
        UNITS.iter().find_map(|(unit, factor)| text.strip_suffix(unit).map(|number| (number.trim_end(), factor)))?;
    let bytes = number.parse::<f64>().ok()? * unit;
    (1.0..=FASTEST).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(variables: &[(&str, &str)]) -> Result<Settings, String> {
        parse(variables.iter().map(|(name, value)| (name.into(), value.into()))).map(|(settings, _)| settings)
    }

    #[test]
    fn a_failure_names_its_call_its_number_and_its_code() {
        let scripted =
            |nth, later, code| Some(ScriptedFailure { name: "cuMemMap".to_owned(), nth, later, code: Code(code) });
        assert_eq!(failure("cuMemMap:3=2"), scripted(3, false, 2));
        assert_eq!(failure("cuMemMap:1+=801"), scripted(1, true, 801));
        for wrong in ["cuMemMap", "cuMemMap:0=2", "cuMemMap:1=0", "cuMemMap:=2", "cuMemMap:1", "malloc:1=2", ":1=2"] {
            assert_eq!(failure(wrong), None, "{wrong}");
        }
        let both = parse([(FAIL.into(), "cuMemMap:3=2,cuMemMap:1+=801".into())]).unwrap().1;
        assert_eq!(both, [scripted(3, false, 2), scripted(1, true, 801)].map(Option::unwrap));
        assert!(parse([(FAIL.into(), "cuMemMap:3=2,nothing".into())]).unwrap_err().contains("nothing"));
    }

    #[test]
    fn a_rate_is_a_number_with_or_without_a_unit() {
        for (text, bytes) in [("4e9", 4_000_000_000), ("3.5 GB", 3_500_000_000), ("1GiB", 1 << 30), ("7B", 7), ("1", 1)]
        {
            assert_eq!(rate(text), Some(bytes), "{text}");
        }
        for text in ["", "GB", "0", "-1", "fast", "inf", "nan", "4 gigs", "1e16"] {
            assert_eq!(rate(text), None, "{text}");
        }
    }

    #[test]
    fn each_variable_sets_its_field() {
        let hollow =
            parsed(&[("HOME", "/"), (COPY_RATE, "4GB"), (COPY, "hollow"), (COSTS, "measured"), (REPORT, "stderr")]);
        let expected = Settings {
            copy_rate: 4_000_000_000,
            hollow: true,
            measured_costs: true,
            report: true,
            ..Settings::default()
        };
        assert_eq!(hollow, Ok(expected));
        let deadly = parsed(&[(ABORT, "cuMemCreate"), (HANG, "cuMemMap")]);
        let (abort, hang) = (Some("cuMemCreate"), Some("cuMemMap"));
        assert_eq!(deadly, Ok(Settings { abort, hang, ..Settings::default() }));
        let cruel = parsed(&[(CRUEL, "one-mapping, single-unmap"), (DEVICES, "2")]).unwrap();
        assert_eq!((cruel.cruel, cruel.devices), (Cruelty::OneMapping.bit() | Cruelty::SingleUnmap.bit(), 2));
        assert_eq!(parsed(&[(CRUEL, "all")]).unwrap().cruel.count_ones() as usize, Cruelty::ALL.len());
        assert!(parsed(&[(ACCESS, "handle")]).unwrap().access_of_each);
        assert_eq!(parsed(&[("HOME", "/")]), Ok(Settings::default()));
        assert_eq!(parsed(&[(COPY, "real"), (COSTS, "none"), (REPORT, "none")]), Ok(Settings::default()));
    }

    #[test]
    fn an_unknown_name_or_value_is_refused_by_name() {
        for wrong in [
            (COPY_RATE, "4 gigs"),
            (COPY, "Hollow"),
            (COSTS, ""),
            (REPORT, "1"),
            (ACCESS, "all"),
            ("DRIVER_DOUBLE_COST", "measured"),
            (CRUEL, "kind"),
            (DEVICES, "0"),
        ] {
            let why = parsed(&[wrong]).unwrap_err();
            assert!(why.contains(&format!("{}={}", wrong.0, wrong.1)), "{why}");
        }
        assert!(parsed(&[(COPY, "hollow")]).unwrap_err().contains(COPY_RATE));
    }
}
