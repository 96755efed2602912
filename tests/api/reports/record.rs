//! What a pool records, read back: each request, return, copy and pin call; files that are truncated, damaged, newer or not
//! writable.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use pinpool_observe::record::{Event, Recording};

use crate::child::alone;
use crate::fixture::{over_sim, recorded};
use crate::recorded_use::{count, use_pool};
use crate::recordings::read_recording;
use crate::scratch::scratch;

#[test]
fn everything_that_a_pool_does_is_in_the_file_once() {
    for name in ["t.trace", "t.trace.gz"] {
        let (_dir, path) = scratch(name);
        let pool = recorded(&path).name("images").build().unwrap();
        use_pool(&pool);
        pool.clear();
        let stats = pool.stats();
        drop(pool);
        let recording = read_recording(&path).unwrap();
        assert_eq!((recording.warning.as_deref(), recording.lost), (None, 0));
        assert_eq!(recording.pool(0).unwrap().fact("name"), Some("images"));
        assert_eq!(recording.pool(0).unwrap().fact("PINPOOL_PRESET"), Some("adaptive"));
        assert_eq!(recording.pool(0).unwrap().fact("process"), Some(std::process::id().to_string().as_str()));
        assert_eq!(count(&recording, |event| matches!(event, Event::Put { in_flight: true, .. })), 20);
        assert_eq!(count(&recording, |event| matches!(event, Event::Completed { .. })), 20);
        assert_eq!(count(&recording, |event| matches!(event, Event::Cleared)), 1);
        assert_eq!(count(&recording, |event| matches!(event, Event::End)), 1);
        let pins = count(&recording, |event| matches!(event, Event::Pin { failed: false, .. }));
        assert_eq!(pins, stats.memory.pin.count);
        // A new buffer is a miss; every other request is a hit.
        let new = count(&recording, |event| matches!(event, Event::New { .. }));
        assert_eq!(80 - new, stats.requests.hits);
        assert_eq!(new, count(&recording, |event| matches!(event, Event::Gone { .. })));
        assert_eq!(alternates(&recording), [(80, 80)]);
    }
}

/// Checks that requests and returns of each buffer alternate between its records `New` and `Gone`, in time order.
/// Returns each pool's numbers of requests and returns.
pub(super) fn alternates(recording: &Recording) -> Vec<(u64, u64)> {
    let mut counts = vec![(0, 0); recording.pools.len()];
    let mut held: HashMap<(u32, u64), bool> = HashMap::new();
    let mut last_ns = 0;
    for record in &recording.records {
        assert!(record.time_ns >= last_ns);
        last_ns = record.time_ns;
        let (gets, puts) = &mut counts[record.pool as usize];
        match record.event {
            Event::New { id, .. } => assert_eq!(held.insert((record.pool, id), false), None),
            Event::Get { id, bytes, class_bytes, .. } => {
                *gets += 1;
                assert!(bytes > 0 && bytes <= class_bytes);
                assert_eq!(held.insert((record.pool, id), true), Some(false), "{record:?}");
            }
            Event::Put { id, .. } => {
                *puts += 1;
                assert_eq!(held.insert((record.pool, id), false), Some(true), "{record:?}");
            }
            Event::Gone { id } => assert_eq!(held.remove(&(record.pool, id)), Some(false)),
            _ => {}
        }
    }
    counts
}

#[test]
fn pools_share_a_file_a_partition_is_a_tag_and_a_later_pool_continues_it() {
    let (_dir, path) = scratch("t.trace");
    let build = |name: &str| over_sim(1 << 30).trace(path.clone()).name(name).build().unwrap();
    let (first, second) = (build("first"), build("second"));
    let part = first.open_partition("part", 1 << 20).unwrap();
    [first.get(5000), second.get(5000), part.get(5000)].into_iter().for_each(|buf| drop(buf.unwrap()));
    drop((first, second, part));
    let third = build("third");
    drop(third.get(5000).unwrap());
    drop(third);
    let recording = read_recording(&path).unwrap();
    assert_eq!(recording.warning, None);
    let names: Vec<_> = recording.pools.iter().map(|pool| (pool.number, pool.fact("name").unwrap())).collect();
    assert_eq!(names, [(0, "first"), (1, "second"), (2, "third")]);
    assert_eq!(alternates(&recording), [(2, 2), (1, 1), (1, 1)]);
    assert_eq!(count(&recording, |event| matches!(event, Event::Get { tag: 1, .. })), 1);
    assert_eq!(count(&recording, |event| matches!(event, Event::End)), 3);
}

fn a_recording(name: &str) -> (tempfile::TempDir, PathBuf) {
    let (dir, path) = scratch(name);
    let pool = recorded(&path).build().unwrap();
    use_pool(&pool);
    drop(pool);
    (dir, path)
}

