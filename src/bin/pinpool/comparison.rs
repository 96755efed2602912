//! Presets and sources beside each other.
use std::error::Error;
use std::path::Path;

use crate::replay::Named;

pub(crate) fn markdown(_workloads: &[Named], _targets: Option<&Path>) -> Result<String, Box<dyn Error>> {
    Ok(String::new())
}
