//! The device, one test at a time, the back-ends that pin for it, and streams that stand still until they are let go.

use std::ffi::c_void;
use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result};
use pinpool::backend::CudaSource;
use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder};

use crate::batch::Batch;

/// No stream stands still for longer: whoever waits for it by mistake shall fail, not hang.
const LONGEST_HOLD: Duration = Duration::from_secs(20);
/// What takes longer does not happen any more.
const PATIENCE: Duration = Duration::from_secs(20);

/// Captures, and facts about the whole device, bear no neighbours.
static TURN: Mutex<()> = Mutex::new(());

/// The first device, for one test.
pub(crate) struct Device {
    pub(crate) context: Arc<CudaContext>,
    _turn: MutexGuard<'static, ()>,
}

/// The device, or a word why the test is skipped. Asks the back-end first: cudarc panics where there is no driver.
pub(crate) fn take() -> Option<Device> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = CudaSource::new(0)
        .map_err(|error| error.to_string())
        .and_then(|_| CudaContext::new(0).map_err(|error| format!("{:?}", error.0)));
    match found {
        Ok(context) => Some(Device { context, _turn: turn }),
        Err(why) if is_required() => panic!("PINPOOL_REQUIRE_GPU=1, and there is none of use: {why}"),
        Err(why) => {
            say(format_args!("skipped: {why}"));
            None
        }
    }
}

fn is_required() -> bool {
    std::env::var("PINPOOL_REQUIRE_GPU").is_ok_and(|value| value == "1")
}

/// Past the test harness, which keeps what a passing test prints to itself.
fn say(what: impl Display) {
    let _unseen = writeln!(io::stderr(), "{what}");
}

impl Device {
    /// The scenario on each back-end that pins for the device.
    pub(crate) fn on_each(&self, scenario: impl Fn(&Rig<'_>)) {
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
            let rig = Rig { context: &self.context, backend };
            match rig.builder().build() {
                Ok(_) => scenario(&rig),
                // Not every driver and device has it.
                Err(why) if rig.virtual_memory() || !is_required() => {
                    say(format_args!("skipped on {}: {why}", rig.name()))
                }
                Err(why) => panic!("PINPOOL_REQUIRE_GPU=1, and no back-end {}: {why}", rig.name()),
            }
        }
    }
}

/// A back-end on the device.
pub(crate) struct Rig<'a> {
    pub(crate) context: &'a Arc<CudaContext>,
    pub(crate) backend: Backend,
}

impl Rig<'_> {
    pub(crate) fn name(&self) -> &'static str {
        self.backend.name()
    }

    /// Does its memory come and move by granules, without regard to copies?
    pub(crate) fn virtual_memory(&self) -> bool {
        matches!(self.backend, Backend::Vmm)
    }

    pub(crate) fn builder(&self) -> PoolBuilder {
        Pool::builder().without_env().backend(self.backend.clone())
    }

    pub(crate) fn pool(&self) -> Pool {
        self.builder().build().unwrap()
    }

    /// A stream of its own and device memory on it, with nothing left to run.
    pub(crate) fn lane(&self, number: usize, len: usize) -> Lane {
        Lane::on(&self.context.new_stream().unwrap(), format!("{}, stream {number}", self.name()), len)
    }
}

/// Device memory, used on one stream.
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

    /// Copies back past the pool, behind all work of the stream, and compares.
    pub(crate) fn check(&self, batch: Batch) {
        let arrived = self.stream.clone_dtoh(&self.memory.slice(..batch.len)).unwrap();
        batch.check(&arrived, &self.name);
    }
}

/// A buffer that holds the batch.
pub(crate) fn filled(pool: &Pool, batch: Batch) -> PinnedBuf {
    let mut buf = pool.get(batch.len).unwrap();
    batch.write(buf.as_mut_slice().unwrap());
    buf
}

/// Waits until it is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_micros(50));
    }
}

/// What is enqueued on a stream behind this stands still until it is opened, or dropped.
pub(crate) struct Hold(Arc<Door>);

#[derive(Default)]
struct Door {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    is_open: bool,
    gave_up: bool,
}

impl Hold {
    /// By a host function, which a real device has too.
    pub(crate) fn on(stream: &CudaStream) -> Self {
        extern "C" fn stand_still(door: *mut c_void) {
            // SAFETY: of the `Arc` below, which this call owns: it is made once for each launch.
            let door = unsafe { Arc::from_raw(door.cast::<Door>().cast_const()) };
            let state = door.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut state, waited) = door
                .opened
                .wait_timeout_while(state, LONGEST_HOLD, |state| !state.is_open)
                .unwrap_or_else(PoisonError::into_inner);
            state.gave_up = waited.timed_out();
        }
        let door = Arc::new(Door::default());
        stream.context().bind_to_thread().unwrap();
        let argument = Arc::into_raw(door.clone()).cast_mut().cast();
        // SAFETY: a live stream; the function calls no CUDA, and owns its argument.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), stand_still, argument) }.unwrap();
        Self(door)
    }

    /// Lets the stream go on. It must not have done so by itself.
    pub(crate) fn open(self) {
        let gave_up = self.0.state.lock().unwrap_or_else(PoisonError::into_inner).gave_up;
        assert!(!gave_up, "held for {LONGEST_HOLD:?}: a call in between waited for the stream");
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).is_open = true;
        self.0.opened.notify_all();
    }
}
