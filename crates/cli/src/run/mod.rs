//! `pinpool run`: starts a program with a preloaded library that serves its pinned memory from a pool.
//!
//! The program replaces this process, and keeps its exit status, signals and terminal.

use std::env;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::set::pair;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

mod program;

/// The file name of the library.
const LIBRARY: &str = "libpinpool_preload.so";
/// The variable with the path of the library, if the library is not next to the tool.
const LIBRARY_VARIABLE: &str = "PINPOOL_PRELOAD_LIB";
const LOG_VARIABLE: &str = "PINPOOL_PRELOAD_LOG";
const STATS_VARIABLE: &str = "PINPOOL_PRELOAD_STATS";
const SYNC_VARIABLE: &str = "PINPOOL_PRELOAD_SYNC";
const OPTIONS: &str = "before -- come NAME=VALUE, --log FILE, --stats and --sync; after it the program";
const PRELOAD: &str = "LD_PRELOAD";

/// Run an unmodified CUDA program with its pinned memory served from a pool
///
/// Memory that the program allocates with cudaHostAlloc, cudaMallocHost, cuMemHostAlloc or cuMemAllocHost comes from one pool
/// per context, each with the limit max_bytes, or from the driver if the pool is full. Freed memory is reused once the work
/// enqueued before the free has completed in every context that the library has seen; see docs/preload.md. The exit status is
/// the program's, 127 if the program is not found, or 126 if it cannot be executed.
///
/// Served: programs on the CUDA runtime or driver, torch, CuPy, TensorRT, NCCL (only torch and a C program were tested). Not
/// served, because they pin their own memory with cuMemHostRegister: JAX and all of XLA, current TensorFlow, SGLang, torch with
/// pinned_use_cuda_host_register. If the program pinned memory this way, the log says so at the end of the run.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool run max_bytes=2GiB -- ./train")]
pub(crate) struct RunArgs {
    /// Pool settings, with or without the prefix PINPOOL_
    #[arg(value_name = "NAME=VALUE")]
    settings: Vec<String>,

    /// Append the log to this file; %p is the process ID
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,

    /// Log a pool's statistics when its context or the program ends
    #[arg(long)]
    stats: bool,

    /// Let each free wait for device work, except during captures
    #[arg(long)]
    sync: bool,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub(crate) fn run(args: &RunArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let settings = args.settings.iter().map(|setting| variable(setting)).collect::<Result<Vec<_>, _>>()?;
    if let Some(log) = &args.log {
        check_log(log).map_err(|why| ExitError::Settings.because(why))?;
    }
    let library = library()?;
    let Some((name, arguments)) = args.program.split_first() else { return Ok(()) };
    let program = program::find(name).map_err(|error| refused(name, &error))?;
    if let Some(why) = program::ignores_preloads(&program) {
        terminal.message(format!("{}: {why}: its memory is not served from the pool", name.display()));
    }
    let mut preload = OsString::from(library);
    if let Some(others) = env::var_os(PRELOAD).filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(program);
    command.arg0(name).args(arguments).envs(settings).env(PRELOAD, preload);
    if let Some(log) = &args.log {
        command.env(LOG_VARIABLE, std::path::absolute(log).unwrap_or_else(|_| log.clone()));
    }
    for (is_asked, variable) in [(args.stats, STATS_VARIABLE), (args.sync, SYNC_VARIABLE)] {
        if is_asked {
            command.env(variable, "1");
        }
    }
    Err(refused(name, &command.exec()))
}

/// Returns the setting as a valid variable.
fn variable(setting: &str) -> Result<(String, String), Box<dyn Error>> {
    pair(setting).map_err(|why| ExitError::Settings.because(format_args!("{why}\n{OPTIONS}")))
}

/// Fails if the log cannot be written. A missing file is created and removed, since each process may have a separate log.
fn check_log(log: &Path) -> Result<(), String> {
    // The library inserts its process ID for `%p`. No process has the ID 0.
    let path = PathBuf::from(log.to_string_lossy().replace("%p", "0"));
    let written = match fs::metadata(&path) {
        Ok(facts) if facts.is_file() || facts.is_dir() => File::options().append(true).open(&path).map(drop),
        // Opening a pipe would wait for its reader.
        Ok(_) => Ok(()),
        Err(_) if path.is_symlink() => File::options().append(true).create(true).open(&path).map(drop),
        Err(_) => File::options().append(true).create(true).open(&path).and_then(|_made| fs::remove_file(&path)),
    };
    written.map_err(|error| format!("--log {} cannot be written: {error}", log.display()))
}

/// Returns the path of the library: the path in the variable, next to this tool, or in `../lib`.
fn library() -> Result<PathBuf, String> {
    if let Some(path) = env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        let absolute =
            path.canonicalize().map_err(|error| format!("{LIBRARY_VARIABLE}={}: {error}", path.display()))?;
        return loadable(absolute);
    }
    let tool =
        env::current_exe().and_then(|tool| tool.canonicalize()).map_err(|error| format!("this tool: {error}"))?;
    let folder = tool.parent().unwrap_or(&tool);
    let places = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY), folder.join("deps").join(LIBRARY)];
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    loadable(found.ok_or_else(|| {
        format!(
            "no {LIBRARY} in {} or {}: build it with `cargo build --release -p pinpool-preload` and set {LIBRARY_VARIABLE} to its path",
            folder.display(),
            folder.join("../lib").display()
        )
    })?)
}

/// Refuses a path with spaces or colons, because the dynamic loader splits the list of libraries at them.
fn loadable(path: PathBuf) -> Result<PathBuf, String> {
    match path.as_os_str().as_encoded_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
        true => Err(format!("{}: LD_PRELOAD does not support spaces and colons; move the library", path.display())),
        false => Ok(path),
    }
}

/// Returns the reason that the program does not run, with the exit status that shells use.
fn refused(program: &OsStr, error: &io::Error) -> Box<dyn Error> {
    let status = if error.kind() == io::ErrorKind::NotFound { ExitError::NotFound } else { ExitError::NotExecutable };
    status.because(format_args!("{}: {error}", program.display()))
}
