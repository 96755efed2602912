//! Runs every parser on the seeds of the fuzz targets and on changed seeds. The properties must hold, no thread may allocate
//! more than a bound, and the parser must end for each input.
//!
//! | file | contents |
//! | --- | --- |
//! | `properties` | what must hold for each parser and any bytes |
//! | `change` | random changes to seeds, the same in every run |
//! | `test_common::heap_use` | the most bytes that a thread had allocated at one time |
//!
//! The fuzz targets in `fuzz` search for failing inputs for as long as they run; `.ci/fuzz` runs them. An input that they find
//! becomes a seed, so that this test tries it too. `FUZZ_RUNS` sets the number of changed seeds for each parser.

#![allow(clippy::print_stderr)] // Names the input that fails.

mod change;
mod properties;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::{env, fs};

use pinpool_replay::Recording;
use test_common::heap_use;

#[global_allocator]
static ALLOCATOR: heap_use::MeasuringAllocator = heap_use::MeasuringAllocator;

/// The root of the project.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// Changed seeds for each parser: a few seconds in all, in a debug build.
const DEFAULT_RUNS: u32 = 400;
/// Largest input.
const BYTES_MAX: usize = 4096;
/// No parser needs more for an input of [`BYTES_MAX`]. Compressed traces need most.
const ALLOCATED_BYTES_MAX: usize = 64 << 20;

fn seeds(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(crate::ROOT).join("fuzz/seeds").join(target);
    let paths = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = paths.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Tries one input, and keeps it in a file if it fails.
fn try_input(target: &str, property: properties::Property, input: &[u8]) {
    let before = heap_use::start();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        property(input);
        let peak_bytes = heap_use::peak() - before;
        assert!(peak_bytes <= ALLOCATED_BYTES_MAX, "{peak_bytes} B allocated at one time");
    }));
    if let Err(panic) = outcome {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{target}.failing"));
        fs::write(&path, input).unwrap();
        eprintln!("the input that fails: {}", path.display());
        resume_unwind(panic);
    }
}

fn run(target: &str) {
    let (_, property) = properties::ALL.iter().find(|(name, _)| *name == target).expect("a property of this name");
    let seeds = seeds(target);
    assert!(!seeds.is_empty(), "{target} has no seeds");
    for (path, seed) in &seeds {
        eprintln!("{}", path.display());
        try_input(target, *property, seed);
    }
    let runs = env::var("FUZZ_RUNS").map_or(DEFAULT_RUNS, |runs| runs.parse().expect("a number"));
    let mut changes = change::Changes::new(seeds.into_iter().map(|(_, seed)| seed).collect(), BYTES_MAX);
    for _ in 0..runs {
        try_input(target, *property, &changes.next_input());
    }
}

/// Without records, the property would be checked only on files that are rejected at the header, as after a change of version.
#[test]
fn recordings_among_the_seeds_have_records() {
    for name in ["file", "items"] {
        let seed = fs::read(Path::new(ROOT).join("fuzz/seeds/recording").join(name)).unwrap();
        let recording = Recording::read(&properties::recording::file(seed[0], &seed[1..])[..]).unwrap();
        assert!(!recording.records.is_empty(), "{name}");
    }
}

macro_rules! tests {
    ($($target:ident)+) => {
        $(
            #[test]
            fn $target() {
                run(stringify!($target));
            }
        )+

        #[test]
        fn every_property_is_tested_and_fuzzed() {
            let names: Vec<_> = properties::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($target)),+]);
            let targets = fs::read_to_string(Path::new(crate::ROOT).join("fuzz/Cargo.toml")).unwrap();
            let listed: Vec<_> = targets.lines().filter_map(|line| line.strip_prefix("name = \"")).collect();
            let listed: Vec<_> = listed.iter().map(|name| name.trim_end_matches('"')).collect();
            assert_eq!(listed[1..], names, "the first name is the package's");
        }
    };
}

tests! {
    quantities
    words
    environment
    trace
    trace_file
    replay
    recording
    tar
    safetensors
    decoders
    cgroup
    pressure
    number_list
    smaps
}
