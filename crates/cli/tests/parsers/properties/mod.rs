//! Properties of each parser for any bytes: one function per parser, which panics if they are violated.
//!
//! Compiled twice: by the test `parsers`, which tries the seeds and changed seeds, and by the fuzz targets in `fuzz`.

pub(crate) mod archive;
pub(crate) mod decoded;
pub(crate) mod host;
pub(crate) mod recording;
pub(crate) mod settings;
pub(crate) mod trace;

use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};

/// A property of a parser: panics if it does not hold for these bytes.
pub(crate) type Property = fn(&[u8]);

/// Every property and the name of its target, its seeds and its fuzz binary.
pub(crate) const ALL: &[(&str, Property)] = &[
    ("quantities", settings::quantities),
    ("words", settings::words),
    ("environment", settings::environment),
    ("trace", trace::text),
    ("trace_file", trace::file),
    ("replay", trace::replay),
    ("recording", recording::recording),
    ("tar", archive::tar),
    ("safetensors", archive::safetensors),
    ("decoders", decoded::decoders),
    ("cgroup", host::cgroup),
    ("pressure", host::pressure),
    ("number_list", host::number_list),
    ("smaps", host::smaps),
];

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

/// Writes a file at `path` below the folder of the calling thread.
fn written(path: &str, content: &[u8]) -> PathBuf {
    let path = folder().join(path);
    if fs::write(&path, content).is_err() {
        fs::create_dir_all(path.parent().expect("it lies in the folder")).expect("the folder can be written");
        fs::write(&path, content).expect("the folder can be written");
    }
    path
}

/// Returns the folder of the calling thread, in memory if possible, because a run writes thousands of files a second.
fn folder() -> PathBuf {
    FOLDER.with(|folder| {
        let new = || {
            let in_memory = Path::new("/dev/shm");
            tempfile::tempdir_in(in_memory).or_else(|_| tempfile::tempdir()).expect("a folder can be made")
        };
        folder.get_or_init(new).path().to_owned()
    })
}
