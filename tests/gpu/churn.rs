//! Many batches under a low limit: threads that fill, threads that copy, one that releases memory. Every batch is copied
//! back and compared before its device memory is used again.
//!
//! ```text
//!   producers (no context) ─get, fill─▶ channel ─▶ copiers ─each method of copying in turn─▶ shared streams
//!   collector (no context): trim, clear, poll           └─ copy back, compare ◀─┘       ▲
//!                                                               each is held for a moment in turn
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result};
use pinpool::{FenceKind, PinnedBuf, Pool, PoolBuilder, Preset, Request};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, Lane, Rig, filled, wait_until};
use crate::memory::{LIMIT, check_remap_beside_copies};
use crate::methods::METHODS;
use crate::valid_stats::valid_stats;

const PRODUCERS: usize = 4;
const COPIERS: usize = 4;
const ROUNDS: u64 = 2;
const BATCHES: u64 = 168;
/// On and off the edges of granules of 2 MiB, within one and across several.
const LENS: [usize; 7] = [4096, 100_001, MIB - 1, 2 * MIB, 2 * MIB + 5, 3 * MIB, 6 * MIB];
const LONGEST: usize = 6 * MIB;

type Job = (Batch, PinnedBuf);

#[test]
fn every_batch_arrives_intact_while_memory_is_committed_remapped_and_released() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for fence in [FenceKind::Event, FenceKind::Timeline] {
            let pool = with_a_low_limit(rig.builder().unstable_fence(fence));
            churn(rig, &pool);
        }
    });
}

#[test]
fn every_batch_arrives_intact_under_tensorflows_rules() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        // The tensorflow preset refuses backends that need the arena.
        if rig.name() == "cuda" {
            for fence in [FenceKind::Event, FenceKind::Timeline] {
                churn(rig, &with_a_low_limit(rig.builder().preset(Preset::TensorFlow).unstable_fence(fence)));
            }
        }
    });
}

/// A limit below what the threads could hold at once.
fn with_a_low_limit(builder: PoolBuilder) -> Pool {
    builder.max_bytes(LIMIT).wait(Duration::from_secs(60)).build().unwrap()
}

fn churn(rig: &Rig<'_>, pool: &Pool) {
    // With cudarc's events, without them, and on a context with one stream, where cudarc makes none.
    let (untracked, single) = (CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap());
    // SAFETY: each block of device memory is used on one stream.
    unsafe { untracked.disable_event_tracking() };
    let streams = [rig.context.new_stream().unwrap(), untracked.new_stream().unwrap(), single.default_stream()];
    let name = rig.name();
    for round in 0..ROUNDS {
        let before = pool.stats();
        one_round(rig, pool, &streams, round * BATCHES);
        rig.context.synchronize().unwrap();
        // All memory that the round pinned is released, by the collector or here.
        wait_until("all memory is released", || {
            pool.maintain();
            pool.clear();
            pool.stats().memory.held_bytes == 0
        });
        let stats = valid_stats(&pool);
        assert_eq!((stats.copies.in_flight, stats.memory.in_use, stats.memory.quarantined), (0, 0, 0), "{name}");
        assert!(
            stats.requests.served >= before.requests.served + BATCHES,
            "{name}: {} gets",
            stats.requests.served - before.requests.served
        );
        assert!(stats.memory.unpin.count > before.memory.unpin.count, "{name}: no memory was released");
        if pool.config().preset == Preset::Adaptive {
            check_remap_beside_copies(rig, pool);
            pool.clear();
        }
    }
    let stats = pool.stats();
    assert!(!rig.virtual_memory() || stats.memory.remap.count > 0, "{name}: no granule was remapped");
}

fn one_round(rig: &Rig<'_>, pool: &Pool, streams: &[Arc<CudaStream>; 3], first: u64) {
    let next = AtomicU64::new(first);
    let (sender, receiver) = sync_channel(2);
    // Dropped with the last copier, so that no thread waits for one that failed.
    let jobs = Arc::new(Mutex::new(receiver));
    let are_copying = Arc::downgrade(&jobs);
    thread::scope(|scope| {
        for _ in 0..PRODUCERS {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || produce(pool, next, first + BATCHES, &sender));
        }
        drop(sender);
        for _ in 0..COPIERS {
            let jobs = jobs.clone();
            scope.spawn(move || copy(rig, pool, streams, &jobs));
        }
        drop(jobs);
        scope.spawn(|| collect(pool, &are_copying));
        scope.spawn(|| hold_streams(streams, &are_copying));
    });
}

