//! Drivers that refuse what saves `vmm` time alone: calls over several granules, a granule at two addresses, calls without a
//! context. The back-end stays, with more calls.

use std::time::Duration;

use cudarc::driver::CudaContext;
use mock_driver::{Code, Cruelty, Double};
use pinpool::Backend;

use crate::child::alone;
use crate::fixture::{MIB, builder, filled, held, stream_and_memory};

/// Grows, moves granules, copies, shrinks, with a pool that `auto` made.
fn stays(switches: &[Cruelty]) {
    let double = Double::load();
    double.set_cruel(switches);
    let before = held(&double);
    let pool = builder(Backend::Auto).max_bytes(16 << 20).build().unwrap();
    assert_eq!(pool.stats().backend, "vmm", "{switches:?}");
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 6 * MIB);
    for round in 0..3 {
        let bufs: Vec<_> = (0..8).map(|byte| filled(&pool, 2 * MIB, byte)).collect();
        let kept: Vec<_> = bufs.into_iter().enumerate().filter(|(index, _)| index % 2 == 1).collect();
        // Every other granule is idle, so that this one is of granules that moved.
        let moved = filled(&pool, 6 * MIB, 100 + round);
        let copied = moved.copy_to(&stream, &mut memory).unwrap();
        copied.wait().unwrap();
        assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&byte| byte == 100 + round));
        for (index, buf) in kept {
            let byte = u8::try_from(index).unwrap();
            assert!(buf.wait_slice().unwrap().iter().all(|&found| found == byte), "{switches:?}");
        }
    }
    pool.maintain();
    pool.clear();
    assert_eq!(pool.stats().memory.held_bytes, 0, "{switches:?}");
    pool.stats().validate().unwrap();
    drop(pool);
    assert_eq!((held(&double), double.wrong_uses()), (before, Vec::new()), "{switches:?}");
}

#[test]
fn a_granule_is_mapped_at_one_address_at_a_time() {
    stays(&[Cruelty::OneMapping]);
}

#[test]
fn access_is_set_granule_by_granule() {
    stays(&[Cruelty::SingleAccess]);
}

#[test]
fn granules_are_unmapped_one_by_one() {
    stays(&[Cruelty::SingleUnmap]);
}

#[test]
fn all_of_them_together() {
    stays(&[Cruelty::OneMapping, Cruelty::SingleAccess, Cruelty::SingleUnmap]);
}

#[test]
fn what_the_driver_takes_in_one_call_is_not_asked_for_twice() {
    let double = Double::load();
    double.set_cruel(&[Cruelty::SingleAccess]);
    let pool = builder(Backend::Vmm).build().unwrap();
    let calls = double.calls("cuMemSetAccess");
    drop(filled(&pool, 8 * MIB, 1));
    assert_eq!(double.calls("cuMemSetAccess") - calls, 4, "each granule once: the trial has found it out");
}

#[test]
fn whatever_code_a_driver_gives_where_it_needs_a_context_it_gets_one() {
    alone(|| {
        let double = Double::load();
        double.set_cruel(&[Cruelty::AccessNeedsContext, Cruelty::OtherCodes]);
        let pool = builder(Backend::Auto).build().unwrap();
        assert_eq!(pool.stats().backend, "vmm");
        drop(filled(&pool, 8 * MIB, 1));
        assert_eq!(double.wrong_uses(), Vec::<String>::new());
    });
}

#[test]
fn a_granule_that_can_neither_move_nor_stay_is_given_up_and_counted() {
    let double = Double::load();
    double.set_cruel(&[Cruelty::OneMapping]);
    let before = held(&double);
    let pool = builder(Backend::Vmm).max_bytes(8 << 20).wait(Duration::ZERO).build().unwrap();
    let bufs: Vec<_> = (0..4).map(|byte| filled(&pool, 2 * MIB, byte)).collect();
    let kept: Vec<_> = bufs.into_iter().enumerate().filter(|(index, _)| index % 2 == 1).collect();
    // To the new place, and back.
    double.fail_from("cuMemMap", 2, Code::OUT_OF_MEMORY);
    assert!(pool.get(4 * MIB).is_err());
    double.reset();
    for (index, buf) in kept {
        assert!(buf.wait_slice().unwrap().iter().all(|&found| usize::from(found) == index));
    }
    pool.clear();
    pool.stats().validate().unwrap();
    drop(filled(&pool, 8 * MIB, 9));
    drop(pool);
    assert_eq!((held(&double), double.wrong_uses()), (before, Vec::new()));
}
