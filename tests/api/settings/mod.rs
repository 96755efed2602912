//! Settings: how values are written, where they come from, and what they imply.

mod sizes;
mod values;