/// The index of `number` among `of` that take turns.
fn turn_of(number: u64, of: usize) -> usize {
    usize::try_from(number).unwrap() % of
}

/// Requests and fills buffers; has no context.
fn produce(pool: &Pool, next: &AtomicU64, end: u64, jobs: &SyncSender<Job>) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= end {
            break;
        }
        let batch = Batch::new(number, LENS[turn_of(number, LENS.len())]);
        if jobs.send((batch, filled(pool, batch))).is_err() {
            break;
        }
    }
    assert_eq!(result::ctx::get_current(), Ok(None), "a request left a context behind");
}

/// Releases memory; has no context.
fn collect(pool: &Pool, are_copying: &Weak<Mutex<Receiver<Job>>>) {
    for turn in 0_u64.. {
        if are_copying.strong_count() == 0 {
            break;
        }
        match turn % 4 {
            0 => pool.trim(LIMIT / 2),
            1 => pool.maintain(),
            2 => pool.trim(0),
            _ => pool.clear(),
        }
        thread::sleep(Duration::from_micros(500));
    }
    assert_eq!(result::ctx::get_current(), Ok(None), "a trim left a context behind");
}

/// Holds each stream for a moment, so that many copies are in flight when a request needs memory.
fn hold_streams(streams: &[Arc<CudaStream>; 3], are_copying: &Weak<Mutex<Receiver<Job>>>) {
    for stream in streams.iter().cycle() {
        if are_copying.strong_count() == 0 {
            break;
        }
        let hold = HeldStream::on(stream);
        thread::sleep(Duration::from_millis(1));
        hold.open();
        thread::sleep(Duration::from_millis(2));
    }
}

/// Two lanes on each stream, used in turn.
fn copy(rig: &Rig<'_>, pool: &Pool, streams: &[Arc<CudaStream>; 3], jobs: &Mutex<Receiver<Job>>) {
    let lane = |number: usize| {
        let name = format!("{}, fence {:?}, stream {}", rig.name(), pool.config().code.fence, number % streams.len());
        Lane::on(&streams[number % streams.len()], name, LONGEST)
    };
    let mut lanes: Vec<(Lane, Option<Batch>)> = (0..2 * streams.len()).map(|number| (lane(number), None)).collect();
    for turn in 0.. {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((batch, buf)) = job else { break };
        let at = turn % lanes.len();
        let mut buf = Some(buf);
        // One more than the methods: borrowed by copies on two streams.
        let method = METHODS.get(turn_of(batch.number, METHODS.len() + 1));
        for at in [at, (at + 1) % lanes.len()].into_iter().take(if method.is_some() { 1 } else { 2 }) {
            let (lane, sent) = &mut lanes[at];
            if let Some(before) = sent.replace(batch) {
                compare(pool, lane, before);
            }
            match (method, &mut buf) {
                (Some((_, copy)), buf) => copy(buf.take().unwrap(), lane),
                (None, Some(buf)) => drop(buf.copy_range_to(0..batch.len, &lane.stream, &mut lane.memory).unwrap()),
                (None, None) => unreachable!("borrowed, not taken"),
            }
        }
    }
    for (lane, sent) in &lanes {
        sent.iter().for_each(|&batch| compare(pool, lane, batch));
    }
}

/// Copies back, through the pool if a request succeeds at once, and compares.
fn compare(pool: &Pool, lane: &Lane, batch: Batch) {
    let whole = match pool.get_with(Request::new(batch.len).wait(Duration::ZERO)) {
        Ok(buf) if turn_of(batch.number / 5, 2) == 0 => {
            buf.copy_from(&lane.stream, &lane.memory).unwrap().wait().unwrap()
        }
        Ok(mut buf) => {
            lane.stream.memcpy_dtoh(&lane.memory.slice(..batch.len), &mut buf).unwrap();
            buf
        }
        Err(error) => {
            assert!(error.is_limit(), "{error}");
            return lane.check(batch);
        }
    };
    batch.check(whole.wait_slice().unwrap(), &lane.name);
}
