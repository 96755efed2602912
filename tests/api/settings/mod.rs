//! Settings: how values are written, where they come from, and what they imply.

#[cfg(not(miri))]
mod env_prefix;
mod settings_as_text;
mod sizes;
mod values;
