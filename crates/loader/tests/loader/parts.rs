//! Files and members of archives that are longer than a batch, or than the pool's limit.

use super::*;

/// Returns `len` bytes with a period of 251, so that misplaced parts differ.
fn pattern(len: usize, shift: usize) -> Vec<u8> {
    (0..=250).cycle().skip(shift).take(len).collect()
}

/// A sparse file of this length with a few bytes in it.
fn sparse_file(dir: &Path, name: &str, len: u64) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::create(dir.join(name)).unwrap();
    file.set_len(len).unwrap();
    [0, len / 3, len - 3].into_iter().for_each(|at| file.write_all_at(b"abc", at).unwrap());
}

fn in_parts(bytes: u64) -> impl FnOnce(&mut LoadOptions) {
    move |o| (o.batch_samples, o.batch_bytes) = (None, NonZeroU64::new(bytes))
}

#[test]
fn every_byte_of_a_long_file_arrives_in_order_and_is_checked() {
    let dir = directory();
    let (long, last) = (pattern(1_000_003, 0), pattern(77, 9));
    put(dir.path(), "a", b"short");
    put(dir.path(), "b", &long);
    put(dir.path(), "c", &last);
    let catalog = listed(&[dir.path()], false);
    for bytes in [4096, 65_536, 333_335, 1_000_002] {
        let mut destination = FaultyDestination::new();
        let mut options = options(in_parts(bytes));
        options.epochs = 2;
        let (summary, mut observer) = run(&catalog, options, &mut destination);
        assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
        let sent = destination.sent.concat();
        assert_eq!(sent.len() as u64, 2 * catalog.len_bytes());
        assert!(sent == [&b"short"[..], &long, &last].concat().repeat(2), "in parts of {bytes}");
        assert!(destination.sent.iter().all(|batch| batch.len() as u64 <= bytes));
        assert_eq!((summary.files, summary.samples, summary.verified_batches), (3, 6, summary.batches));
        observer.done.sort_by_key(|done| done.index_overall);
        assert_eq!(observer.done.iter().map(|done| done.bytes).sum::<u64>(), summary.bytes);
        assert_eq!(observer.done.iter().map(|done| done.samples).sum::<u64>(), summary.samples);
    }
}

#[test]
fn a_flipped_bit_in_any_part_fails_the_whole_sample_once() {
    let dir = directory();
    put(dir.path(), "a", pattern(10_000, 0));
    put(dir.path(), "b", b"after");
    let catalog = listed(&[dir.path()], false);
    for part in 0..3 {
        let mut destination = FaultyDestination { flip: Some((part, 100)), ..FaultyDestination::new() };
        let (summary, observer) = run(&catalog, options(in_parts(4096)), &mut destination);
        assert_eq!((summary.batches, summary.verified_batches), (3, 2), "part {part}");
        assert_eq!((summary.files, summary.samples, summary.failed_files), (1, 1, 1));
        assert_eq!(observer.failed.len(), 1);
        assert!(observer.failed[0].starts_with(&format!("batch {part}, {}/a: ", dir.path().display())));
    }
}

#[test]
fn long_members_of_archives_are_read_in_parts() {
    let dir = directory();
    let (jpg, seg) = (pattern(30_000, 3), pattern(20_001, 5));
    put(dir.path(), "a.tar", tar_file(&[("0.jpg", &jpg), ("0.seg", &seg), ("1.jpg", b"one")]));
    put(dir.path(), "b.safetensors", safetensors_file(&[("w", 50_000), ("v", 10)]));
    let catalog = listed(&[dir.path()], true);
    let mut destination = FaultyDestination::new();
    let (summary, observer) = run(&catalog, options(in_parts(4096)), &mut destination);
    assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
    // The format's crate sorts tensors by name.
    let tensors: Vec<u8> = [10, 50_000].map(|len| (0..=255).cycle().take(len).collect::<Vec<u8>>()).concat();
    assert!(destination.sent.concat() == [&jpg[..], &seg, b"one", &tensors].concat());
    assert_eq!((summary.files, summary.samples), (2, 4));
    assert_eq!(summary.verified_batches, summary.batches);
}

#[test]
fn a_file_larger_than_the_limit_loads_within_the_memory_of_its_batches() {
    let dir = directory();
    let len = 400 << 20;
    sparse_file(dir.path(), "large", len);
    let catalog = listed(&[dir.path()], false);
    let pool = pool(16 << 20);
    let mut options = options(in_parts(1 << 20));
    options.verify = false;
    let mut observer = RecordingObserver::default();
    let mut destination = SinkDestination::new(2).unwrap();
    let summary = Loader::new(&pool, &catalog, options).run(&mut destination, &mut observer);
    assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
    assert_eq!((summary.bytes, summary.batches, summary.files), (len, 400, 1));
    assert_eq!(observer.done.iter().map(|done| done.samples).sum::<u64>(), 1);
    // Four batches ahead and one on each of two lanes. The pool commits memory in steps of at most 2 MiB.
    let stats = pool.stats();
    assert!(stats.memory.peak_held_bytes <= (6 + 2) << 20, "{stats:?}");
}

#[test]
fn a_file_that_shrinks_or_grows_between_its_parts_is_a_failure() {
    let dir = directory();
    ["grows", "shrinks"].into_iter().for_each(|name| put(dir.path(), name, pattern(10_000, 0)));
    let catalog = listed(&[dir.path()], false);
    put(dir.path(), "grows", pattern(10_001, 0));
    put(dir.path(), "shrinks", pattern(9_999, 0));
    let (summary, observer) = run(&catalog, options(in_parts(4096)), &mut FaultyDestination::new());
    assert_eq!((summary.files, summary.samples, summary.failed_files), (0, 0, 2));
    assert_eq!(observer.failed.len(), 2, "each file is reported once");
    assert!(observer.failed[0].contains("/grows: grew: 10000 bytes when it was listed, 10001 when it was read"));
    assert!(observer.failed[1].contains("/shrinks: truncated: "), "{:?}", observer.failed);
}
