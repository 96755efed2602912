//! An older driver on the double: what it lacks is lacking from the first call of the process on.
#![cfg(feature = "cuda")]

use cudarc::driver::CudaContext;
use driver_double::Double;
use pinpool::{Backend, FenceKind, Pool, Preset};

#[test]
fn without_the_function_that_writes_values_events_tell_the_end_of_copies() {
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
    buf.as_mut_slice().fill(7);
    let copy = buf.copy_to(&stream, &mut memory).unwrap();
    assert!(!copy.is_done().unwrap());
    drop(gate);
    copy.wait().unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
    assert_eq!(double.calls("cuStreamWriteValue32_v2"), 0);
}