#[test]
fn a_truncated_recording_is_read_up_to_its_last_record() {
    for name in ["t.trace", "t.trace.gz"] {
        let (_dir, path) = a_recording(name);
        let whole = fs::read(&path).unwrap();
        let all = read_recording(&path).unwrap().records.len();
        let (mut before, mut grew) = (0, 0);
        for end in (1..whole.len()).step_by(if cfg!(miri) { 97 } else { 7 }) {
            fs::write(&path, &whole[..end]).unwrap();
            let Ok(recording) = read_recording(&path) else {
                assert!(before == 0, "{name} of {end} bytes");
                continue;
            };
            let read = recording.records.len();
            // A file that ends between two blocks does not count as truncated.
            assert!(recording.warning.is_some() || read < all, "{name} of {end} bytes");
            assert!(read >= before && read <= all);
            grew += usize::from(read > before);
            before = read;
        }
        // An uncompressed file is read up to the record where a cut is, not only up to the block.
        assert!(grew > if name.ends_with("gz") { 1 } else { 20 }, "{name} grew {grew} times");
    }
}

#[test]
fn a_recording_that_is_damaged_ends_before_the_damage() {
    let (_dir, path) = a_recording("t.trace");
    let mut bytes = fs::read(&path).unwrap();
    let all = read_recording(&path).unwrap().records.len();
    let at = bytes.len() - 3;
    bytes[at] ^= 0x40;
    fs::write(&path, &bytes).unwrap();
    let recording = read_recording(&path).unwrap();
    assert!(recording.records.len() < all);
    let warning = recording.warning.unwrap();
    assert!(warning.contains("damaged") && warning.contains("at byte"), "{warning}");
}

#[test]
fn the_log_tells_where_and_how_much_is_recorded() {
    let (dir, path) = scratch("p%p.trace");
    crate::captured_log::listen();
    let pool = recorded(&path).build().unwrap();
    drop(pool.get(4096).unwrap());
    drop(pool);
    let lines = crate::captured_log::lines();
    let name = format!("p{}.trace", std::process::id());
    assert_eq!(crate::captured_log::count(&lines, &name), 2, "{lines:#?}");
    assert_eq!(crate::captured_log::count(&lines, "trace_complete: path="), 1, "{lines:#?}");
    assert!(read_recording(&dir.path().join(name)).is_ok());
}

#[test]
fn a_file_that_was_moved_away_is_begun_anew() {
    for name in ["t.trace", "t.trace.gz"] {
        let (dir, path) = a_recording(name);
        let moved = dir.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        drop(recorded(&path).name("second").build().unwrap());
        let (first, second) = (read_recording(&moved).unwrap(), read_recording(&path).unwrap());
        assert_eq!((first.warning, &second.warning), (None, &None));
        assert_eq!(second.pools.len(), 1);
        assert_eq!(second.pool(0).unwrap().fact("name"), Some("second"));
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
#[allow(unsafe_code)] // Limits the length of files.
fn a_partly_written_block_is_removed_before_appending() {
    // The limit applies to the process.
    alone(|| {
        let (_dir, path) = a_recording("t.trace");
        let all = read_recording(&path).unwrap().records.len();
        let limit = |bytes: u64| {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a valid limit, for this process alone.
            unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
        };
        let whole = fs::metadata(&path).unwrap().len();
        limit(whole + 10);
        use_pool(&recorded(&path).build().unwrap());
        assert_eq!(fs::metadata(&path).unwrap().len(), whole);
        limit(libc::RLIM_INFINITY);
        let pool = recorded(&path).name("third").build().unwrap();
        drop(pool.tagged("a").get(4096).unwrap());
        drop(pool);
        let recording = read_recording(&path).unwrap();
        assert_eq!(recording.warning, None);
        assert!(recording.records.len() > all);
        assert_eq!(recording.pool(2).unwrap().fact("name"), Some("third"));
        assert_eq!(recording.tags.len(), 1);
    });
}

#[test]
fn a_tag_that_comes_again_is_named_once() {
    let (_dir, path) = scratch("t.trace");
    let pool = recorded(&path).build().unwrap();
    // More tags than a pool distinguishes at a time.
    let tags = if cfg!(miri) { 10 } else { 3000 };
    for _ in 0..2 {
        (0..tags).for_each(|n| drop(pool.tagged(&format!("req/{n}")).get(4096).unwrap()));
    }
    drop(pool);
    let recording = read_recording(&path).unwrap();
    assert_eq!((recording.warning.as_deref(), recording.tags.len()), (None, tags));
    let unnamed = |event: &Event| matches!(event, Event::Get { tag, .. } if recording.tag(*tag).is_none());
    assert_eq!(count(&recording, unnamed), 0);
}
