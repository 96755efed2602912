//! The log of this library and of its pools. Each log line of this library has a function.
//!
//! The lines go to stderr, or to the file that `PINPOOL_PRELOAD_LOG` names. They are appended, so that several processes may
//! share the file, and `%p` in its name becomes the process ID. `RUST_LOG` selects the lines; the default is warnings, and
//! level info in a file.

use std::fs::File;
use std::io::Write;
use std::mem::{self, Discriminant};
use std::sync::Once;
use std::{env, fmt, process};

use env_logger::{Builder, Target};
use log::{LevelFilter, info, warn};
use pinpool::Pool;

use crate::settings::{self, LOG_VARIABLE};
use pinpool_os::sync::unmodeled::Mutex;

/// The log target of the statistics, which are shown at any level.
const STATS_TARGET: &str = "pinpool_preload::statistics";

/// The reason that memory was not served.
#[derive(Debug, Clone)]
pub(crate) enum NotServed {
    Forked,
    WriteCombined,
    Flags(u32),
    Driver(String),
    NoContext,
    /// There is no pool, which was logged when the pool could not be made, or the context has ended.
    NoPool,
    /// The process is no longer served, which was logged when it happened.
    Stopped,
    Full(usize),
    Version(i32),
    Refused(String),
}

impl fmt::Display for NotServed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteCombined => f.write_str("write-combined memory, which pools do not have"),
            Self::Flags(flags) => write!(f, "flags {flags:#x}, which pinpool does not know"),
            Self::Forked | Self::NoContext | Self::NoPool | Self::Stopped => Ok(()), // `passed_through` does not log these.
            Self::Full(bytes) => write!(f, "{bytes} bytes do not fit within the limit; raise PINPOOL_MAX_BYTES"),
            Self::Version(version) => {
                write!(f, "the program asks for functions of CUDA {}, which this build does not know", version / 1000)
            }
            Self::Driver(why) | Self::Refused(why) => f.write_str(why),
        }
    }
}

/// Logs that memory comes from the driver itself, once for each reason.
pub(crate) fn passed_through(reason: &NotServed) {
    static LOGGED_REASONS: Mutex<Vec<Discriminant<NotServed>>> = Mutex::new(Vec::new());
    // `NoPool` and `Stopped` are logged elsewhere, and the driver refuses a call without a context. A forked child does not
    // log, since a thread of its parent may have held a lock.
    if matches!(reason, NotServed::NoPool | NotServed::Stopped | NotServed::NoContext | NotServed::Forked) {
        return;
    }
    init();
    let (kind, mut logged) = (mem::discriminant(reason), LOGGED_REASONS.lock());
    if !logged.contains(&kind) {
        logged.push(kind);
        drop(logged);
        warn!("not served by the pool, but by the driver's own function: {reason}");
    }
}

/// Logs that a pool could not be made.
pub(crate) fn pool_failed(error: &pinpool::Error) {
    warn!("not served: the pool could not be created, so the driver's own functions are called: {error}");
}

/// Logs that the process is no longer served.
pub(crate) fn no_longer_served(why: &str) {
    init();
    warn!(
        "no longer served: {why}. The driver's own functions are called, and memory that is freed from now on is not reused"
    );
}

/// Logs the end of a context with a pool.
pub(crate) fn context_ended(handle: usize) {
    info!("context {handle:#x} has ended, and its memory with it; the next context gets a new pool");
}

/// Logs at the end of the process how much memory the program pinned itself.
pub(crate) fn memory_registered(calls: u64, bytes: u64) {
    init();
    let calls = if calls == 1 { "1 call".to_owned() } else { format!("{calls} calls") };
    warn!(
        "not served: the program pinned its own memory by {calls} of cuMemHostRegister ({bytes} bytes); a pool serves \
         memory that the driver allocates (cuMemHostAlloc)"
    );
}

/// Initializes the log, at the first call.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let path = env::var_os(LOG_VARIABLE).filter(|path| !path.is_empty());
        let path = path.map(|path| path.to_string_lossy().replace("%p", &process::id().to_string()));
        let opened = path.as_deref().map(|path| File::options().create(true).append(true).open(path));
        let (file, failed) = opened.transpose().map_or_else(|error| (None, Some(error)), |file| (file, None));
        let default = if file.is_some() { "info" } else { "warn" };
        let filter = env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
        let mut builder = Builder::new();
        builder.parse_filters(filter.as_deref().unwrap_or(default)).format(|out, record| {
            let level = record.level().as_str().chars().next().unwrap_or('?');
            writeln!(out, "pinpool[{}] {level}: {}", process::id(), record.args())
        });
        if *settings::LOGS_STATISTICS {
            builder.filter_module(STATS_TARGET, LevelFilter::Info);
        }
        builder.target(file.map_or(Target::Stderr, |file| Target::Pipe(Box::new(file))));
        // This library has its own copy of `log`, so there is no other logger.
        let _ = builder.try_init();
        if let (Some(path), Some(error)) = (path, failed) {
            warn!("{LOG_VARIABLE}={path} cannot be written, so the log goes to stderr: {error}");
        }
    });
}

/// Logs the statistics of a pool, if that is set.
pub(crate) fn statistics(pool: &Pool) {
    if *settings::LOGS_STATISTICS {
        info!(target: STATS_TARGET, "{}", pool.stats());
    }
}
