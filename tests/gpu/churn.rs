//! Little memory for many batches: threads that fill, threads that send, one that takes memory away. Every batch is copied
//! back and compared before its place on the device is used again.
//!
//! ```text
//!   producers (no context) ─get, fill─▶ channel ─▶ copiers ─send, one way after the other─▶ streams shared by all
//!   collector (no context): trim, clear, poll           └─ copy back, compare ◀─┘       ▲
//!                                                               one after the other stands still for a moment
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result};
use pinpool::{FenceKind, PinnedBuf, Pool, PoolBuilder, Preset};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, Hold, Lane, Rig, filled, until};
use crate::memory::{CEILING, reshuffled};
use crate::ways::WAYS;

const PRODUCERS: usize = 4;
const COPIERS: usize = 4;
const ROUNDS: u64 = 2;
const BATCHES: u64 = 168;
/// On a granule of 2 MiB and off it, within one and over several.
const LENS: [usize; 7] = [4096, 100_001, MIB - 1, 2 * MIB, 2 * MIB + 5, 3 * MIB, 6 * MIB];
const LONGEST: usize = 6 * MIB;

type Job = (Batch, PinnedBuf);

#[test]
fn every_batch_arrives_whole_while_memory_comes_moves_and_goes() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for fence in [FenceKind::Event, FenceKind::Timeline, FenceKind::Auto] {
            let pool = tight(rig.builder().fence(fence));
            churn(rig, &pool);
        }
    });
}

#[test]
fn every_batch_arrives_whole_under_the_rules_of_tensorflow() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        // An arena's back-ends are refused there.
        if rig.name() == "cuda" {
            for fence in [FenceKind::Event, FenceKind::Timeline] {
                churn(rig, &tight(rig.builder().preset(Preset::Tensorflow).fence(fence)));
            }
        }
    });
}

/// Less than what the threads would like to have at once.
fn tight(builder: PoolBuilder) -> Pool {
    builder.max_bytes(CEILING).wait(Duration::from_secs(60)).build().unwrap()
}

fn churn(rig: &Rig<'_>, pool: &Pool) {
    // With cudarc's events, without them, and where it makes none for want of a second stream.
    let (untracked, single) = (CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap());
    // SAFETY: each piece of device memory is used on one stream alone.
    unsafe { untracked.disable_event_tracking() };
    let streams = [rig.context.new_stream().unwrap(), untracked.new_stream().unwrap(), single.default_stream()];
    let name = rig.name();
    for round in 0..ROUNDS {
        let before = pool.stats();
        one_round(rig, pool, &streams, round * BATCHES);
        rig.context.synchronize().unwrap();
        // All that the round pinned goes back, by the collector or now.
        until("everything is given back", || {
            pool.poll();
            pool.clear();
            pool.stats().pinned_bytes == 0
        });
        let stats = pool.stats();
        stats.validate().unwrap();
        assert_eq!((stats.in_flight, stats.in_use, stats.lost), (0, 0, 0), "{name}");
        assert!(stats.gets >= before.gets + BATCHES, "{name}: {} gets", stats.gets - before.gets);
        assert!(stats.underlying.frees > before.underlying.frees, "{name}: nothing was given back");
        if pool.config().preset == Preset::Adaptive {
            reshuffled(rig, pool);
            pool.clear();
        }
    }
    let stats = pool.stats();
    assert!(!rig.virtual_memory() || stats.moves > 0, "{name}: no granule was moved");
}

fn one_round(rig: &Rig<'_>, pool: &Pool, streams: &[Arc<CudaStream>; 3], first: u64) {
    let next = AtomicU64::new(first);
    let (sender, receiver) = sync_channel(2);
    // Gone with the last copier, so that nobody waits for those that failed.
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
        scope.spawn(|| hold_up(streams, &are_copying));
    });
}

