//! What a pool counts beyond its idle buffers and its memory: time, buffers in use and their holders.

pub(super) mod clock;
pub(super) mod counters;
pub(super) mod lifetime;
pub(super) mod maintenance;
pub(super) mod owners;
pub(super) mod shortage;
