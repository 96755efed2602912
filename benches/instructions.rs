//! Instructions of a request and its return, counted by callgrind, which do not depend on the load of the machine.
//!
//! ```text
//!   hit       a buffer of the class is idle in the thread's shard
//!   carved    a miss: carved from pinned memory, and returned to it
//!   evicting  twelve random classes through a pool that keeps eight: a third of the requests miss, a third of the returns evict
//!   across    requests of one thread, returns of another, eight buffers at a time; includes the channel between the threads
//!   sampled   like hit, while one request in 1000 keeps its call stack (feature `observe`)
//! ```
//!
//! `cargo bench --bench instructions` runs itself under valgrind, each pattern twice: a result is the
//! difference of two runs divided by the difference of their pairs, which excludes the startup. With a pattern and a number it runs
//! that many pairs without counting, for `valgrind --tool=callgrind target/release/deps/instructions-* evicting 20000`.
#![allow(clippy::print_stdout)] // The results.

use std::hint::black_box;
use std::process::Command;
use std::sync::mpsc;

use pinpool::{Backend, Limit, Pool, PoolBuilder};

/// The name of a pattern, and a function that runs this many pairs.
type Pattern = (&'static str, fn(u64));

const PATTERNS: &[Pattern] = &[
    ("hit", hit),
    ("carved", carved),
    ("evicting", evicting),
    ("across", across),
    #[cfg(feature = "observe")]
    ("sampled", sampled),
];
/// Pairs of the shorter run of a pattern; the other has three times as many.
const PAIRS: u64 = 20_000;
const BATCH: u64 = 8;

fn builder() -> PoolBuilder {
    Pool::builder().without_env().backend(Backend::Heap).max_bytes(Limit::Unlimited).auto_resize(false)
}

fn pair(pool: &Pool, len: usize) {
    let mut buffer = pool.get(len).expect("the heap has memory");
    black_box(buffer.wait_slice_mut().expect("no device uses it"))[0] = 1;
}

fn hit(pairs: u64) {
    let pool = builder().build().expect("the heap has memory");
    (0..pairs).for_each(|_| pair(&pool, 16 << 10));
    assert!(pool.stats().requests.misses <= 1, "not only hits");
}

fn carved(pairs: u64) {
    let pool = builder().pool_size_limit(0).build().expect("the heap has memory");
    // Keeps the granule of all other buffers in use.
    let _anchor = pool.get(4096);
    (0..pairs).for_each(|_| pair(&pool, 64 << 10));
    assert_eq!((pool.stats().requests.hits, pool.stats().memory.pin.count), (0, 1), "not only carved misses");
}

fn evicting(pairs: u64) {
    let pool = builder().pool_size_limit(8).build().expect("the heap has memory");
    let mut random: u64 = 0x9E37_79B9_7F4A_7C15;
    for _ in 0..pairs {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        pair(&pool, 4096 * (1 + (random >> 33) as usize % 12));
    }
    let evicted = pool.stats().memory.evictions.over_limit * 100 / pairs.max(1);
    assert!(pairs < PAIRS || (32..=34).contains(&evicted), "{evicted} % of the puts evict");
}

fn across(pairs: u64) {
    let pool = builder().build().expect("the heap has memory");
    let (to_put, puts) = mpsc::sync_channel(0);
    let (all_put, ready) = mpsc::sync_channel(0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for batch in puts {
                drop::<Vec<_>>(batch);
                let _ = all_put.send(());
            }
        });
        for _ in 0..pairs / BATCH {
            let batch = (0..BATCH).map(|_| pool.get(16 << 10).expect("the heap has memory")).collect();
            let _ = to_put.send(batch);
            let _ = ready.recv();
        }
        drop(to_put);
    });
    assert!(pool.stats().requests.misses <= BATCH, "not only hits");
}

#[cfg(feature = "observe")]
fn sampled(pairs: u64) {
    let pool = builder().call_stacks(1000).build().expect("the heap has memory");
    (0..pairs).for_each(|_| pair(&pool, 16 << 10));
}

/// Instructions of a run of this program.
fn instructions(pattern: &str, pairs: u64) -> Option<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    let run = valgrind.arg(std::env::current_exe().ok()?).args([pattern, &pairs.to_string()]).output().ok()?;
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success(), "{pattern}: {said}");
    said.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |name: &str| args.iter().any(|arg| arg == name);
    if let Some(pairs) = args.iter().find_map(|arg| arg.parse().ok()) {
        return PATTERNS.iter().filter(|(name, _)| wanted(name)).for_each(|(_, run)| run(pairs));
    }
    // For `cargo test --benches`.
    if wanted("--test") {
        return PATTERNS.iter().for_each(|(_, run)| run(100));
    }
    for &(name, _) in PATTERNS {
        match instructions(name, PAIRS).zip(instructions(name, 3 * PAIRS)) {
            Some((short, long)) => {
                println!("{name:<9} {:>8.1} instructions a pair", (long - short) as f64 / (2 * PAIRS) as f64);
            }
            None => return println!("left out: valgrind with callgrind is not installed"),
        }
    }
}