/// Which of so many it is the turn of.
fn which(number: u64, of: usize) -> usize {
    usize::try_from(number).unwrap() % of
}

/// Gets and fills, and has no context.
fn produce(pool: &Pool, next: &AtomicU64, end: u64, jobs: &SyncSender<Job>) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= end {
            break;
        }
        let batch = Batch::new(number, LENS[which(number, LENS.len())]);
        if jobs.send((batch, filled(pool, batch))).is_err() {
            break;
        }
    }
    assert_eq!(result::ctx::get_current(), Ok(None), "a get left a context behind");
}

/// Takes memory away, and has no context.
fn collect(pool: &Pool, are_copying: &Weak<Mutex<Receiver<Job>>>) {
    for turn in 0_u64.. {
        if are_copying.strong_count() == 0 {
            break;
        }
        match turn % 4 {
            0 => pool.trim(CEILING / 2),
            1 => pool.poll(),
            2 => pool.trim(0),
            _ => pool.clear(),
        }
        thread::sleep(Duration::from_micros(500));
    }
    assert_eq!(result::ctx::get_current(), Ok(None), "a trim left a context behind");
}

/// Makes copies pile up on streams, so that much is in flight whenever somebody wants memory.
fn hold_up(streams: &[Arc<CudaStream>; 3], are_copying: &Weak<Mutex<Receiver<Job>>>) {
    for stream in streams.iter().cycle() {
        if are_copying.strong_count() == 0 {
            break;
        }
        let hold = Hold::on(stream);
        thread::sleep(Duration::from_millis(1));
        hold.open();
        thread::sleep(Duration::from_millis(2));
    }
}

/// Two places on each stream, used in turn.
fn copy(rig: &Rig<'_>, pool: &Pool, streams: &[Arc<CudaStream>; 3], jobs: &Mutex<Receiver<Job>>) {
    let lane = |number: usize| {
        let name = format!("{}, fence {}, stream {}", rig.name(), pool.config().fence, number % streams.len());
        Lane::on(&streams[number % streams.len()], name, LONGEST)
    };
    let mut lanes: Vec<(Lane, Option<Batch>)> = (0..2 * streams.len()).map(|number| (lane(number), None)).collect();
    for turn in 0.. {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((batch, buf)) = job else { break };
        let at = turn % lanes.len();
        let mut buf = Some(buf);
        // One way more than there are: borrowed by copies on two streams.
        let way = WAYS.get(which(batch.number, WAYS.len() + 1));
        for at in [at, (at + 1) % lanes.len()].into_iter().take(if way.is_some() { 1 } else { 2 }) {
            let (lane, sent) = &mut lanes[at];
            if let Some(before) = sent.replace(batch) {
                compare(pool, lane, before);
            }
            match (way, &mut buf) {
                (Some((_, send)), buf) => send(buf.take().unwrap(), lane),
                (None, Some(buf)) => drop(buf.copy_range_to(0..batch.len, &lane.stream, &mut lane.memory).unwrap()),
                (None, None) => unreachable!("borrowed, not taken"),
            }
        }
    }
    for (lane, sent) in &lanes {
        sent.iter().for_each(|&batch| compare(pool, lane, batch));
    }
}

/// Copies back, through the pool if it has room at once, and compares.
fn compare(pool: &Pool, lane: &Lane, batch: Batch) {
    let whole = match pool.get_timeout(batch.len, Duration::ZERO) {
        Ok(buf) if which(batch.number / 5, 2) == 0 => {
            buf.copy_from(&lane.stream, &lane.memory).unwrap().wait().unwrap()
        }
        Ok(mut buf) => {
            lane.stream.memcpy_dtoh(&lane.memory.slice(..batch.len), &mut buf).unwrap();
            buf
        }
        Err(full) => {
            assert!(full.is_limit(), "{full}");
            return lane.check(batch);
        }
    };
    batch.check(whole.as_slice_untracked().unwrap(), &lane.name);
}
