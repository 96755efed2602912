//! One run: a setup and a list of steps, which can be stored in a text file.
//!
//! A step refers to buffers, streams and pools by a number modulo their count, so any list of steps can be run, and any part
//! of one too.

use std::fmt;
use std::str::FromStr;

/// A run. The same scenario always has the same trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scenario {
    pub(crate) setup: Setup,
    pub(crate) steps: Vec<Step>,
}

macro_rules! setup {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The pool and its environment. All values are numbers: switches are 0 or 1.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub(crate) struct Setup { $($(#[doc = $doc])+ pub(crate) $name: u64,)+ }

        impl fmt::Display for Setup {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("setup")?;
                $(write!(f, " {}={}", stringify!($name), self.$name)?;)+
                Ok(())
            }
        }

        impl Setup {
            fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
                match name {
                    $(stringify!($name) => self.$name = value,)+
                    _ => return Err(format!("no setup is called `{name}`")),
                }
                Ok(())
            }
        }
    };
}
setup! {
    /// Preset `tensorflow`.
    tensorflow,
    /// TensorFlow's pool without rounding.
    exact,
    /// The source has separate regions only.
    separate,
    /// A release waits for all copies of the device, as with `cuda`.
    blocks_on_release,
    /// The source holds one more page per region, as `cuda` does.
    extra_page,
    /// Limit; 0 is none.
    max_bytes,
    /// Most idle buffers.
    limit,
    /// Smallest granule of the source.
    granule_bytes,
    /// `PINPOOL_RESERVE`.
    reserve_bytes,
    /// `PINPOOL_ON_FULL=pageable`.
    pageable,
    /// `PINPOOL_IDLE_TIMEOUT` in seconds; 0 is none.
    idle_seconds,
    /// At the end, held buffers are returned until every waiting request is served.
    serve_all,
    /// At the end, the copies complete before the pools are dropped.
    finish_first,
    /// At the end, the pools are dropped before the buffers.
    pools_first,
    /// Faults remain at the end.
    stay_faulty,
    /// `PINPOOL_RESERVE_WAIT=0`: each `maintain` pins one step of the pending reserves.
    background,
    /// The device reports copies as complete too early, a fault that no pool survives.
    lying_device,
}

/// A kind of calls, for faults and for steps that happen during one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Acquire = 0,
    Release = 1,
    Remap = 2,
}

impl Call {
    pub(crate) const ALL: [Self; 3] = [Self::Acquire, Self::Release, Self::Remap];

    fn name(self) -> &'static str {
        ["acquire", "release", "remap"][self as usize]
    }
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) op: Op,
    pub(crate) args: [u64; 3],
    /// Runs the step inside the next source call of this kind, as another thread would; if `None`, immediately.
    pub(crate) during: Option<Call>,
}

macro_rules! ops {
    ($($(#[doc = $doc:literal])* $op:ident = $name:literal ($($arg:ident)*),)+) => {
        /// What a step does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Op { $($(#[doc = $doc])* $op,)+ }

        const OPS: &[(Op, &str, &[&str])] = &[$((Op::$op, $name, &[$(stringify!($arg)),*]),)+];
    };
}
ops! {
    /// Requests a buffer and fills it. Alignment 0 is page alignment.
    Get = "get" (pool len align),
    /// Requests a buffer as `get` does, but only from the idle buffers.
    TryGet = "try_get" (pool len),
    /// Begins a request that joins the wait queue if there is no room; a late one leaves the queue at its first poll.
    GetAsync = "get_async" (pool len is_late),
    /// Polls a waiting request.
    PollGet = "poll_get" (which),
    /// Cancels a waiting request.
    CancelGet = "cancel_get" (which),
    /// Drops a held buffer.
    Put = "put" (which),
    /// Waits for the copies of a held buffer and fills it again.
    Rewrite = "rewrite" (which),
    /// Copies a held buffer and gives it up.
    CopyTo = "copy_to" (which stream),
    /// Copies a held buffer and keeps it.
    CopyRange = "copy_range" (which stream),
    /// Copies into a held buffer.
    CopyFrom = "copy_from" (which stream),
    /// Waits for a copy into a buffer.
    Await = "await" (which),
    /// Drops a buffer while a copy writes to it.
    DropPending = "drop_pending" (which),
    /// Gives a buffer up after all work of a stream.
    ReleaseAfter = "release_after" (which stream),
    /// Completes the oldest copies of a stream.
    Finish = "finish" (stream count),
    /// Advances the clock.
    Advance = "advance" (micros),
    /// Maintains a pool.
    Poll = "poll" (pool),
    Trim = "trim" (pool to_bytes),
    Clear = "clear" (pool),
    Reserve = "reserve" (pool bytes),
    Partition = "partition" (max_bytes),
    /// Changes the limit of the first pool.
    SetMaxBytes = "set_max_bytes" (max_bytes),
    /// Drops the handle of a pool.
    DropPool = "drop_pool" (pool),
    /// Makes `count` calls of a kind fail after `skip` more calls.
    FailCalls = "fail_calls" (kind skip count),
    /// Makes remaps fail as `fail_calls` does; their granules are lost.
    LoseRemaps = "lose_remaps" (skip count),
    /// Limits the memory that the source has.
    LimitHost = "limit_host" (bytes),
    /// Makes all pending copies of a stream fail, and replaces the stream.
    FailStream = "fail_stream" (stream),
    /// Makes the next query of a fence of the stream fail.
    FailQuery = "fail_query" (stream),
    /// Makes the stream refuse the next copy.
    RefuseCopy = "refuse_copy" (stream),
    /// Makes the next copy fail such that it is unknown whether it was enqueued.
    UnknownCopy = "unknown_copy" (stream),
    /// Ends all faults of the source.
    Heal = "heal" (),
}

impl Step {
    pub(crate) fn new(op: Op, args: &[u64]) -> Self {
        let mut all = [0; 3];
        all[..args.len()].copy_from_slice(args);
        Self { op, args: all, during: None }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name, args) = OPS.iter().find(|(op, ..)| *op == self.op).unwrap();
        f.write_str(name)?;
        args.iter().zip(self.args).try_for_each(|(arg, value)| write!(f, " {arg}={value}"))?;
        self.during.map_or(Ok(()), |call| write!(f, " during={}", call.name()))
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.setup)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let known = OPS.iter().find(|(_, other, _)| *other == name);
        let (op, _, args) = known.ok_or_else(|| format!("no step is called `{name}`"))?;
        let mut step = Self::new(*op, &[]);
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is no key=value"))?;
            if key == "during" {
                let call = Call::ALL.into_iter().find(|call| call.name() == value);
                step.during = Some(call.ok_or_else(|| format!("no call is called `{value}`"))?);
                continue;
            }
            let at = args.iter().position(|arg| *arg == key).ok_or_else(|| format!("{name} has no `{key}`"))?;
            step.args[at] = value.parse().map_err(|error| format!("{word}: {error}"))?;
        }
        Ok(step)
    }
}

/// Skips empty lines and lines that begin with `#`.
impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut setup = Setup::default();
        let first = lines.next().and_then(|line| line.strip_prefix("setup")).ok_or("the first line is no setup")?;
        for word in first.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is no key=value"))?;
            setup.set(key, value.parse().map_err(|error| format!("{word}: {error}"))?)?;
        }
        Ok(Self { setup, steps: lines.map(str::parse).collect::<Result<_, _>>()? })
    }
}
