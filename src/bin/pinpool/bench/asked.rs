//! What may be asked of a bench: values that mean something, each once, and no more memory than there is.

use std::fmt::Display;
use std::time::Duration;

use pinpool::Backend;
use pinpool::config::quantity::{format_bytes, parse_bytes};

use super::figure::{Measured, NotMeasured};
use super::sources;

/// Shorter measurements are of nothing, longer ones a slip of the hand.
const SECONDS: std::ops::RangeInclusive<f64> = 0.001..=3600.0;

/// Reads a time to measure for.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let number = text.trim().parse().ok().filter(|number| SECONDS.contains(number));
    let time = number.and_then(|number| Duration::try_from_secs_f64(number).ok());
    time.ok_or_else(|| format!("not a number of seconds from {} to {}", SECONDS.start(), SECONDS.end()))
}

/// Reads sizes from `least` up.
pub(super) fn at_least(least: u64) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| match parse_bytes(text)? {
        bytes if bytes < least => Err(format!("less than {}", format_bytes(least))),
        bytes => Ok(bytes),
    }
}

/// Each one at its first place.
pub(super) fn once<T: Copy + PartialEq>(all: &[T]) -> Vec<T> {
    once_by(all, |&one| one)
}

/// Back-ends are told apart by what they show of themselves.
fn once_each(all: &[Backend]) -> Vec<Backend> {
    once_by(all, |backend| format!("{backend:?}"))
}

fn once_by<T: Clone, K: PartialEq>(all: &[T], key: impl Fn(&T) -> K) -> Vec<T> {
    let is_first = |&(at, one): &(usize, &T)| !all[..at].iter().any(|earlier| key(earlier) == key(one));
    all.iter().enumerate().filter(is_first).map(|(_, one)| one.clone()).collect()
}

/// The back-ends asked for that each held `bytes`, with those that are missing and why; to find none is an error.
pub(super) fn backends(asked: &[Backend], bytes: u64) -> Measured<(Vec<Backend>, Vec<String>)> {
    let (here, missing) = sources::available(&once_each(asked), bytes);
    if here.is_empty() { Err(NotMeasured::Missing(missing.join("; "))) } else { Ok((here, missing)) }
}

/// Refuses what would take more than a pool gets here: the kernel kills for that, and says nothing.
pub(super) fn fits(argument: impl Display, what: impl Display, bytes: u64, remedy: &str) -> Measured<()> {
    let most_bytes = sources::most_bytes()?;
    if bytes <= most_bytes {
        return Ok(());
    }
    let why = format!("{what} takes {bytes} B, over the {most_bytes} B that a pool gets on this machine; {remedy}");
    Err(NotMeasured::Setting(format!("{argument}: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_finite_and_neither_nothing_nor_for_ever() {
        for text in ["nan", "inf", "-inf", "1e300", "0", "-1", "0.0005", "3601", "", "4s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!(["0.25", " 3600 "].map(seconds), [Ok(Duration::from_millis(250)), Ok(Duration::from_secs(3600))]);
    }

    #[test]
    fn sizes_begin_at_the_least() {
        assert_eq!(["4095", "4KiB", "x"].map(|text| at_least(4096)(text).ok()), [None, Some(4096), None]);
    }

    #[test]
    fn what_is_asked_again_stays_where_it_was_first() {
        assert_eq!(once(&[8, 1, 8, 2, 1]), [8, 1, 2]);
        let [small, large] = [1, 2].map(|total_bytes| Backend::Sim { total_bytes });
        let all = once_each(&[Backend::Heap, small, Backend::Heap, large]);
        assert_eq!(all.iter().map(Backend::name).collect::<Vec<_>>(), ["heap", "sim", "sim"]);
    }
}
