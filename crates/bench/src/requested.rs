//! Checks of the arguments: values, available backends, and memory up to the default limit of a pool on this machine.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use pinpool::Limit;
use pinpool::unstable::config::text::{ParseError, format_bytes, parse_bytes};
use pinpool::{Backend, Error, Pool, PoolBuilder, Preset};

use super::{BenchError, Measured};

/// Default backends, the preferred ones first.
const BACKENDS: [&str; 5] = ["vmm", "register", "cuda", "mlock", "heap"];
/// Limits for the time of a measurement; values outside are typing errors.
const SECONDS: RangeInclusive<f64> = 0.001..=3600.0;

/// Parses the time of a measurement.
pub(super) fn seconds(text: &str) -> Result<Duration, ParseError> {
    let number = text.trim().parse().ok().filter(|number| SECONDS.contains(number));
    let time = number.and_then(|number| Duration::try_from_secs_f64(number).ok());
    time.ok_or_else(|| {
        ParseError::new(text, format!("not a number of seconds from {} to {}", SECONDS.start(), SECONDS.end()))
    })
}

/// Parses sizes of `least` bytes or more.
pub(super) fn at_least(least: u64) -> impl Fn(&str) -> Result<u64, ParseError> + Clone + Send + Sync + 'static {
    move |text| match parse_bytes(text)? {
        bytes if bytes < least => Err(ParseError::new(text, format!("less than {}", format_bytes(least)))),
        bytes => Ok(bytes),
    }
}

/// Returns the builder of a pool on this backend, independent of the environment.
pub(super) fn pool_builder(backend: Backend) -> PoolBuilder {
    // Without a limit only the backend can refuse a request, so waiting does not help.
    Pool::builder().without_env().backend(backend).max_bytes(Limit::Unlimited).wait(Duration::ZERO)
}

/// Returns the default limit of a pool on this machine.
pub(super) fn default_limit_bytes() -> Result<u64, Error> {
    // Under this preset, a pool reserves no virtual address range.
    let pool = pool_builder(Backend::Heap).preset(Preset::TensorFlow).max_bytes(Limit::Auto).build()?;
    Ok(pool.stats().limits.max_bytes.unwrap_or(u64::MAX))
}

/// Returns an error if `bytes` exceed the default limit: the kernel would kill the process without a message.
pub(super) fn fits(argument: impl Display, what: impl Display, bytes: u64, remedy: &str) -> Measured<()> {
    let most_bytes = default_limit_bytes()?;
    if bytes <= most_bytes {
        return Ok(());
    }
    let why =
        format!("{what} takes {bytes} bytes, more than the {most_bytes} that a pool may use on this machine; {remedy}");
    Err(BenchError::Setting(format!("{argument}: {why}")))
}

/// Returns the requested backends (by default all) that can pin `bytes`, and the reasons that others cannot. Fails if none can.
pub(super) fn backends(requested: &[Backend], bytes: u64) -> Measured<(Vec<Backend>, Vec<String>)> {
    let (mut available, mut missing) = (Vec::new(), Vec::new());
    let all = || BACKENDS.iter().filter_map(|name| name.parse().ok()).collect();
    for backend in if requested.is_empty() { all() } else { requested.to_vec() } {
        match hold(&backend, bytes) {
            Ok(()) => available.push(backend),
            Err(error) => missing.push(format!("{}: {error}", backend.name())),
        }
    }
    if available.is_empty() { Err(BenchError::Failure(missing.join("; "))) } else { Ok((available, missing)) }
}

/// Pins `bytes` once. Afterwards, the memory is warm and the device has its context.
fn hold(backend: &Backend, bytes: u64) -> Result<(), Error> {
    let pool = pool_builder(backend.clone()).build()?;
    // A request may use other driver calls than a reserve.
    let _buf = pool.get(4096)?;
    pool.reserve(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_sizes_outside_the_limits_are_refused() {
        for text in ["nan", "inf", "-inf", "1e300", "0", "-1", "0.0005", "3601", "", "4s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!(["0.25", " 3600 "].map(seconds), [Ok(Duration::from_millis(250)), Ok(Duration::from_secs(3600))]);
        assert_eq!(["4095", "4KiB", "x"].map(|text| at_least(4096)(text).ok()), [None, Some(4096), None]);
    }
}
