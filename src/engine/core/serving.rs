//! The pool's statistics on a socket, if `PINPOOL_SOCKET` asks for it.

use std::sync::{Arc, Weak};

use pinpool_observe::stats_socket::{self, Shown};

use super::Core;
use crate::dump::Owner;

/// Most owners of a pool that its statistics list.
const OWNERS_MAX: usize = 20;

impl Shown for Core {
    fn object(&self) -> serde_json::Value {
        let stats = self.stats();
        let owners = self.owners_of(&stats);
        let why = self.why();
        let owner = |owner: &Owner| {
            let oldest_seconds = owner.oldest.map(|age| age.as_secs_f64());
            let Owner { tag, buffers, bytes, asked_bytes, .. } = owner;
            serde_json::json!({
                "tag": tag, "buffers": buffers, "bytes": bytes, "asked_bytes": asked_bytes, "oldest_seconds": oldest_seconds,
            })
        };
        let mut object = serde_json::json!(stats);
        object["why"] = serde_json::json!({
            "cause": why.cause.name(), "is_alarm": why.is_alarm, "lines": why.lines(), "lost_seconds": why.lost.total_ns() as f64 / 1e9,
            "of_seconds": why.lost.of_us as f64 / 1e6,
        });
        // For `pinpool top --once`, in the words that a program prints.
        object["table"] = stats.to_string().into();
        object["dump"] = self.dump_of(&stats, None).to_string().into();
        object["snapshot"] = serde_json::json!(self.snapshot());
        object["owners"] = owners.iter().take(OWNERS_MAX).map(owner).collect();
        object
    }
}

impl Core {
    /// Shows the statistics until the pool is gone.
    pub(crate) fn serve_statistics(self: &Arc<Self>) {
        let Some(path) = &self.config.socket else { return };
        let is_derived = path.as_os_str() == "1";
        let path = if is_derived { stats_socket::path_of(self.process) } else { path.clone() };
        let pool: Weak<Self> = Arc::downgrade(self);
        match stats_socket::serve(&path, pool) {
            Ok(showing) => {
                self.log.serving(&path);
                // Set once, when the pool is made.
                let _ = self.showing.set(showing);
            }
            Err(error) => self.log.not_serving(&path, &error.to_string()),
        }
    }
}
