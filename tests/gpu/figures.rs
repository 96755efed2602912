//! Measurements, not tests: what a large pool costs the process. `run.sh` asks for them by name.

use std::fs;
use std::time::Instant;

use crate::device;

/// Sizes in MiB, separated by commas.
const SIZES: &str = "PINPOOL_GPU_POOL_MIB";
const GROWTH: usize = 64 << 20;

/// Entries of `/proc/self/NAME`, by lines of a file or files of a folder.
fn entries(name: &str) -> usize {
    let path = format!("/proc/self/{name}");
    match fs::read_dir(&path) {
        Ok(files) => files.count(),
        Err(_) => fs::read_to_string(&path).map_or(0, |text| text.lines().count()),
    }
}

/// Grows a pool to each size by buffers of 64 MiB. A JSON line each: the mappings and descriptors of the process beyond those
/// before, and the time that a request of 64 MiB took.
#[test]
#[ignore = "takes the memory that it is asked for"]
fn mappings_and_descriptors_of_a_large_pool() {
    let Some(device) = device::take() else { return };
    let sizes = std::env::var(SIZES).unwrap_or_else(|_| "1024,4096,16384".to_owned());
    let sizes: Vec<usize> = sizes.split(',').map(|size| size.trim().parse().unwrap()).collect();
    device.on_each(|rig| {
        for &mib in &sizes {
            let bytes = mib << 20;
            let before = [entries("maps"), entries("fd")];
            let pool = rig.builder().max_bytes(bytes as u64 + (1 << 30)).build().unwrap();
            let begun = Instant::now();
            let mut bufs = Vec::new();
            let mut refused = String::new();
            for _ in 0..bytes.div_ceil(GROWTH) {
                match pool.get(GROWTH.min(bytes)) {
                    Ok(buf) => bufs.push(buf),
                    Err(error) => {
                        refused = error.to_string().replace('"', "'");
                        break;
                    }
                }
            }
            let seconds = begun.elapsed().as_secs_f64();
            let [maps, fds] = ["maps", "fd"].map(entries);
            println!(
                "{{\"figure\":\"large_pool\",\"backend\":\"{}\",\"mib\":{mib},\"pinned_bytes\":{},\"mappings\":{},\
                 \"descriptors\":{},\"seconds\":{seconds:.3},\"refused\":\"{refused}\"}}",
                rig.name(),
                pool.stats().memory.held_bytes,
                maps.saturating_sub(before[0]),
                fds.saturating_sub(before[1]),
            );
            assert!(refused.is_empty(), "{}: {refused}", rig.name());
        }
    });
}
