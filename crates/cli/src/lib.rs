//! Internal to pinpool, without a stability guarantee: the modules that the tool shares with `pinpool-bench`.
//!
//! | module | owns |
//! | --- | --- |
//! | [`terminal`] | every write of a tool: results on stdout, messages on stderr |
//! | [`table`] | text tables |
//! | [`logger`] | the log on the terminal |
//! | [`exit`] | exit statuses |
//! | [`gpu`] | the GPU that batches are copied to |
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc)] // Internal.

pub mod exit;
pub mod gpu;
pub mod logger;
pub mod table;
pub mod terminal;
