//! The settings: one row each, from which the fields, the variables and the builder's methods are made.
//!
//! A row is, in this order: what the setting does (the docs of its field and method, the text of `pinpool doctor --settings` and of
//! `docs/settings.md`), its variable, its default, its name, what its builder method takes, its type, and how its variable is
//! written. To add a setting, add a row, and where another setting implies or contradicts it, a line in
//! [`Settings::examine`].
//!
//! A value means the same as a variable and in code: what code sets is written as its variable would be, and read again.

use std::path::PathBuf;
use std::time::Duration;

use super::text::*;
use super::{Backend, Ceiling, FenceKind, HandleTypes, HugeTlb, LedgerName, OnFull, Preset, PressureSource};
use crate::backend::PAGE_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::size_class::Rounding;

/// Time for a few batches: a pool that may give other memory out is not waited for longer.
const WAIT_BEFORE_PAGEABLE: Duration = Duration::from_millis(100);

/// Calls the macro `$consumer` with all rows.
macro_rules! for_each_setting {
    ($consumer:ident) => {
        $consumer! {
        /// Where memory comes from: auto, gpu (vmm, register or cuda, else an error), vmm, register, cuda, mlock, heap, sim or sim:SIZE.
        "PINPOOL_BACKEND" = Backend::Auto, backend(Backend): Backend as BACKEND;

        /// Ordinal of the GPU that copies go to. Left out, it is that of the context that is current where the pool is built, else the
        /// first GPU that has a context in this process, else 0.
        "PINPOOL_DEVICE" = 0, device(u32): u32 as ORDINAL;

        /// Memory node to pin on, where the machine has several: a number, or auto for the node of the GPU.
        "PINPOOL_NUMA_NODE" = None, numa_node(impl Into<Option<u32>>): Option<u32> as NODE;

        /// How granules can be exported to other processes: none, or posix_fd, as file descriptors. Only vmm can, and not its
        /// reserve.
        "PINPOOL_HANDLE_TYPES" = HandleTypes::None, handle_types(HandleTypes): HandleTypes as word();

        /// Whether memory is write-combined: 0 or 1. Only cuda can. Writes then go past the caches of the CPU, and the CPU reads
        /// such memory 10 to 100 times as slowly: only for buffers that are written once, front to back, and never read.
        "PINPOOL_WRITE_COMBINED" = false, write_combined(bool): bool as SWITCH;

        /// Rules that the pool follows: adaptive, or tensorflow (exact to its PoolAllocator).
        "PINPOOL_PRESET" = Preset::Adaptive, preset(Preset): Preset as word();

        // The starting limit of TensorFlow's pool of pinned memory.
        /// Most idle buffers kept at the start; 0 keeps none and turns auto-resize off.
        "PINPOOL_POOL_SIZE_LIMIT" = 100, pool_size_limit(u64): u64 as COUNT;

        /// Whether the limit rises by a tenth while evictions and misses stay frequent: 0 or 1.
        "PINPOOL_AUTO_RESIZE" = true, auto_resize(bool): bool as SWITCH;

        /// How sizes become classes: eighths under adaptive; pow2 (the default there) or exact under tensorflow, which both
        /// imply.
        "PINPOOL_ROUNDING" = Rounding::Eighths, rounding(Rounding): Rounding as word();

        /// Ceiling on all bytes held, in use and idle: a size like 2GiB, none (the default under tensorflow), or auto: a quarter
        /// of the memory that the control group, else the machine, has, which all pools of the process with auto share.
        "PINPOOL_MAX_BYTES" = Ceiling::Auto, max_bytes(impl Into<Ceiling>): Ceiling as word();

        /// Number of pools (loader processes) on this host that share what auto allows, at least 1.
        "PINPOOL_POOLS_PER_HOST" = 1, pools_per_host(u64): u64 as AT_LEAST_ONE;

        /// Host ledger, whose ceiling holds for the pools of all processes of this user and host that name it: a name, auto (the one
        /// called auto, where torchrun or Ray shows that this process is one of several), or none. Its first owner sets its
        /// ceiling: its PINPOOL_MAX_BYTES if that is a size, else a quarter of the memory as for auto.
        "PINPOOL_LEDGER" = LedgerName::None, ledger(impl Into<LedgerName>): LedgerName as word();

        // Longer than a step of a training, and shorter than a person waits for an answer: a loader that is ahead of its device
        // waits for it, and a program that holds every buffer itself hears of it. The log says at once that a get waits.
        /// How long a request waits for memory at the limit: a time, 0 (it fails at once), or none (it waits forever; in
        /// code `None`). The default is 100ms with PINPOOL_ON_FULL=pageable, and 0 with tensorflow.
        "PINPOOL_WAIT" = Some(Duration::from_secs(30)), wait(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;

        // The same with and without a GPU, so that a loader that holds too much shows it on the machine where it is written.
        /// What a get does after that wait: error, or pageable (memory that is not pinned, under PINPOOL_MAX_FALLBACK_BYTES).
        "PINPOOL_ON_FULL" = OnFull::Error, on_full(OnFull): OnFull as word();

        /// Most bytes of such memory at one time, which are not under PINPOOL_MAX_BYTES: a size like 2GiB, 0, none, or auto: as
        /// much again as that ceiling. Over it a get waits, then fails.
        "PINPOOL_MAX_FALLBACK_BYTES" = Ceiling::Auto, max_fallback_bytes(impl Into<Ceiling>): Ceiling as FALLBACK_CEILING;

        /// Most bytes kept idle, in idle buffers and free memory: a size like 2GiB, or none; 0 keeps nothing. What a put adds over
        /// it goes back at the next miss or by the maintenance thread, at most a second later.
        "PINPOOL_MAX_IDLE_BYTES" = None, max_idle_bytes(impl Into<Option<u64>>): Option<u64> as SIZE_OR_NONE;

        // Measured: half or twice as long changes driver time and memory held by less than 5 % over 25 loaders.
        /// How long memory stays idle before it goes back to the system; none keeps it. Of it a buffer is at most 10 s in the
        /// thread cache, then its memory stays so long in the arena, and a fifth of what is due goes each second; under 10 s, all of
        /// it at once. Raise it for bursts far apart. Under register and cuda, where a release waits for the device, idle memory is
        /// not released by time.
        "PINPOOL_IDLE_TIMEOUT" = Some(Duration::from_secs(60)),
            idle_timeout(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;

        /// Where the pool learns that memory is short, to give idle memory back: on (from the kernel), off, or a file in the
        /// format of /proc/pressure/memory.
        "PINPOOL_PRESSURE" = PressureSource::Kernel, pressure(PressureSource): PressureSource as word();

        /// Bytes pinned at the start, which is the fastest way, and kept: a size like 2GiB, or none.
        "PINPOOL_RESERVE" = 0, reserve_bytes(u64): u64 as SIZE;

        /// Whether the start waits until all of the reserve is pinned: 0 or 1. With 0 the first 8 MiB or so are there at once, and a
        /// thread pins the rest beside the program, in steps that give way to gets; what a get pins meanwhile is a part of it.
        "PINPOOL_RESERVE_WAIT" = true, reserve_wait(bool): bool as SWITCH;

        /// Huge pages that the administrator has set aside (vm.nr_hugepages), for a reserve that is waited for and for regions of
        /// register: off, auto (those of 2 MiB, while there are any), 2MiB or 1GiB (with a warning where there are too few). A
        /// child of fork cannot read buffers then.
        "PINPOOL_HUGETLB" = HugeTlb::Off, hugetlb(HugeTlb): HugeTlb as word();

        /// Threads that touch new memory at once, in a reserve and under register: a number, or auto, one for each core that the
        /// process may use. Lower it where others need the cores.
        "PINPOOL_PIN_THREADS" = None, pin_threads(impl Into<Option<u64>>): Option<u64> as THREADS;

        /// Whether the pool may pin more than its reserve: 0 or 1 (TensorFlow's allow_growth).
        "PINPOOL_GROWTH" = true, growth(bool): bool as SWITCH;

        /// Whether the process's maintenance thread looks after the pool, so that memory goes back and figures are true while
        /// the program makes no calls: 0 or 1.
        "PINPOOL_POLL" = true, background_poll(bool): bool as SWITCH;

        /// Whether a buffer is zeroed before it is kept, and when it is new, so that no user sees another's bytes: 0 or 1. By
        /// the maintenance thread within a tenth of a second, or by a get that needs it earlier; until then the buffer counts
        /// as in flight. Without that thread by the put.
        "PINPOOL_ZERO" = false, zero(bool): bool as SWITCH;

        /// File that everything the pool does is recorded in, for the tool's trace, replay and advise: a path, compressed if it
        /// ends in .gz, with %p for the number of the process; or none. A recording that is there is kept as PATH.old, and a file
        /// that is no recording is refused. Needs the feature observe.
        "PINPOOL_TRACE" = None, trace(impl Into<Option<PathBuf>>): Option<PathBuf> as PATH_OR_NONE;

        /// One get in so many, drawn by chance, keeps its call stack, so that a recording, a leak's verdict and the list of what is
        /// still out name the line that it came from; 0: none. Every get then takes the slow path. Needs the feature observe.
        "PINPOOL_CALL_STACKS" = 0, call_stacks(u64): u64 as COUNT;

        // TensorFlow's `should_log`.
        /// One check of the rates in this many is logged; 1 logs each.
        "PINPOOL_LOG_EVERY" = 10, log_every(u64): u64 as AT_LEAST_ONE;


        /// Unix socket that serves the statistics to the tool's top: a path, 1 for pinpool-PID.sock in XDG_RUNTIME_DIR or /tmp, or
        /// none or 0. Needs the feature observe.
        "PINPOOL_SOCKET" = None, socket(impl Into<Option<PathBuf>>): Option<PathBuf> as SOCKET;

        // Longer than any copy that works, shorter than a person waits for a process to end.
        /// Longest wait for copies in flight when the pool ends, none for one without end; the memory of copies that take longer is
        /// never released.
        "PINPOOL_CLOSE_WAIT" = Some(Duration::from_secs(30)),
            close_wait(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;

        // As for `close_wait`.
        /// Time in flight after which a buffer is warned of, once; none, or 0, never warns.
        "PINPOOL_STUCK_AFTER" = Some(Duration::from_secs(30)),
            stuck_after(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;
            }
    };
}
pub(crate) use for_each_setting;

macro_rules! fields {
    ($(
        $(#[doc = $doc:literal])+
        $variable:literal = $default:expr, $name:ident($argument:ty): $type:ty as $format:expr;
    )+) => {
        /// What code or environment set; `None` where they set nothing.
        #[derive(Debug, Clone, Default)]
        pub(crate) struct Settings {
            $(pub(crate) $name: Option<$type>,)+
            /// No variable sets it.
            pub(crate) fence: Option<FenceKind>,
        }

        /// The settings that hold for a pool.
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub struct Config {
            $($(#[doc = $doc])+ pub $name: $type,)+
            #[doc(hidden)]
            pub fence: FenceKind,
        }

        impl Settings {
            /// `self`, and `other` where `self` sets nothing.
            pub(crate) fn or(self, other: Self) -> Self {
                Self { $($name: self.$name.or(other.$name),)+ fence: self.fence.or(other.fence) }
            }

            /// The values, set by code, that their variables could not have: they mean the same as there, so they are errors
            /// as well.
            fn unwritable(&self) -> Vec<Error> {
                // A source of the program's own has no name.
                let has_name = |name| name != "PINPOOL_BACKEND" || self.backend.as_ref().and_then(Backend::custom).is_none();
                let mut problems = Vec::new();
                $(
                    let (format, default): (ValueFormat<$type>, $type) = ($format, $default);
                    if let Some(value) = self.$name.as_ref().filter(|_| has_name($variable))
                        && let text = (format.show)(value)
                        && let Err(error) = (format.parse)(&text)
                    {
                        problems.push(unreadable($variable, &text, &error, &(format.show)(&default)));
                    }
                )+
                problems
            }

            /// `self`, and the default where it sets nothing.
            pub(crate) fn or_defaults(self) -> Config {
                Config { $($name: self.$name.unwrap_or($default),)+ fence: self.fence.unwrap_or_default() }
            }
        }
    };
}
for_each_setting!(fields);

impl Settings {
    /// Fills in what is implied and the defaults, and refuses what is wrong.
    pub(crate) fn resolve(self) -> Result<Config> {
        let (config, problems) = self.examine();
        problems.into_iter().next().map_or(Ok(config), Err)
    }

    /// Fills in what is implied and the defaults. With all that is wrong: values that no variable could have, contradictions,
    /// and features that this build lacks.
    pub(crate) fn examine(self) -> (Config, Vec<Error>) {
        let mut problems = self.unwritable();
        let (preset, rounding) = self.rules().unwrap_or_else(|problem| {
            problems.push(problem);
            (Preset::Adaptive, Rounding::Eighths)
        });
        let is_adaptive = preset == Preset::Adaptive;
        let implied = Settings {
            max_bytes: (!is_adaptive).then_some(Ceiling::None),
            wait: match self.on_full {
                _ if !is_adaptive => Some(Some(Duration::ZERO)),
                Some(OnFull::Pageable) => Some(Some(WAIT_BEFORE_PAGEABLE)),
                _ => None,
            },
            // A pool that keeps nothing has nothing to resize.
            auto_resize: (self.pool_size_limit == Some(0)).then_some(false),
            ..Settings::default()
        };
        let config = Settings { preset: Some(preset), rounding: Some(rounding), ..self }.or(implied).or_defaults();

        if config.pool_size_limit == 0 && config.auto_resize {
            let why = "contradicts PINPOOL_POOL_SIZE_LIMIT=0: a pool that keeps nothing cannot grow; \
                       set a limit of at least 1 or turn auto-resize off";
            problems.push(refused("PINPOOL_AUTO_RESIZE", "1", why));
        }
        let reserve = config.reserve_bytes.to_string();
        let needs_arena = "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is an allocation of its own, \
                           so there is nothing to carve it from";
        if !is_adaptive && config.reserve_bytes > 0 {
            problems.push(refused("PINPOOL_RESERVE", &*reserve, needs_arena));
        }
        if !is_adaptive && !config.growth {
            problems.push(refused("PINPOOL_GROWTH", "0", needs_arena));
        }
        if let Ceiling::Bytes(max_bytes) = config.max_bytes
            && config.reserve_bytes > max_bytes
        {
            let why = format!("is over PINPOOL_MAX_BYTES={max_bytes}: lower the one or raise the other");
            problems.push(refused("PINPOOL_RESERVE", &*reserve, why));
        }
        if is_adaptive && !config.growth && config.reserve_bytes == 0 {
            let why = "fails every request, since there is no reserve: set PINPOOL_RESERVE, or PINPOOL_GROWTH=1";
            problems.push(refused("PINPOOL_GROWTH", "0", why));
        }
        if is_adaptive && matches!(config.max_bytes, Ceiling::Bytes(bytes) if bytes < PAGE_BYTES as u64) {
            let why =
                format!("fails every request: the smallest takes {}; raise the limit", format_bytes(PAGE_BYTES as u64));
            problems.push(refused("PINPOOL_MAX_BYTES", config.max_bytes.to_string(), why));
        }
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let call_stacks = Some(config.call_stacks.to_string()).filter(|_| config.call_stacks > 0);
        for (name, value) in [
            ("PINPOOL_TRACE", path(&config.trace)),
            ("PINPOOL_CALL_STACKS", call_stacks),
            ("PINPOOL_SOCKET", path(&config.socket)),
        ] {
            if let Some(value) = value.filter(|_| !cfg!(feature = "observe")) {
                let why = "needs the feature `observe`: build pinpool with it, or leave the setting out";
                problems.push(refused(name, value, why));
            }
        }
        (config, problems)
    }

    /// Preset and rounding belong together: each rounding is that of one preset, and implies it.
    fn rules(&self) -> Result<(Preset, Rounding)> {
        let is_tensorflows = |rounding| matches!(rounding, Rounding::Exact | Rounding::Pow2);
        match (self.preset, self.rounding) {
            (None | Some(Preset::TensorFlow), Some(rounding)) if is_tensorflows(rounding) => {
                Ok((Preset::TensorFlow, rounding))
            }
            (Some(Preset::TensorFlow), None) => Ok((Preset::TensorFlow, Rounding::Pow2)),
            (None | Some(Preset::Adaptive), None | Some(Rounding::Eighths)) => {
                Ok((Preset::Adaptive, Rounding::Eighths))
            }
            (preset, rounding) => {
                let preset = preset.unwrap_or(Preset::Adaptive);
                let why =
                    format!("does not go with PINPOOL_PRESET={preset}: adaptive has eighths, tensorflow pow2 or exact");
                Err(refused("PINPOOL_ROUNDING", rounding.map_or("", Rounding::name), why))
            }
        }
    }
}

impl Config {
    /// `wait`, as a time.
    pub(crate) fn longest_wait(&self) -> Duration {
        self.wait.unwrap_or(Duration::MAX)
    }
}

/// The error of a `value` that the variable `name`, whose default is `default`, cannot have.
pub(super) fn unreadable(name: &'static str, value: &str, error: &ParseError, default: &str) -> Error {
    refused(name, value, format!("{}; correct it, or leave it out for the default {default}", error.problem()))
}

pub(super) fn refused(name: &'static str, value: impl Into<String>, why: impl Into<String>) -> Error {
    ErrorKind::Setting { name, value: value.into(), why: why.into() }.into()
}
