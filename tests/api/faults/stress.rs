//! All operations at once from many threads, and balanced statistics afterwards.
//!
//! Threads request and return buffers of several classes, pass them to each other, and copy them to a simulated device. They
//! also clear, trim and maintain the pool, and read its statistics. The limit is lower than the bytes that they could hold.
//! Under `adaptive`, half of the threads use a partition. `STRESS_STEPS` is the number of steps per thread (default 6,000).

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pinpool::{OnFull, PinnedBuf, Pool, Preset};
use pinpool_testing::{SinkMemory, SinkStream};

use crate::draw::{Draw, number_from};
use crate::fixture::{Requests, heap};
use crate::valid_stats::{stats_when, valid_stats};

const THREADS: u64 = if cfg!(miri) { 2 } else { 6 };
/// Maximum number of buffers that one thread holds.
const HELD: usize = 6;

/// Writes this thread's mark to both ends of the buffer and checks that no other thread overwrites it.
fn use_alone(buffer: &mut PinnedBuf, mark: u64) {
    let len = buffer.len();
    let bytes = buffer.wait_slice_mut().unwrap();
    bytes[..8].copy_from_slice(&mark.to_le_bytes());
    bytes[len - 8..].copy_from_slice(&mark.to_le_bytes());
    thread::yield_now();
    assert_eq!(bytes[..8], mark.to_le_bytes(), "two threads have one buffer");
    assert_eq!(bytes[len - 8..], mark.to_le_bytes(), "two threads have one buffer");
}

fn len_of(size: u64) -> usize {
    usize::try_from([100, 5000, 60_000, 300_000][usize::try_from(size).unwrap()]).unwrap()
}

/// Returns the number of successful requests.
fn work(
    pool: &Pool,
    requests: &impl Requests,
    thread: u64,
    (to, from): (&mpsc::Sender<PinnedBuf>, &mpsc::Receiver<PinnedBuf>),
) -> u64 {
    let mut draw = Draw::of(thread);
    let stream = SinkStream::new().unwrap();
    let mut device = SinkMemory::new(300_000);
    let (mut held, mut served, mut sent) = (Vec::new(), 0, Vec::new());
    for step in 0..number_from("STRESS_STEPS", if cfg!(miri) { 40 } else { 6_000 }) {
        match draw.below(64) {
            0..32 if held.len() < HELD => match requests.get(len_of(draw.below(4))) {
                Ok(mut buffer) => {
                    use_alone(&mut buffer, thread << 32 | step);
                    served += 1;
                    held.push(buffer);
                }
                Err(error) => assert!(error.is_limit(), "{error}"),
            },
            32..36 => {
                let got = requests.try_get(len_of(draw.below(4))).unwrap();
                served += u64::from(got.is_some());
                held.extend(got);
            }
            36..44 => to.send(held.pop().unwrap_or_else(|| pool.get(0).unwrap())).unwrap(),
            44..52 => drop(from.try_recv()),
            kind @ 52..54 if !held.is_empty() => {
                assert!(device.read()[..sent.len()] == sent, "a copy read what a later user wrote");
                let mut buffer = held.swap_remove(0);
                sent = buffer.wait_slice().unwrap()[..if kind == 52 { buffer.len() } else { 50 }].to_vec();
                if kind == 52 {
                    buffer.copy_to(&stream, &mut device).unwrap();
                } else {
                    buffer.copy_range_to(0..50, &stream, &mut device).unwrap();
                    held.push(buffer);
                }
            }
            54 if step % 16 == 0 => pool.clear(),
            55 if step % 16 == 0 => pool.trim(1 << 20),
            56 => pool.maintain(),
            57 => drop(pool.stats()),
            _ => drop(held.pop()),
        }
    }
    stream.synchronize().unwrap();
    served
}

fn stress(preset: Preset) {
    let builder = heap().preset(preset).on_full(OnFull::Error);
    // Less than the threads could hold, so that requests wait, idle buffers are reclaimed and some requests fail.
    let max_bytes = THREADS * 500_000;
    let pool = builder.max_bytes(max_bytes).pool_size_limit(10).wait(Duration::from_millis(1)).build().unwrap();
    let part = (preset == Preset::Adaptive).then(|| pool.open_partition("other", max_bytes / 2).unwrap());
    let (to, from): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel()).unzip();
    let served: Vec<u64> = thread::scope(|scope| {
        let mut running = Vec::new();
        for (thread, from) in (0..THREADS).zip(from) {
            let (pool, part) = (&pool, part.as_ref().filter(|_| thread % 2 == 1));
            let to = to[usize::try_from((thread + 1) % THREADS).unwrap()].clone();
            running.push(scope.spawn(move || {
                let served = match part {
                    Some(part) => work(pool, part, thread, (&to, &from)),
                    None => work(pool, pool, thread, (&to, &from)),
                };
                (served, from)
            }));
        }
        drop(to);
        // Receivers live until all threads have ended; the buffers sent last are dropped by this thread.
        let ended: Vec<_> = running.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(served, _from)| served).collect()
    });
    pool.maintain();
    // The maintenance thread may have found copies complete without having returned their buffers yet.
    let stats = stats_when(&pool, |stats| stats.memory.in_use + stats.copies.in_flight == 0);
    // The pool's requests include the partition's requests.
    let all: u64 = served.iter().sum();
    assert_eq!((stats.requests.served, stats.requests.returned, stats.memory.quarantined), (all, all, 0), "{stats:?}");
    assert_eq!((stats.copies.in_flight, stats.memory.in_use_bytes), (0, 0));
    if let Some(part) = part {
        let stats = part.stats();
        let served: u64 = served.iter().skip(1).step_by(2).sum();
        assert_eq!((stats.requests.served, stats.memory.in_use_bytes), (served, 0), "{stats:?}");
    }
    pool.clear();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.held_bytes, stats.memory.idle_bytes, stats.memory.idle), (0, 0, 0));
    assert!(stats.memory.peak_held_bytes <= max_bytes);
}

#[test]
fn adaptive_balances_after_everything_at_once() {
    stress(Preset::Adaptive);
}

#[test]
fn tensorflow_balances_after_everything_at_once() {
    stress(Preset::TensorFlow);
}
