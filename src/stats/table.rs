//! The snapshot as a table for people.

use std::fmt;

use super::{ClassStats, Statistic, Stats, Unit, Value};
use pinpool_os::format::{Size, Time};

/// Writes one line per group with its non-zero statistics, then a table of durations.
impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_ref().map(|name| format!("[{name}]")).unwrap_or_default();
        let pinned = self.pinned_by.map_or("not pinned".to_owned(), |by| format!("pinned by the {}", by.name()));
        let percent = 100.0 * self.requests.hit_rate();
        write!(f, "pool{name}: {} on {}, {pinned}, {percent:.1}% hits", self.preset, self.backend)?;
        let list = self.unstable_list();
        let mut group = "";
        for Statistic { path, unit, value, .. } in &list {
            let (group_name, name) = path.split_once('.').unwrap_or(("", path));
            let text = match value {
                Value::None | Value::Count(0) | Value::Times(_) => continue,
                Value::Count(bytes) if *unit == Unit::Bytes => Size(*bytes).to_string(),
                Value::Count(count) => count.to_string(),
                Value::Text(text) => text.clone(),
                Value::Time(time) => Time(*time).to_string(),
            };
            if group_name != group {
                group = group_name;
                write!(f, "\n{group}:")?;
            }
            write!(f, " {name}={text}")?;
        }
        let mut is_first = true;
        for Statistic { path, value, .. } in &list {
            let Value::Times(times) = value else { continue };
            if times.count() == 0 {
                continue;
            }
            if std::mem::take(&mut is_first) {
                let [count, total, p50, p99, p999, max] = ["count", "total", "p50", "p99", "p99.9", "max"];
                write!(f, "\n{:<20} {count:>8} {total:>9} {p50:>9} {p99:>9} {p999:>9} {max:>9}", "")?;
            }
            write!(f, "\n{path:<20} {:>8} {:>9}", times.count(), Time(times.total()))?;
            for share in [0.5, 0.99, 0.999, 1.0] {
                write!(f, " {:>9}", Time(times.quantile(share)))?;
            }
        }
        Ok(())
    }
}

/// Writes all statistics of the class on one line.
impl fmt::Display for ClassStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class_bytes, buffers, peak_buffers, in_flight, idle, in_use, quarantined, misses, evictions } =
            *self;
        let class = Size(class_bytes);
        write!(f, "class {class:>9}: buffers={buffers} in_use={in_use} in_flight={in_flight} idle={idle} ")?;
        write!(f, "quarantined={quarantined} peak={peak_buffers} misses={misses} evictions={evictions}")
    }
}
