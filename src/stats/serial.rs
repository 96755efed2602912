//! The snapshot as data: durations in seconds, with the unit in the name.

use std::time::Duration;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::Histogram;

pub(super) fn optional_seconds<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(serializer)
}

/// Serializes the counts and durations. `buckets` has an entry for each bucket with events:
/// `[bound in seconds, or null for the last bucket, events]`.
impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Histogram", 9)?;
        fields.serialize_field("count", &self.count())?;
        for (name, duration) in [
            ("total_seconds", self.total()),
            ("min_seconds", self.min()),
            ("avg_seconds", self.mean()),
            ("max_seconds", self.max()),
            ("p50_seconds", self.quantile(0.5)),
            ("p99_seconds", self.quantile(0.99)),
            ("p999_seconds", self.quantile(0.999)),
        ] {
            fields.serialize_field(name, &duration.as_secs_f64())?;
        }
        let used = self.buckets().filter(|(_, count)| *count > 0);
        let buckets: Vec<_> = used.map(|(bound, count)| (bound.map(|bound| bound.as_secs_f64()), count)).collect();
        fields.serialize_field("buckets", &buckets)?;
        fields.end()
    }
}
