//! The settings: one row each, from which the fields, the variables, the builder's methods and `docs/settings.md` are made.
//!
//! A row has, in this order: the effect of the setting (at most 15 words), what its Rust values mean if the effect names values as
//! text, its variable, its default, its name, the argument of its builder method, its type, and the text format
//! of its variable.
//! To add a setting, add a row. If another setting implies or contradicts the new one, add a line in [`Settings::resolve`] or
//! [`Config::contradictions`].

use std::path::PathBuf;
use std::time::Duration;

use super::text::*;
use super::{Backend, CodeOnlySettings, HugeTlb, Limit, OnFull, Preset, Rounding, SharedLimitChoice, StatsSocket};
use crate::backend::PAGE_BYTES;
use crate::error::{Error, ErrorKind};

/// The default wait of a pool that may return pageable memory: time for a few batches.
const WAIT_BEFORE_PAGEABLE: Duration = Duration::from_millis(100);

/// Calls the macro `$consumer` with all rows.
macro_rules! for_each_setting {
    ($consumer:ident) => {
        $consumer! {
        group "Size and limits";

        /// Limit per pool: a size, none, or auto (auto pools share a quarter of memory).
        /// In code, a number of bytes (`u64`) or a [`Limit`].
        "PINPOOL_MAX_BYTES" = Limit::Auto, max_bytes(impl Into<Limit>): Limit as word();

        /// Bytes pinned at the start and kept: a size like 2GiB, or none.
        /// In code, a number of bytes; 0 reserves nothing.
        "PINPOOL_RESERVE" = 0, reserve(u64): u64 as SIZE;

        /// Maximum bytes in idle buffers and free memory: a size, or none.
        /// In code, a number of bytes, or `None` for no maximum.
        "PINPOOL_MAX_IDLE_BYTES" = None, max_idle_bytes(impl Into<Option<u64>>): Option<u64> as SIZE_OR_NONE;

        /// Limit shared by all processes that use this name: a name, auto, or none.
        /// In code, the text of the variable or a [`SharedLimitChoice`].
        "PINPOOL_LEDGER" = SharedLimitChoice::None, ledger(impl Into<SharedLimitChoice>): SharedLimitChoice as word();

        group "Waiting";

        // The wait is longer than a training step, so that a loader that is ahead of its device waits for the device. It is short
        // enough that a user does not assume a hang if the program itself holds every buffer: the request then fails. The log says
        // immediately that a request waits.
        /// How long a request waits at the limit: a time, 0, or none (forever).
        /// In code, `None` waits forever, and [`Duration::ZERO`] not at all. Under `OnFull::Pageable` the default is 100 ms, and under `tensorflow` 0.
        "PINPOOL_WAIT" = Some(Duration::from_secs(30)), wait(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;

        // The default is the same with and without a GPU, so that a loader that holds too much fails on its developer's machine.
        /// After the wait: error, or pageable (ordinary memory, up to the same limit again).
        "PINPOOL_ON_FULL" = OnFull::Error, on_full(OnFull): OnFull as word();

        /// Whether the start waits until the whole reserve is pinned.
        /// In code, with `false` the build returns after about 8 MiB, and [`Pool::wait_for_reserve`](crate::Pool::wait_for_reserve) waits for the rest.
        "PINPOOL_RESERVE_WAIT" = true, reserve_wait(bool): bool as SWITCH;

        group "Where memory comes from";

        /// Source of memory: auto, gpu, vmm, register, cuda, mlock or heap.
        "PINPOOL_BACKEND" = Backend::Auto, backend(Backend): Backend as word();

        /// GPU ordinal; if unset: the current context's, else the first active, else 0.
        "PINPOOL_DEVICE" = 0, device(u32): u32 as ORDINAL;

        /// NUMA node to pin on: a number, or auto for the GPU's node.
        /// In code, `None` means the GPU's node.
        "PINPOOL_NUMA_NODE" = None, numa_node(impl Into<Option<u32>>): Option<u32> as NODE;

        group "Lifetime";

        // In replays of 25 workloads, half or twice this time changed driver time and held memory by less than 5 %.
        /// How long free memory stays pinned: a time, or none (forever).
        /// In code, `None` means forever. Idle buffers become free memory after 10 s.
        "PINPOOL_IDLE_TIMEOUT" = Some(Duration::from_secs(60)),
            idle_timeout(impl Into<Option<Duration>>): Option<Duration> as TIME_OR_NONE;

        group "Observation";

        /// File to record to: a path (.gz compresses, %p is the process ID), or none.
        /// In code, a [`PathBuf`], or `None` for no file.
        "PINPOOL_TRACE" = None, trace(impl Into<Option<PathBuf>>): Option<PathBuf> as PATH_OR_NONE;

        /// Unix socket that serves statistics: a path, 1 (a default path), or none.
        /// In code, a [`StatsSocket`] (which converts from a path), or `None` for no socket.
        "PINPOOL_SOCKET" = None, socket(impl Into<Option<StatsSocket>>): Option<StatsSocket> as SOCKET;

        group "Policy";

        /// Policy: adaptive, or tensorflow (reproduces TensorFlow's PoolAllocator).
        "PINPOOL_PRESET" = Preset::Adaptive, preset(Preset): Preset as word();

        // The default is the initial limit of TensorFlow's pool of pinned memory.
        /// Initial limit on idle buffers; 0 keeps none and disables auto-resize.
        "PINPOOL_POOL_SIZE_LIMIT" = 100, pool_size_limit(u64): u64 as COUNT;

        /// Whether the limit on idle buffers grows with frequent evictions and misses.
        /// In code, `false` keeps the limit at its initial value.
        "PINPOOL_AUTO_RESIZE" = true, auto_resize(bool): bool as SWITCH;

        /// Size classes: eighths (adaptive), pow2 or exact (tensorflow, default pow2).
        "PINPOOL_ROUNDING" = Rounding::Eighths, rounding(Rounding): Rounding as word();

        // The default is the same as in TensorFlow (`should_log`).
        /// Logs one in this many checks of the limit on idle buffers; 1 logs all.
        "PINPOOL_LOG_EVERY" = 10, log_every(u64): u64 as AT_LEAST_ONE;

        group "Expert";

        /// Huge pages set aside by the administrator: off, auto, 2MiB or 1GiB.
        "PINPOOL_HUGETLB" = HugeTlb::Off, hugetlb(HugeTlb): HugeTlb as word();

        /// Whether the pool may pin more than its reserve (TensorFlow's allow_growth).
        /// In code, `false` means that the pool pins only its reserve.
        "PINPOOL_GROWTH" = true, growth(bool): bool as SWITCH;

        /// Whether buffers are zeroed before another user gets them.
        /// In code, `true` means that buffers are zeroed.
        "PINPOOL_ZERO" = false, zero(bool): bool as SWITCH;
            }
    };
}
pub(crate) use for_each_setting;

macro_rules! fields {
    ($(group $group:literal; $(
        #[doc = $doc:literal] $(#[doc = $in_code:literal])?
        $variable:literal = $default:expr, $name:ident($argument:ty): $type:ty as $format:expr;
    )+)+) => {
        /// The values that code or the environment sets; `None` for a setting that is not set.
        #[derive(Debug, Clone, Default)]
        pub(crate) struct Settings {
            $($(pub(crate) $name: Option<$type>,)+)+
            pub(crate) code_only: CodeOnlySettings,
            /// Warnings about retired names that code sets, each with the replacement.
            pub(crate) retired: Vec<String>,
        }

        /// The settings of a pool.
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub struct Config {
            $($(#[doc = $doc] $(#[doc = $in_code])? pub $name: $type,)+)+
            #[doc(hidden)]
            pub code_only: CodeOnlySettings,
        }

        impl Settings {
            /// Returns each setting of `self`, or of `other` if `self` does not set it.
            fn or(self, other: Self) -> Self {
                Self { $($($name: self.$name.or(other.$name),)+)+ ..self }
            }

            /// Returns each setting of `self`, or its default if `self` does not set it.
            pub(super) fn or_defaults(self) -> Config {
                Config { $($($name: self.$name.unwrap_or($default),)+)+ code_only: self.code_only }
            }
        }
    };
}
for_each_setting!(fields);

impl Settings {
    /// Returns the value of each setting: from `self`, else from `env`, else as other settings imply, else the default.
    pub(super) fn resolve(self, env: Self) -> Config {
        let set = self.or(env);
        let is_tensorflow = set.preset == Some(Preset::TensorFlow);
        let implied = Self {
            rounding: is_tensorflow.then_some(Rounding::Pow2),
            max_bytes: is_tensorflow.then_some(Limit::Unlimited),
            wait: match set.on_full {
                _ if is_tensorflow => Some(Some(Duration::ZERO)),
                Some(OnFull::Pageable) => Some(Some(WAIT_BEFORE_PAGEABLE)),
                _ => None,
            },
            // A pool that keeps nothing has nothing to resize.
            auto_resize: (set.pool_size_limit == Some(0)).then_some(false),
            ..Self::default()
        };
        set.or(implied).or_defaults()
    }
}

impl Config {
    /// Returns the errors for settings that contradict each other or need a feature that this build lacks. With such an error no
    /// pool is built.
    pub(super) fn contradictions(&self) -> Vec<Error> {
        let (is_adaptive, has_reserve) = (self.preset == Preset::Adaptive, self.reserve > 0);
        let max_bytes = self.max_bytes.bytes().unwrap_or(u64::MAX);
        let needs_arena = "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is a separate allocation, so there \
                           is nothing to carve it from";
        let needs_feature = "needs the feature `observe`: build pinpool with it, or leave the setting out";
        self.broken_rules(&[
            (
                "PINPOOL_ROUNDING",
                is_adaptive != (self.rounding == Rounding::Eighths),
                &format!("is not possible with PINPOOL_PRESET={}: adaptive has eighths, tensorflow pow2 or exact", self.preset),
            ),
            (
                "PINPOOL_AUTO_RESIZE",
                self.pool_size_limit == 0 && self.auto_resize,
                "contradicts PINPOOL_POOL_SIZE_LIMIT=0: a pool that keeps nothing cannot grow; set a limit of at least 1 or turn \
                 auto-resize off",
            ),
            ("PINPOOL_RESERVE", !is_adaptive && has_reserve, needs_arena),
            ("PINPOOL_GROWTH", !is_adaptive && !self.growth, needs_arena),
            (
                "PINPOOL_RESERVE",
                self.reserve > max_bytes,
                &format!("exceeds PINPOOL_MAX_BYTES={}: lower the reserve or raise the limit", self.max_bytes),
            ),
            (
                "PINPOOL_GROWTH",
                is_adaptive && !self.growth && !has_reserve,
                "fails every request, since there is no reserve: set PINPOOL_RESERVE, or PINPOOL_GROWTH=1",
            ),
            (
                "PINPOOL_MAX_BYTES",
                is_adaptive && max_bytes < PAGE_BYTES as u64,
                &format!("fails every request: the smallest takes {}; raise the limit", format_bytes(PAGE_BYTES as u64)),
            ),
            ("PINPOOL_TRACE", self.trace.is_some() && !cfg!(feature = "observe"), needs_feature),
            ("PINPOOL_SOCKET", self.socket.is_some() && !cfg!(feature = "observe"), needs_feature),
        ])
    }

    /// Returns warnings about settings that have no effect because of other settings.
    pub(super) fn ineffective(&self) -> Vec<String> {
        let (is_adaptive, has_reserve) = (self.preset == Preset::Adaptive, self.reserve > 0);
        let has_huge_pages = match self.backend {
            Backend::Auto | Backend::Gpu | Backend::Register => is_adaptive,
            Backend::Cuda => false,
            _ => has_reserve && self.reserve_wait,
        };
        let waits_forever = self.on_full == OnFull::Pageable && self.wait.is_none();
        let has_timeout = self.idle_timeout != Settings::default().or_defaults().idle_timeout;
        let rules = self.broken_rules(&[
            ("PINPOOL_IDLE_TIMEOUT", has_timeout && !is_adaptive, "has no effect under PINPOOL_PRESET=tensorflow"),
            (
                "PINPOOL_HUGETLB",
                self.hugetlb != HugeTlb::Off && !has_huge_pages,
                "has an effect only on register under the preset adaptive, or for a PINPOOL_RESERVE of vmm, mlock or heap that is waited for",
            ),
            ("PINPOOL_RESERVE_WAIT", !self.reserve_wait && !has_reserve, "has no effect without PINPOOL_RESERVE"),
            ("PINPOOL_ON_FULL", waits_forever, "has no effect with PINPOOL_WAIT=none, which never ends"),
        ]);
        rules.iter().map(ToString::to_string).collect()
    }

    /// Describes each broken rule as a setting's error. A rule is a variable, whether its setting is wrong, and why.
    fn broken_rules(&self, rules: &[(&'static str, bool, &str)]) -> Vec<Error> {
        let wrong = rules.iter().filter(|(_, is_wrong, _)| *is_wrong);
        wrong.map(|&(name, _, why)| setting_error(name, self.value_of(name), why)).collect()
    }

    /// Returns `wait`, or [`Duration::MAX`] if requests wait forever.
    pub(crate) fn longest_wait(&self) -> Duration {
        self.wait.unwrap_or(Duration::MAX)
    }
}

pub(super) fn setting_error(name: &'static str, value: impl Into<String>, why: impl Into<String>) -> Error {
    ErrorKind::Setting { name, value: value.into(), why: why.into() }.into()
}
