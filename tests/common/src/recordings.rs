//! Recordings, read back.

use std::io;
use std::path::Path;

use pinpool_replay::{Input, Recording};

/// The recording at `path`, plain or compressed.
pub fn read_recording(path: &Path) -> io::Result<Recording> {
    Recording::read(Input::open(path)?.into_reader())
}
