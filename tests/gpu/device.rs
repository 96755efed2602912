//! The device, one test at a time, the backends that pin for it, and streams that can be held.

use std::env;
use std::ffi::c_void;
use std::fmt::Display;
use std::io::{self, Write};
use std::panic::{self, AssertUnwindSafe};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result};
use pinpool::unstable::backend::CudaSource;
use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder};

use crate::batch::Batch;
use crate::until::until;

/// Longest hold of a stream: a test that waits for it by mistake fails instead of hanging.
const LONGEST_HOLD: Duration = Duration::from_secs(20);
/// A process that takes longer is killed, and its test fails.
const LONGEST_PROCESS: Duration = Duration::from_secs(40);

/// Held by one test at a time: captures, and facts about the whole device, need the device alone.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// The first device, for one test.
pub(crate) struct Device {
    pub(crate) context: Arc<CudaContext>,
    _turn: MutexGuard<'static, ()>,
}

/// The device; without one, prints why the test is skipped. Tries the backend first: cudarc panics without a driver.
pub(crate) fn take() -> Option<Device> {
    let turn = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = CudaSource::new(0)
        .map_err(|error| error.to_string())
        .and_then(|_| CudaContext::new(0).map_err(|error| format!("{:?}", error.0)));
    match found {
        Ok(context) => Some(Device { context, _turn: turn }),
        Err(why) if is_required() => panic!("PINPOOL_REQUIRE_GPU=1, and no usable GPU: {why}"),
        Err(why) => {
            print_uncaptured(format_args!("skipped: {why}"));
            None
        }
    }
}

fn is_required() -> bool {
    env::var("PINPOOL_REQUIRE_GPU").is_ok_and(|value| value == "1")
}

/// Prints past the test harness, which captures the output of a passing test.
pub(crate) fn print_uncaptured(line: impl Display) {
    let _unseen = writeln!(io::stderr(), "{line}");
}

impl Device {
    /// Runs the scenario on each backend that pins for the device. A failure does not stop the other backends: this panics at
    /// the end and names all backends that failed.
    pub(crate) fn on_each(&self, scenario: impl Fn(&Rig<'_>)) {
        let mut failed = Vec::new();
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
            let rig = Rig { context: &self.context, backend };
            // `PINPOOL_GPU_BACKENDS` names the backends to test, by default all.
            if !lists("PINPOOL_GPU_BACKENDS", rig.name()).unwrap_or(true) {
                continue;
            }
            match rig.builder().build() {
                Ok(_) => {
                    if panic::catch_unwind(AssertUnwindSafe(|| scenario(&rig))).is_err() {
                        failed.push(rig.name());
                    }
                }
                // `PINPOOL_GPU_EXCEPT` names backends that this machine need not have.
                Err(why) if is_required() && lists("PINPOOL_GPU_EXCEPT", rig.name()) != Some(true) => {
                    print_uncaptured(format_args!("PINPOOL_REQUIRE_GPU=1, and no backend {}: {why}", rig.name()));
                    failed.push(rig.name());
                }
                Err(why) => print_uncaptured(format_args!("skipped on {}: {why}", rig.name())),
            }
        }
        assert!(failed.is_empty(), "failed on {failed:?}; what failed is above");
    }
}

/// Whether a list of names in the environment has this one; `None` if it is not set.
fn lists(variable: &str, name: &str) -> Option<bool> {
    env::var(variable).ok().map(|list| list.split(',').any(|listed| listed.trim() == name))
}

/// A backend on the device.
pub(crate) struct Rig<'a> {
    pub(crate) context: &'a Arc<CudaContext>,
    pub(crate) backend: Backend,
}

impl Rig<'_> {
    pub(crate) fn name(&self) -> &'static str {
        self.backend.name()
    }

    /// Whether its memory is committed, remapped and released by granules, alongside copies.
    pub(crate) fn virtual_memory(&self) -> bool {
        matches!(self.backend, Backend::Vmm)
    }

    pub(crate) fn builder(&self) -> PoolBuilder {
        Pool::builder().without_env().backend(self.backend.clone())
    }

    pub(crate) fn pool(&self) -> Pool {
        self.builder().build().unwrap()
    }

    /// A new stream and device memory on it, with no work left to run.
    pub(crate) fn lane(&self, number: usize, len: usize) -> Lane {
        Lane::on(&self.context.new_stream().unwrap(), format!("{}, stream {number}", self.name()), len)
    }
}

/// Device memory that is used on one stream.
pub(crate) struct Lane {
    pub(crate) name: String,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) memory: CudaSlice<u8>,
}

impl Lane {
    pub(crate) fn on(stream: &Arc<CudaStream>, name: String, len: usize) -> Self {
        let memory = stream.alloc_zeros(len).unwrap();
        stream.synchronize().unwrap();
        Self { name, stream: stream.clone(), memory }
    }

    /// Copies back without the pool, after all work of the stream, and compares.
    pub(crate) fn check(&self, batch: Batch) {
        batch.check(&self.stream.clone_dtoh(&self.memory.slice(..batch.len)).unwrap(), &self.name);
    }
}

/// A buffer that holds the batch.
pub(crate) fn filled(pool: &Pool, batch: Batch) -> PinnedBuf {
    let mut buf = pool.get(batch.len).unwrap();
    batch.write(buf.wait_slice_mut().unwrap());
    buf
}

/// Runs an ignored test in a separate process, with this variable, and returns how it ended.
pub(crate) fn in_a_process(test: &str, (variable, value): (&str, &str)) -> &'static str {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(variable, value).stdin(Stdio::null());
    let (mut child, begun) = (command.spawn().unwrap(), Instant::now());
    loop {
        match child.try_wait().unwrap() {
            Some(status) if status.success() => return "holds",
            Some(status) if status.code().is_some() => return "does not hold",
            Some(_) => return "ended by a signal",
            None if begun.elapsed() > LONGEST_PROCESS => {
                child.kill().unwrap();
                child.wait().unwrap();
                return "hangs";
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Waits until no copy is in flight.
pub(crate) fn wait_until_put(pool: &Pool) {
    until("every buffer is put", || {
        pool.maintain();
        pool.stats().copies.in_flight == 0
    });
}

/// Holds all later work of a stream until it is opened or dropped.
pub(crate) struct HeldStream(Sender<()>);

impl HeldStream {
    /// Holds it by a host function, which real devices support too.
    pub(crate) fn on(stream: &CudaStream) -> Self {
        extern "C" fn wait_until_opened(opened: *mut c_void) {
            // SAFETY: from the `Box` below, which this call owns: it is made once for each launch.
            let opened = unsafe { Box::from_raw(opened.cast::<Receiver<()>>()) };
            let _timed_out = opened.recv_timeout(LONGEST_HOLD);
        }
        let (open, opened) = channel();
        stream.context().bind_to_thread().unwrap();
        let argument = Box::into_raw(Box::new(opened)).cast();
        // SAFETY: a live stream; the function calls no CUDA, and owns its argument.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), wait_until_opened, argument) }.unwrap();
        Self(open)
    }

    /// Lets the stream continue. Fails if the hold has timed out before.
    pub(crate) fn open(self) {
        assert!(self.0.send(()).is_ok(), "held for {LONGEST_HOLD:?}: a call meanwhile waited for the stream");
    }
}
