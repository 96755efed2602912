//! The snapshot as a table for people.

use std::fmt;
use std::time::Duration;

use super::{ClassStats, Stats};

const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

/// A number of bytes in the largest unit that it has one of.
struct Bytes(u64);

impl fmt::Display for Bytes {
    #[allow(clippy::cast_precision_loss)] // One digit behind the point.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match UNITS.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => format!("{:.1} {name}", self.0 as f64 / unit as f64),
            None => format!("{} B", self.0),
        };
        f.pad(&text)
    }
}

/// A duration with three digits.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.2?}", self.0))
    }
}

/// A dozen lines: what was asked for, what there is now and was at most, why gets missed and buffers left, and how long the
/// slow calls took. Rows without anything to show are left out.
impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, preset, backend, gets, hits, misses, failed_gets, fallbacks, puts, .. } = self;
        let name = name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        let pinned = if self.is_pinned { "pinned" } else { "not pinned" };
        let ceiling =
            self.max_bytes.map_or_else(|| "no ceiling".to_owned(), |bytes| format!("ceiling {}", Bytes(bytes)));
        let limit = self.pool_size_limit;
        writeln!(f, "pool{name}: {preset} on {backend}, {pinned}; {ceiling}; at most {limit} idle buffers")?;
        let percent = 100.0 * self.hit_rate();
        writeln!(f, "gets {gets}: {hits} hits ({percent:.2} %), {misses} misses, {failed_gets} failed; {puts} puts")?;
        reasons(f, "misses", &self.miss_reasons.by_name())?;
        reasons(f, "left", &self.eviction_reasons.by_name())?;
        if self.waits > 0 || *fallbacks > 0 {
            let Self { waits, waiting, timeouts, .. } = self;
            writeln!(f, "waits {waits}: {waiting} now, {timeouts} ran out; {fallbacks} fallbacks")?;
        }
        if self.requested.gets > 0 {
            let (gets, waste) = (self.requested.gets, 100.0 * self.requested.waste());
            writeln!(f, "rounding adds {waste:.1} % (over {gets} gets)")?;
        }
        if let Some(ledger) = &self.ledger {
            let ceiling = ledger.max_bytes.map_or_else(|| "none".to_owned(), |bytes| Bytes(bytes).to_string());
            let (held, others) = (Bytes(ledger.held_bytes), Bytes(ledger.others_bytes));
            let (name, owners, idle) = (&ledger.name, ledger.owners, Bytes(ledger.others_idle_bytes));
            writeln!(
                f,
                "ledger {name}: ceiling {ceiling}, {owners} owners hold {held}, others {others} ({idle} idle)"
            )?;
        }
        self.levels(f)?;
        self.times(f)?;
        write!(f, "limit checked {} times, raised {}, lowered {}", self.checks, self.raises, self.lowers)
    }
}

impl Stats {
    fn levels(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peaks = &self.peaks;
        writeln!(f, "{:<16} {:>8} {:>11} {:>8} {:>11}", "", "now", "bytes", "peak", "bytes")?;
        let own = (self.buffers, self.buffers_in_pool, self.in_flight);
        for (state, count, bytes, peak, peak_bytes) in [
            ("held", Some(own.0), self.pinned_bytes, Some(peaks.buffers), Some(self.peak_pinned_bytes)),
            ("in use", Some(self.in_use), self.in_use_bytes, Some(peaks.in_use), Some(peaks.in_use_bytes)),
            ("in flight", Some(own.2), self.in_flight_bytes, Some(peaks.in_flight), Some(peaks.in_flight_bytes)),
            ("idle", Some(own.1), self.idle_bytes, Some(peaks.idle), Some(peaks.idle_bytes)),
            ("free", None, self.arena_free_bytes, None, None),
            ("to be released", None, self.awaiting_release_bytes, None, Some(peaks.awaiting_release_bytes)),
            (
                "not pinned",
                Some(self.fallback_buffers),
                self.fallback_bytes,
                Some(peaks.fallback_buffers),
                Some(self.peak_fallback_bytes),
            ),
            ("lost", Some(self.lost), self.lost_bytes, None, None),
        ] {
            let is_always_shown = matches!(state, "held" | "in use" | "in flight" | "idle");
            if !is_always_shown && bytes == 0 && peak_bytes.unwrap_or(0) == 0 {
                continue;
            }
            let number = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
            let peak_bytes = peak_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
            let (count, peak) = (number(count), number(peak));
            writeln!(
                f,
                "{}",
                format!("{state:<16} {count:>8} {:>11} {peak:>8} {peak_bytes:>11}", Bytes(bytes)).trim_end()
            )?;
        }
        if self.reserve_asked_bytes > 0 {
            let (pinned, asked) = (Bytes(self.reserve_bytes), Bytes(self.reserve_asked_bytes));
            let left = self.reserve_eta.map_or_else(String::new, |left| format!(", {} to go", Time(left)));
            writeln!(f, "reserve: {pinned} of {asked} pinned{left}")?;
        }
        if let (Some(age), stream) = (self.oldest_in_flight, self.oldest_in_flight_stream) {
            writeln!(f, "oldest in flight: {} on stream {:#x}", Time(age), stream.unwrap_or(0))?;
        }
        Ok(())
    }

