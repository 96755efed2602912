//! Whole runs: epochs, limits, stops and failures.

use std::fs;

use pinpool_loader::{Catalog, LoadError, LoadOutcome, Loader, StopFlag};

use super::*;

#[test]
fn everything_arrives_in_every_epoch_verified() {
    let catalog = Catalog::synthetic(22, 5);
    let options = options(|o| (o.epochs, o.shuffle_seed) = (3, Some(1)));
    let (summary, observer) = run(&catalog, options, &mut FaultyDestination::new());
    assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
    assert_eq!((summary.epochs, summary.files, summary.samples), (3, 22, 66));
    assert_eq!((summary.batches, summary.verified_batches), (18, 18), "six batches per epoch, the last with two files");
    assert_eq!(summary.bytes, 3 * catalog.len_bytes());
    assert_eq!(observer.done.iter().map(|done| done.bytes).sum::<u64>(), summary.bytes);
    assert!((1..=2).contains(&summary.max_in_flight_batches));
}

#[test]
fn archives_count_as_one_file_and_their_members_as_samples() {
    let dir = directory();
    let put = |name: &str, bytes: &[u8]| put(dir.path(), name, bytes);
    put("a.tar", &tar_file(&[("0.jpg", b"abc"), ("0.cls", b"1"), ("1.jpg", b""), ("2.jpg", b"de")]));
    put("b.safetensors", &safetensors_file(&[("w", 64), ("v", 8)]));
    put("c.tar", &tar_file(&[]));
    put("d", b"");
    put("e.tar", b"no tar");
    let catalog = listed(&[dir.path()], true);
    let (summary, observer) = run(&catalog, options(|o| o.epochs = 2), &mut FaultyDestination::new());
    assert_eq!((summary.files, summary.samples, summary.bytes), (4, 2 * 6, 2 * 78));
    assert_eq!((summary.failed_files, observer.failed.len()), (1, 1), "reported once: {:?}", observer.failed);
    assert_eq!(summary.batches, summary.verified_batches);
    assert!(!summary.is_complete());
}

#[test]
fn any_number_of_epochs_over_empty_archives_ends() {
    let dir = directory();
    ["a.tar", "b.tar"].into_iter().for_each(|name| put(dir.path(), name, tar_file(&[])));
    let catalog = listed(&[dir.path()], true);
    let (summary, _) = run(&catalog, options(|o| o.epochs = u64::MAX), &mut FaultyDestination::new());
    assert_eq!((summary.files, summary.epochs, summary.batches), (2, u64::MAX, 0));
}

#[test]
fn a_limit_of_one_batch_slows_the_run_but_does_not_end_it() {
    let (_dir, catalog) = numbered_files(&[50_000; 40]);
    // A batch is 200,000 bytes, so 262,144 in its class.
    let pool = pool(300_000);
    let (summary, observer) = run_in(&pool, &catalog, options(|_| ()), &mut FaultyDestination::new());
    assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
    assert_eq!((summary.batches, summary.verified_batches), (10, 10));
    assert!(pool.stats().memory.peak_held_bytes <= 300_000);
}

#[test]
fn a_batch_beyond_the_limit_is_skipped_and_the_rest_arrives() {
    let dir = directory();
    put(dir.path(), "a", [1; 1000]);
    put(dir.path(), "b", vec![2; 3_000_000]);
    put(dir.path(), "c", [3; 1000]);
    fs::File::create(dir.path().join("d")).unwrap().set_len(1 << 42).unwrap();
    let catalog = listed(&[dir.path()], false);
    let (summary, observer) = run_in(&pool(2_000_000), &catalog, options(one_by_one), &mut FaultyDestination::new());
    assert_eq!((summary.files, summary.failed_files, summary.verified_batches), (2, 2, 2));
    assert!(observer.failed[0].starts_with(&dir.path().join("b").display().to_string()), "{:?}", observer.failed);
    assert!(observer.failed[0].contains("PINPOOL_MAX_BYTES"), "{:?}", observer.failed);
}

#[test]
fn a_strict_run_ends_at_the_first_failure() {
    let (dir, catalog) = numbered_files(&[100; 40]);
    (12..40).for_each(|number| put(dir.path(), &format!("{number:02}"), b"short"));
    let options = options(|o| o.stop_at_failure = true);
    let (summary, observer) = run(&catalog, options.clone(), &mut FaultyDestination::new());
    assert_eq!((summary.batches, summary.files), (3, 12), "the batches before the failure have arrived");
    assert!(matches!(summary.into_result(), Err(LoadError::StoppedAtFailure)));
    assert!(observer.failed[0].contains("/12: truncated: 5 of the 100 bytes"), "{:?}", observer.failed);

    let missing = listed(&[dir.path().join("missing"), dir.path().join("gone"), dir.path().into()], false);
    let (summary, observer) = run(&missing, options, &mut FaultyDestination::new());
    assert_eq!((observer.failed.len(), summary.failed_files, summary.batches), (1, 1, 0));
}

#[test]
fn a_stop_ends_the_run_with_what_has_arrived() {
    let catalog = Catalog::synthetic(1000, 5);
    let (pool, stop) = (pool(1 << 30), StopFlag::new());
    let raised = stop.clone();
    let mut observer = RecordingObserver::at(3, move || _ = raised.raise());
    let loader = Loader::new(&pool, &catalog, options(one_by_one)).with_stop_flag(&stop);
    let summary = loader.run(&mut FaultyDestination::new(), &mut observer).into_result().unwrap();
    assert!(matches!(summary.outcome, LoadOutcome::Stopped), "{summary:?}");
    // Copies in flight complete: at most one on each lane.
    assert!((4..=6).contains(&summary.batches), "{summary:?}");
    assert_eq!((summary.verified_batches, summary.failed_files), (summary.batches, 0));
}

#[test]
fn a_destination_that_refuses_ends_the_run_and_names_the_batch() {
    let catalog = Catalog::synthetic(40, 5);
    let mut destination = FaultyDestination { refuse: Some(2), ..FaultyDestination::new() };
    let (summary, observer) = run(&catalog, options(|_| ()), &mut destination);
    assert_eq!((summary.batches, summary.files, summary.failed_files), (2, 8, 4));
    let error = summary.into_result().unwrap_err();
    assert!(error.to_string().contains("the device is gone"), "{error}");
    let failed = &observer.failed[0];
    assert!(failed.starts_with("batch 2 (4 samples, the first synthetic-5/00000008): "), "{failed}");
}
