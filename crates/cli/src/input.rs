//! Recordings and traces of requests, read with errors that name their file.

use std::collections::HashSet;
use std::path::Path;

use pinpool_replay::{Input, PoolDescription, Recording, Trace, Workload};

use crate::files::{in_file, named};

/// Opens the file at `path`.
///
/// # Errors
///
/// If the file cannot be read.
pub(crate) fn open(path: &Path) -> Result<Input, String> {
    Input::open(path).map_err(|error| in_file(path, &error))
}

/// Reads the recording in the open file at `path`. If several pools have the same name, adds the number of the pool to each of
/// these names except the first.
///
/// # Errors
///
/// If the file is not a recording or cannot be read.
pub(crate) fn read_recording(path: &Path, input: Input) -> Result<Recording, String> {
    if !Recording::is_begun_by(input.first()) {
        return Err(named(path, &"not a recording (PINPOOL_TRACE and `pinpool load --record` write one)"));
    }
    let mut recording = Recording::read(input.into_reader()).map_err(|error| in_file(path, &error))?;
    let mut taken = HashSet::new();
    for PoolDescription { number, facts } in &mut recording.pools {
        let name = facts.iter_mut().find(|(fact, _)| fact == "name");
        if let Some((_, name)) = name.filter(|(_, name)| !taken.insert(name.clone())) {
            *name += &format!(" (pool {number})");
        }
    }
    Ok(recording)
}

/// Reads the requests in the file at `path`, which is a recording or a trace of requests. `choose` may remove pools of a
/// recording.
///
/// # Errors
///
/// If the file cannot be read, or has no requests.
pub(crate) fn read_workload(
    path: &Path,
    choose: impl FnOnce(&mut Recording) -> Result<(), String>,
) -> Result<Workload, String> {
    let input = open(path)?;
    let workload = if Recording::is_begun_by(input.first()) {
        let mut recording = read_recording(path, input)?;
        choose(&mut recording)?;
        Workload::from_recording(&recording)
    } else {
        Trace::from_input(input).and_then(Workload::of_trace)
    };
    let workload = workload.map_err(|error| in_file(path, &error))?;
    if workload.requests == 0 {
        let why = workload.warning.as_ref().map_or_else(String::new, |warning| format!("{warning}; "));
        return Err(named(path, &format_args!("{why}the trace has no requests")));
    }
    Ok(workload)
}
