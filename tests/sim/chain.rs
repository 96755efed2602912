//! The chain of limits: partitions, their pools, and the `auto` pools of the process. After each step of a seed no level holds
//! more than its limit, and a refused request found no idle memory that would have served it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pinpool::{Backend, Limit, Partition, PinnedBuf, Pool, Preset};
use pinpool_replay::SimSource;

use crate::child::alone;
use crate::draw::Draw;

const MIB: usize = 1 << 20;
const SEEDS: u64 = 200;
const STEPS: usize = 150;
/// The value of `auto` on the machine of [`machine`].
const PROCESS_BYTES: u64 = 100 << 20;

/// A file tree of a machine with 400 MiB.
fn machine(root: &Path) {
    fs::create_dir_all(root.join("proc")).unwrap();
    let text = "MemTotal: 409600 kB\nMemFree: 409600 kB\nMemAvailable: 409600 kB\n";
    fs::write(root.join("proc/meminfo"), text).unwrap();
}

fn pool(root: &Path, draw: &mut Draw) -> Pool {
    let source = Backend::Source(Arc::new(SimSource::new(1 << 40)));
    let preset = draw.pick(&[Preset::Adaptive, Preset::TensorFlow]);
    let builder = Pool::builder().without_env().backend(source).preset(preset).unstable_host_root(root);
    let builder = builder.unstable_settings(|only| only.pressure = Some("/dev/null".into()));
    builder.maintenance_thread(false).wait(Duration::ZERO).max_bytes(Limit::Auto).build().unwrap()
}

struct Level {
    pool: Pool,
    is_auto: bool,
    held: Vec<PinnedBuf>,
    partition: Partition,
    of_partition: Vec<PinnedBuf>,
}

fn step(levels: &mut [Level], draw: &mut Draw) {
    let index = usize::try_from(draw.below(levels.len() as u64)).unwrap();
    let len = draw.pick(&[1, 3, 10, 20, 33]) * MIB;
    match draw.below(12) {
        0..5 => match levels[index].pool.get(len) {
            Ok(buf) => levels[index].held.push(buf),
            // Nothing is in flight, so all memory that is not in use is idle.
            Err(error) => {
                let counted = |level: &&Level| level.is_auto == levels[index].is_auto;
                let in_use: u64 = match levels[index].is_auto {
                    true => levels.iter().filter(counted).map(|level| level.pool.stats().memory.in_use_bytes).sum(),
                    false => levels[index].pool.stats().memory.in_use_bytes,
                };
                // A buffer may take twice its length, and partly used regions cannot be released.
                let fits = in_use + 2 * len as u64 + (30 << 20) <= levels[index].pool.stats().limits.max_bytes.unwrap();
                assert!(error.is_limit() && !fits, "{in_use} B are in use: {error}");
            }
        },
        5 => levels[index].of_partition.extend(levels[index].partition.get(len)),
        6..9 => {
            let level = &mut levels[index];
            let from = if draw.once_in(4) { &mut level.of_partition } else { &mut level.held };
            if !from.is_empty() {
                from.swap_remove(usize::try_from(draw.below(from.len() as u64)).unwrap());
            }
        }
        9 => levels[index].pool.maintain(),
        10 => levels[index].pool.trim(draw.below(PROCESS_BYTES)),
        _ => {
            // A pool may hold more than the process allows only through its own limit.
            let all: u64 =
                levels.iter().filter(|level| level.is_auto).map(|level| level.pool.stats().memory.held_bytes).sum();
            let level = &mut levels[index];
            let own = level.pool.stats().memory.held_bytes;
            let is_auto = !level.is_auto && all + own <= PROCESS_BYTES;
            let limit = if is_auto { Limit::Auto } else { Limit::Bytes(50 << 20) };
            level.is_auto = is_auto;
            level.pool.set_max_bytes(limit).unwrap();
        }
    }
}

#[test]
fn no_level_of_the_chain_exceeds_its_limit() {
    // The process limit must not affect the pools of other tests.
    alone(|| {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        for seed in 0..SEEDS {
            let mut draw = Draw::of(seed);
            let mut levels: Vec<_> = (0..3)
                .map(|_| {
                    let pool = pool(root.path(), &mut draw);
                    let partition = pool.open_partition("part", 24 << 20).unwrap();
                    Level { pool, partition, is_auto: true, held: Vec::new(), of_partition: Vec::new() }
                })
                .collect();
            let mut lowered = [0; 3];
            for number in 0..STEPS {
                let before: Vec<_> = levels.iter().map(|level| level.pool.stats().memory.held_bytes).collect();
                step(&mut levels, &mut draw);
                let mut process_bytes = 0;
                for (index, level) in levels.iter().enumerate() {
                    let (pool, part) = (level.pool.stats(), level.partition.stats());
                    let at = format!("seed {seed}, step {number}, pool {index}");
                    // Lowering a limit takes no buffer from its user.
                    let max_bytes = pool.limits.max_bytes.unwrap();
                    lowered[index] = if before[index] > max_bytes { before[index] } else { 0 };
                    assert!(pool.memory.held_bytes <= max_bytes.max(lowered[index]), "{at}: {pool:?}");
                    assert!(part.memory.in_use_bytes <= part.limits.max_bytes.unwrap(), "{at}: {part:?}");
                    process_bytes += if level.is_auto { pool.memory.held_bytes } else { 0 };
                }
                assert!(process_bytes <= PROCESS_BYTES, "seed {seed}, step {number}: {process_bytes}");
            }
        }
    });
}
