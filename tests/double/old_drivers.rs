//! Older drivers on the double: what they lack is lacking from the first call of the process on, so each has a process.

use cudarc::driver::CudaContext;
use driver_double::Double;
use pinpool::{Backend, FenceKind, Pool, Preset};

use crate::child::alone;

#[test]
fn without_ids_of_streams_events_tell_the_end_of_copies_and_every_other_copy_is_waited_for() {
    alone(|| {
        let double = Double::load();
        assert!(double.hide("cuStreamGetId") && double.hide("cuEventElapsedTime_v2"));
        let context = CudaContext::new(0).unwrap();
        let pool = Pool::builder()
            .without_env()
            .preset(Preset::Tensorflow)
            .backend(Backend::Cuda)
            .fence(FenceKind::Timeline)
            .build()
            .unwrap();
        let stream = context.new_stream().unwrap();
        let mut memory = stream.alloc_zeros::<u8>(4096).unwrap();
        let filled = |byte| {
            let mut buf = pool.get(4096).unwrap();
            buf.as_mut_slice().unwrap().fill(byte);
            buf
        };
        let gate = double.hold(stream.cu_stream());
        let copy = filled(7).copy_to(&stream, &mut memory).unwrap();
        assert!(!copy.is_done().unwrap());
        drop(gate);
        copy.wait().unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
        assert_eq!(double.calls("cuStreamWriteValue32_v2"), 0);

        // A copy into the buffer and one from it, on a stream that nobody can tell from another with its handle.
        let (mut buf, waits) = (filled(0), double.calls("cuEventSynchronize"));
        stream.memcpy_dtoh(&memory, &mut buf).unwrap();
        stream.memcpy_htod(&buf, &mut memory).unwrap();
        assert_eq!(double.calls("cuEventSynchronize"), waits + 1);
        drop(buf);
        stream.synchronize().unwrap();
        pool.poll();
        assert_eq!((pool.stats().in_flight, pool.stats().lost), (0, 0));
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
    });
}

#[test]
fn without_the_function_that_writes_values_events_tell_the_end_of_copies() {
    alone(|| {
        let double = Double::load();
        assert!(double.hide("cuStreamWriteValue32_v2"));
        let context = CudaContext::new(0).unwrap();
        let pool = Pool::builder()
            .without_env()
            .preset(Preset::Tensorflow)
            .backend(Backend::Cuda)
            .fence(FenceKind::Timeline)
            .build()
            .unwrap();
        let stream = context.new_stream().unwrap();
        let mut memory = stream.alloc_zeros::<u8>(4096).unwrap();
        let gate = double.hold(stream.cu_stream());
        let mut buf = pool.get(4096).unwrap();
        buf.as_mut_slice().unwrap().fill(7);
        let copy = buf.copy_to(&stream, &mut memory).unwrap();
        assert!(!copy.is_done().unwrap());
        drop(gate);
        copy.wait().unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
        assert_eq!(double.calls("cuStreamWriteValue32_v2"), 0);
    });
}
