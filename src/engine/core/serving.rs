//! The pool's statistics on a socket, if `PINPOOL_SOCKET` asks for it.

use std::sync::{Arc, Weak};

use super::Core;

impl crate::stats_socket::Shown for Core {
    fn statistics(&self) -> crate::stats::Stats {
        self.stats()
    }

    fn owners(&self) -> Vec<crate::dump::Owner> {
        self.owners_of(&self.stats())
    }
}

impl Core {
    /// Shows the statistics until the pool is gone.
    pub(crate) fn serve_statistics(self: &Arc<Self>) {
        let Some(path) = &self.config.socket else { return };
        let is_derived = path.as_os_str() == "1";
        let path = if is_derived { crate::stats_socket::path_of(self.process) } else { path.clone() };
        let pool: Weak<Self> = Arc::downgrade(self);
        match crate::stats_socket::serve(&path, pool) {
            Ok(showing) => {
                self.log.serving(&path);
                // Set once, when the pool is made.
                let _ = self.showing.set(showing);
            }
            Err(error) => self.log.not_serving(&path, &error.to_string()),
        }
    }
}
