//! The pools on the other memory nodes of the machine.
//!
//! Each node has a pool of its own below the one that was built, with idle buffers and an arena of its own, made when it is
//! first asked for. All are under one ceiling. So buffers are reused on the node that they lie on, and a pool that is
//! asked for no other node pays nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backend::Source;
use crate::error::{ErrorKind, Result};
use pinpool_os::host;
use pinpool_os::sync::plain::Mutex;

/// Makes a source like this one on that memory node.
type MakeSource = dyn Fn(&dyn Source, u32) -> Result<Arc<dyn Source>> + Send + Sync;

/// The pools on other nodes.
pub(super) struct NodePools<P> {
    root: PathBuf,
    make_source: Box<MakeSource>,
    pools: Mutex<BTreeMap<u32, P>>,
}

impl<P> fmt::Debug for NodePools<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodePools").field(&self.pools.lock().keys().collect::<Vec<_>>()).finish()
    }
}

impl<P: Clone> NodePools<P> {
    pub(super) fn new(root: &Path, make_source: Box<MakeSource>) -> Self {
        Self { root: root.to_owned(), make_source, pools: Mutex::new(BTreeMap::new()) }
    }

    /// The pools made so far, by node.
    pub(super) fn all(&self) -> Vec<P> {
        self.pools.lock().values().cloned().collect()
    }

    /// The pool on memory node `node`, made by `make` if there is none; `None` if that is the pool itself, whose source is
    /// `own`.
    pub(super) fn on(
        &self,
        node: u32,
        own: &dyn Source,
        make: impl FnOnce(Arc<dyn Source>) -> Result<P>,
    ) -> Result<Option<P>> {
        let known = self.pools.lock().get(&node).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let nodes = host::numa_nodes(&self.root);
        if nodes.len() < 2 || own.numa_node() == Some(node) {
            return Ok(None);
        }
        if !nodes.contains(&node) {
            return Err(refused(node, format!("no such memory node, the machine has {nodes:?}")));
        }
        let made = make((self.make_source)(own, node)?)?;
        // Another thread may have been faster.
        Ok(Some(self.pools.lock().entry(node).or_insert(made).clone()))
    }
}

pub(super) fn refused(node: u32, why: String) -> crate::Error {
    ErrorKind::Setting { name: "memory node", value: node.to_string(), why }.into()
}