    fn times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("pin", &self.pin.time, Some(&self.pin)),
            ("unpin", &self.unpin.time, Some(&self.unpin)),
            ("remap", &self.remap.time, Some(&self.remap)),
            ("wait", &self.wait_time, None),
            ("use of a miss", &self.use_time, None),
            ("in flight (seen)", &self.in_flight_time, None),
        ];
        if rows.iter().all(|(_, time, _)| time.count() == 0) {
            return Ok(());
        }
        let [count, bytes, total] = ["times", "bytes", "total"];
        writeln!(
            f,
            "{:<16} {count:>8} {bytes:>11} {total:>9} {:>9} {:>9} {:>9} {:>9}",
            "", "p50", "p99", "p99.9", "max"
        )?;
        for (name, time, calls) in rows.into_iter().filter(|(_, time, _)| time.count() > 0) {
            let bytes = calls.map_or_else(String::new, |calls| Bytes(calls.bytes).to_string());
            write!(f, "{name:<16} {:>8} {bytes:>11}", time.count())?;
            write!(f, " {:>9}", Time(time.total()))?;
            for share in [0.5, 0.99, 0.999, 1.0] {
                write!(f, " {:>9}", Time(time.percentile(share)))?;
            }
            let failures = calls.map_or(0, |calls| calls.failures);
            if failures > 0 {
                write!(f, "  {failures} failed")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The reasons that occurred, if any.
fn reasons(f: &mut fmt::Formatter<'_>, what: &str, counts: &[(&str, u64)]) -> fmt::Result {
    let occurred = counts.iter().filter(|(_, count)| *count > 0);
    let texts: Vec<_> = occurred.map(|(name, count)| format!("{} {count}", name.replace('_', " "))).collect();
    if texts.is_empty() { Ok(()) } else { writeln!(f, "  {what}: {}", texts.join(", ")) }
}

/// One line.
impl fmt::Display for ClassStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class_bytes, buffers, peak_buffers, in_flight, idle, in_use, misses, evictions } = *self;
        write!(
            f,
            "class {:>9}: {buffers} buffers ({in_use} in use, {in_flight} in flight, {idle} idle), at most {peak_buffers}; ",
            Bytes(class_bytes)
        )?;
        write!(f, "{misses} misses, {evictions} left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_times_have_units_and_few_digits() {
        let bytes = [0, 1023, 1024, 1536 << 10, 5 << 30, 3 << 40].map(|bytes| Bytes(bytes).to_string());
        assert_eq!(bytes, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "3.0 TiB"]);
        let times = [0, 999, 1_234_567, 2_000_000_000].map(|nanos| Time(Duration::from_nanos(nanos)).to_string());
        assert_eq!(times, ["0.00ns", "999.00ns", "1.23ms", "2.00s"]);
        assert_eq!(format!("[{:>9}]", Bytes(7)), "[      7 B]");
    }
}
