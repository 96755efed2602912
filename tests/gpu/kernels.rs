//! Kernels alongside the pool: one runs while memory is pinned, remapped and released, and one reads a buffer in place.
//!
//! The kernels are PTX, compiled by the driver. The mock driver runs no kernels: there a host function replaces the
//! first kernel, and the test of the second is skipped with a message.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, result, sys};
use pinpool::Request;

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, filled, print_uncaptured};
use crate::memory::{LIMIT, fill_granules};
use crate::until::until;
use crate::valid_stats::valid_stats;

/// `spin` runs until the word is set, at most for this many nanoseconds. `copy` copies words, one block, any threads.
const PTX: &str = r"
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 word, .param .u64 nanos)
{
    .reg .pred %p<3>;
    .reg .u32 %r<2>;
    .reg .u64 %d<6>;
    ld.param.u64 %d1, [word];
    ld.param.u64 %d2, [nanos];
    mov.u64 %d3, %globaltimer;
AGAIN:
    ld.volatile.u32 %r1, [%d1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u64 %d4, %globaltimer;
    sub.u64 %d5, %d4, %d3;
    setp.lt.u64 %p2, %d5, %d2;
    @%p2 bra AGAIN;
DONE:
    ret;
}
.visible .entry copy(.param .u64 to, .param .u64 from, .param .u64 words)
{
    .reg .pred %p<2>;
    .reg .u32 %r<4>;
    .reg .u64 %d<10>;
    ld.param.u64 %d1, [to];
    ld.param.u64 %d2, [from];
    ld.param.u64 %d3, [words];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    cvt.u64.u32 %d4, %r1;
    cvt.u64.u32 %d5, %r2;
NEXT:
    setp.ge.u64 %p1, %d4, %d3;
    @%p1 bra END;
    shl.b64 %d6, %d4, 2;
    add.u64 %d7, %d2, %d6;
    add.u64 %d8, %d1, %d6;
    ld.u32 %r3, [%d7];
    st.u32 [%d8], %r3;
    add.u64 %d4, %d4, %d5;
    bra NEXT;
END:
    ret;
}
";

/// The kernels, loaded in one context and never unloaded.
pub(crate) struct Kernels(sys::CUmodule);

impl Kernels {
    /// Loads the kernels. Prints a message and returns `None` if the driver runs no kernels.
    pub(crate) fn load(context: &Arc<CudaContext>) -> Option<Self> {
        context.bind_to_thread().unwrap();
        // SAFETY: the driver is loaded, and stays so.
        let library = unsafe { sys::culib() };
        // SAFETY: only looks up a name.
        if unsafe { library.get::<*const ()>(b"cuModuleLoadData\0") }.is_err() {
            print_uncaptured("skipped: this driver runs no kernels");
            return None;
        }
        let text = CString::new(PTX).unwrap();
        // SAFETY: PTX that ends in 0; a context is current.
        Some(Self(unsafe { result::module::load_data(text.as_ptr().cast()) }.unwrap()))
    }

    /// Launches one block of a kernel.
    fn launch(&self, name: &str, threads: u32, stream: &CudaStream, arguments: &mut [u64]) {
        stream.context().bind_to_thread().unwrap();
        // SAFETY: a module that is never unloaded.
        let kernel = unsafe { result::module::get_function(self.0, CString::new(name).unwrap()) }.unwrap();
        let mut places: Vec<*mut c_void> = arguments.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let (grid, block) = ((1, 1, 1), (threads, 1, 1));
        // SAFETY: the kernels take 64-bit numbers, as many as the callers pass; these live until the launch has read them.
        unsafe { result::launch_kernel(kernel, grid, block, 0, stream.cu_stream(), &mut places) }.unwrap();
    }
}

/// A kernel, or on the mock driver a host function, that runs until it is told to end.
enum Running {
    Kernel { word: usize, stream: Arc<CudaStream> },
    HostFunction(HeldStream),
}

impl Running {
    const LONGEST: Duration = Duration::from_secs(20);

    fn on(stream: &Arc<CudaStream>, kernels: Option<&Kernels>) -> Self {
        let Some(kernels) = kernels else { return Self::HostFunction(HeldStream::on(stream)) };
        stream.context().bind_to_thread().unwrap();
        // SAFETY: the kernel and this process share this word. It is never freed, because freeing would wait for the device.
        let word = unsafe { result::malloc_host(4096, sys::CU_MEMHOSTALLOC_PORTABLE) }.unwrap().cast::<AtomicU32>();
        // SAFETY: aligned at least for words, and not shared yet.
        unsafe { word.write(AtomicU32::new(0)) };
        let nanos = u64::try_from(Self::LONGEST.as_nanos()).unwrap();
        kernels.launch("spin", 1, stream, &mut [word.expose_provenance() as u64, nanos]);
        Self::Kernel { word: word.expose_provenance(), stream: stream.clone() }
    }

    /// Ends the kernel. Fails if the kernel has already timed out, which means that a pool call waited for it.
    fn end(self) {
        match self {
            Self::HostFunction(hold) => hold.open(),
            Self::Kernel { word, stream } => {
                // SAFETY: a live stream.
                let ended = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
                assert!(ended != sys::CUresult::CUDA_SUCCESS, "the kernel timed out: a call waited for it");
                // SAFETY: the word is never freed.
                unsafe { &*std::ptr::with_exposed_provenance::<AtomicU32>(word) }.store(1, Ordering::SeqCst);
                stream.synchronize().unwrap();
            }
        }
    }
}

#[test]
fn memory_is_pinned_moved_and_released_while_a_kernel_runs() {
    let Some(device) = device::take() else { return };
    let kernels = Kernels::load(&device.context);
    device.on_each(|rig| {
        let stream = rig.context.new_stream().unwrap();
        let pool = rig.builder().max_bytes(LIMIT).build().unwrap();
        let running = Running::on(&stream, kernels.as_ref());
        let mut bufs = fill_granules(&pool, 1);
        (0..bufs.len()).rev().step_by(2).for_each(|index| drop(bufs.swap_remove(index)));
        let wide = pool.get_with(Request::new(6 * MIB).timeout(Duration::ZERO));
        assert_eq!(wide.is_ok(), rig.virtual_memory(), "{}: {:?}", rig.name(), pool.stats());
        if rig.virtual_memory() {
            // None of these calls waits for the kernel.
            drop((bufs, wide));
            pool.clear();
            assert_eq!(pool.stats().memory.held_bytes, 0, "{}", rig.name());
            running.end();
        } else {
            // A release would wait for the kernel.
            drop((bufs, wide));
            running.end();
            pool.clear();
        }
        until("all memory is released", || {
            pool.maintain();
            pool.clear();
            pool.stats().memory.held_bytes == 0
        });
        valid_stats(&pool);
    });
}

#[test]
fn a_kernel_reads_a_buffer_in_place() {
    let Some(device) = device::take() else { return };
    let kernels = Kernels::load(&device.context);
    device.on_each(|rig| {
        let (pool, batch) = (rig.pool(), Batch::new(3, 5 * MIB));
        let lane = rig.lane(0, batch.len);
        let buf = filled(&pool, batch);
        let address = buf.device_ptr(rig.context).unwrap();
        let Some(kernels) = &kernels else { return };
        let (to, _tracking) = lane.memory.device_ptr(&lane.stream);
        kernels.launch("copy", 256, &lane.stream, &mut [to, address, (batch.len / 4) as u64]);
        buf.release_after(&lane.stream).unwrap();
        lane.check(batch);
        until("the buffer is put", || {
            pool.maintain();
            pool.stats().copies.in_flight == 0
        });
        assert_eq!(pool.stats().memory.quarantined, 0, "{}", rig.name());
    });
}
