//! The iterator over batches: order, shards, states, memory, ends and failures.

use std::time::Instant;

use pinpool_loader::{BatchReader, LoadState, LoadedBatch, Rank};

use super::until::until;
use super::*;

/// Samples and bytes of each batch.
fn contents(batches: impl Iterator<Item = LoadedBatch>) -> Vec<(Vec<usize>, Vec<u8>)> {
    let contents = |batch: LoadedBatch| {
        assert!(batch.failures.is_empty(), "{:?}", batch.failures);
        (batch.parts.iter().map(|part| part.sample).collect(), batch.buffer.wait_slice().unwrap().to_vec())
    };
    batches.map(contents).collect()
}

fn all_back(pool: &Pool) -> bool {
    let stats = pool.stats();
    (stats.memory.in_use, stats.copies.in_flight) == (0, 0)
}

fn reader(pool: &Pool, catalog: &Catalog, options: LoadOptions) -> BatchReader {
    Loader::new(pool, catalog, options).batches().unwrap()
}

#[test]
fn batches_come_in_order_with_their_samples_and_bytes() {
    let (_dir, catalog) = numbered_files(&[10, 0, 300_000, 7, 1, 0, 0, 0, 0]);
    let pool = pool(1 << 30);
    let mut reader = reader(&pool, &catalog, options(|o| (o.batch_samples, o.epochs) = (NonZeroU64::new(4), 2)));
    for number in 0..6 {
        let batch = reader.next().unwrap();
        assert_eq!((batch.index_overall, batch.epoch, batch.index_in_epoch), (number, number / 3, number % 3));
        let first = usize::try_from(number % 3).unwrap() * 4;
        let bytes = batch.buffer.wait_slice().unwrap();
        assert_eq!(batch.parts.len(), if number % 3 == 2 { 1 } else { 4 });
        let mut end = 0;
        for (at, part) in batch.parts.iter().enumerate() {
            let (id, len) = (first + at, catalog.samples()[first + at].len_bytes);
            assert_eq!((part.sample, part.sample_offset, part.range.len() as u64, part.range.start), (id, 0, len, end));
            assert!(bytes[part.range.clone()].iter().all(|byte| usize::from(*byte) == id));
            assert_eq!(part.checksum, Some(xxhash_rust::xxh3::xxh3_64(&bytes[part.range.clone()])));
            end = part.range.end;
        }
        assert_eq!(end, bytes.len(), "the buffer ends with its last sample");
    }
    assert!(reader.next().is_none() && reader.next().is_none());
    assert!(all_back(&pool));
}

#[test]
fn the_iterator_and_a_run_have_the_same_batches() {
    let catalog = Catalog::synthetic(40, 3);
    let options = options(|o| {
        (o.batch_samples, o.batch_bytes, o.shuffle_seed, o.epochs) = (None, NonZeroU64::new(90_000), Some(4), 2);
    });
    let mut destination = FaultyDestination::new();
    let (summary, _) = run(&catalog, options.clone(), &mut destination);
    let pool = pool(1 << 30);
    let loader = Loader::new(&pool, &catalog, options);
    let handed_out = contents(loader.batches().unwrap());
    assert_eq!(handed_out.len() as u64, summary.batches);
    assert_eq!(handed_out.len() as u64, loader.batches_in_epoch(0) + loader.batches_in_epoch(1));
    assert!(handed_out.iter().map(|batch| &batch.1).eq(&destination.sent));
}

#[test]
fn shards_are_disjoint_and_together_each_epoch() {
    let (_dir, catalog) = numbered_files(&[1; 23]);
    let pool = pool(1 << 30);
    for seed in [None, Some(9)] {
        for world in [1, 2, 3, 8, 23, 40] {
            let mut epochs = vec![Vec::new(); 3];
            for rank in 0..world {
                let options = options(|o| (o.epochs, o.shuffle_seed, o.rank) = (3, seed, Rank::new(rank, world)));
                let mut lens = [0; 3];
                for batch in reader(&pool, &catalog, options) {
                    let epoch = usize::try_from(batch.epoch).unwrap();
                    lens[epoch] += batch.parts.len() as u64;
                    epochs[epoch].extend(batch.parts.iter().map(|part| part.sample));
                }
                assert!(lens.iter().all(|len| (23 / world..=23_u64.div_ceil(world)).contains(len)), "{lens:?}");
            }
            assert!(seed.is_none() || world > 8 || epochs[0] != epochs[1], "each epoch has its own order");
            for mut epoch in epochs {
                epoch.sort_unstable();
                assert_eq!(epoch, (0..23).collect::<Vec<_>>(), "{world} ranks, seed {seed:?}");
            }
        }
    }
    assert_eq!((Rank::new(2, 2), Rank::new(0, 0)), (None, None));
    let rank = Rank::new(1, 2).unwrap();
    assert_eq!((rank.index(), rank.world_size()), (1, 2));
}

#[test]
fn a_load_resumed_after_any_batch_yields_the_rest() {
    let (_dir, catalog) = numbered_files(&[5, 40, 1, 0, 7, 7, 19, 3, 90, 2, 2, 11]);
    let pool = pool(1 << 30);
    let options = options(|o| {
        (o.batch_samples, o.batch_bytes) = (NonZeroU64::new(3), NonZeroU64::new(32));
        (o.epochs, o.shuffle_seed, o.rank) = (3, Some(11), Rank::new(1, 2));
    });
    let loader = Loader::new(&pool, &catalog, options);
    let whole = contents(loader.batches().unwrap());
    let mut uninterrupted = loader.batches().unwrap();
    for taken in 0..=whole.len() {
        let state = uninterrupted.state();
        assert_eq!(state.index_overall, taken as u64);
        let mut resumed = loader.clone().resume_at(state).unwrap().batches().unwrap();
        assert_eq!(resumed.state(), state, "before its first batch, a load has its initial state");
        assert_eq!(contents(resumed.by_ref()), whole[taken..], "after {state:?}");
        assert_eq!(resumed.state().index_overall, whole.len() as u64);
        assert_eq!(uninterrupted.next().is_some(), taken < whole.len());
    }
}

#[test]
fn a_state_of_other_batches_is_refused() {
    let (dir, catalog) = numbered_files(&[5; 10]);
    let pool = pool(1 << 30);
    let loader = |catalog: &Catalog, change: fn(&mut LoadOptions)| Loader::new(&pool, catalog, options(change));
    let mut reader = loader(&catalog, |_| ()).batches().unwrap();
    reader.next().unwrap();
    let state = reader.state();
    let changes: [fn(&mut LoadOptions); 5] = [
        |o| o.shuffle_seed = Some(0),
        |o| o.batch_samples = NonZeroU64::new(5),
        |o| o.batch_bytes = NonZeroU64::new(1 << 20),
        |o| o.rank = Rank::new(0, 1),
        |o| o.rank = Rank::new(1, 2),
    ];
    for change in changes {
        let error = loader(&catalog, change).resume_at(state).unwrap_err().to_string();
        assert!(error.contains("the state belongs to another load"), "{error}");
    }
    // More epochs, other threads and another directory do not change the batches.
    let moved = directory();
    for name in (0..10).map(|number| format!("{number:02}")) {
        fs::copy(dir.path().join(&name), moved.path().join(&name)).unwrap();
    }
    let moved = listed(&[moved.path()], false);
    let same = |o: &mut LoadOptions| (o.epochs, o.threads) = (9, NonZeroUsize::MIN);
    assert!(loader(&moved, same).resume_at(state).is_ok());
    put(dir.path(), "new", b"x");
    let error = loader(&listed(&[dir.path()], false), |_| ()).resume_at(state).unwrap_err();
    assert!(error.to_string().contains("resume with the same files"), "{error}");

    let text = "the state is after batch 4 of epoch 0, which has 3: it was changed or belongs to another load";
    let state = LoadState { index_in_epoch: 4, ..state };
    assert_eq!(loader(&catalog, |_| ()).resume_at(state).unwrap_err().to_string(), text);
}

#[test]
fn a_reader_dropped_early_leaves_no_buffer_and_no_thread() {
    let catalog = Catalog::synthetic(1000, 5);
    for taken in [0, 1, 7] {
        let pool = pool(1 << 30);
        let mut reader = reader(&pool, &catalog, options(one_by_one));
        let held: Vec<_> = reader.by_ref().take(taken).collect();
        drop(reader);
        // Threads that have ended request no buffers and hold no handle of the pool.
        assert_eq!(pool.stats().memory.in_use, taken as u64);
        drop(held);
        assert!(all_back(&pool));
    }
}

#[test]
fn no_more_than_read_ahead_buffers_are_held() {
    let (_dir, catalog) = numbered_files(&[100; 100]);
    let pool = pool(1 << 30);
    let mut reader = reader(&pool, &catalog, options(one_by_one));
    until("four are read ahead", || pool.stats().memory.in_use == 4);
    let held: Vec<_> = reader.by_ref().take(10).collect();
    until("ten are taken and four read ahead", || pool.stats().memory.in_use == 14);
    drop(held);
    assert_eq!(reader.count(), 90);
    // All buffers have one class, so there are no more pin calls than buffers in use at once.
    let stats = pool.stats();
    assert!(stats.memory.pin.count <= 14, "{stats:?}");
    assert!(all_back(&pool));
}

#[test]
fn a_limit_of_one_batch_hands_out_one_after_the_other() {
    let (_dir, catalog) = numbered_files(&[50_000; 40]);
    let pool = impatient_pool();
    let mut batches = 0;
    for batch in reader(&pool, &catalog, options(|_| ())) {
        assert!(batch.failures.is_empty(), "{:?}", batch.failures);
        // The consumer is busy for longer than a request waits.
        if batches == 3 {
            std::thread::sleep(Duration::from_millis(300));
        }
        batches += 1;
    }
    assert_eq!(batches, 10);
    assert!(pool.stats().memory.peak_held_bytes <= 300_000);
}

#[test]
fn a_consumer_that_holds_the_whole_limit_gets_a_failure_and_continues() {
    let (_dir, catalog) = numbered_files(&[50_000; 12]);
    for timeout in [Duration::MAX, Duration::from_millis(10)] {
        let mut reader = reader(&impatient_pool(), &catalog, options(|_| ()));
        let held = reader.next().unwrap();
        // The consumer is busy for longer than an attempt waits, so the attempt ends first.
        let busy = |_| std::thread::sleep(Duration::from_millis(200));
        let failed = (0..100).find_map(|_| reader.next_timeout(timeout).map_err(busy).ok()).flatten().unwrap();
        assert_eq!((failed.index_overall, failed.parts.len(), failed.buffer.len()), (1, 0, 0));
        let text = failed.failures[0].to_string();
        assert!(text.starts_with("batch 1 (4 samples, the first ") && text.contains("PINPOOL_MAX_BYTES"), "{text}");
        drop(held);
        assert_eq!(reader.next().map(|batch| (batch.index_overall, batch.parts.len())), Some((2, 4)));
        assert!(reader.next().is_none());
    }
}

#[test]
fn a_reader_ends_soon_while_a_thread_waits_long_for_memory() {
    let (_dir, catalog) = numbered_files(&[50_000; 40]);
    let pool = pool_with_wait(300_000, Duration::from_secs(3600));
    let mut reader = reader(&pool, &catalog, options(|_| ()));
    let held = reader.next().unwrap();
    until("a thread waits", || pool.stats().requests.waiting == 1);
    let begun = Instant::now();
    assert!(reader.next_timeout(Duration::from_millis(1)).is_err());
    drop(reader);
    assert!(begun.elapsed() < Duration::from_secs(300));
    drop(held);
    assert!(all_back(&pool));
}

#[test]
fn a_stop_ends_the_reader_from_any_thread() {
    let catalog = Catalog::synthetic(100_000, 5);
    let (pool, stop) = (pool(1 << 30), StopFlag::new());
    let mut reader = Loader::new(&pool, &catalog, options(one_by_one)).with_stop_flag(&stop).batches().unwrap();
    reader.next().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| stop.raise());
        assert!(reader.by_ref().count() < 100_000);
    });
    assert!(all_back(&pool), "batches read ahead return before the reader is dropped");

    let mut stopped = Loader::new(&pool, &catalog, options(one_by_one)).batches().unwrap();
    stopped.next().unwrap();
    stopped.stop();
    assert!(stopped.next().is_none() && all_back(&pool));
    assert_eq!(stopped.state().index_overall, 1, "the state is after the last returned batch");
}

#[test]
fn a_timeout_loses_no_batch() {
    let mut reader = reader(&pool(1 << 30), &Catalog::synthetic(50, 5), options(one_by_one));
    let mut numbers = Vec::new();
    loop {
        match reader.next_timeout(Duration::ZERO) {
            Err(pinpool_loader::TimedOut) => std::thread::yield_now(),
            Ok(None) => break,
            Ok(Some(batch)) => numbers.push(batch.index_overall),
        }
    }
    assert_eq!(numbers, (0..50).collect::<Vec<_>>());
}

#[test]
fn what_cannot_be_read_is_named_with_its_batch_in_every_epoch() {
    let (dir, catalog) = numbered_files(&[100; 12]);
    put(dir.path(), "01", b"short");
    fs::remove_file(dir.path().join("06")).unwrap();
    fs::remove_file(dir.path().join("09")).unwrap();
    fs::create_dir(dir.path().join("09")).unwrap();
    let batches: Vec<_> = reader(&pool(1 << 30), &catalog, options(|o| o.epochs = 2)).collect();
    assert_eq!(batches.len(), 6);
    for (number, batch) in batches.iter().enumerate() {
        let (gone, why) =
            [(1, "truncated: 5 of the 100 bytes"), (6, "No such file or directory"), (9, "Is a directory")][number % 3];
        let failures: Vec<_> = batch.failures.iter().map(ToString::to_string).collect();
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(failures[0].contains(&format!("/{gone:02}: {why}")), "{failures:?}");
        let first = number % 3 * 4;
        let rest: Vec<_> = (first..first + 4).filter(|sample| *sample != gone).collect();
        assert_eq!(batch.parts.iter().map(|part| part.sample).collect::<Vec<_>>(), rest);
        let bytes: Vec<u8> = rest.iter().flat_map(|sample| [u8::try_from(*sample).unwrap(); 100]).collect();
        assert_eq!(*batch.buffer.wait_slice().unwrap(), bytes, "failed samples leave no gap");
    }
}

#[test]
fn nothing_to_load_is_no_batch() {
    let pool = pool(1 << 30);
    assert_eq!(reader(&pool, &Catalog::default(), options(|_| ())).count(), 0);
    let one = Catalog::synthetic(1, 0);
    assert_eq!(reader(&pool, &one, options(|o| o.epochs = 0)).count(), 0);
    let second = options(|o| (o.rank, o.epochs) = (Rank::new(1, 2), u64::MAX));
    assert_eq!(reader(&pool, &one, second).count(), 0, "more ranks than samples");
}

#[test]
fn labels_are_directories_and_members() {
    let dir = directory();
    fs::create_dir(dir.path().join("cat")).unwrap();
    put(dir.path(), "cat/1.jpg", b"x");
    put(dir.path(), "shard.tar", tar_file(&[("train/0001.jpg", b"x"), ("train/0001.cls", b"1")]));
    let catalog = listed(&[dir.path()], true);
    assert_eq!([catalog.label(0), catalog.label(1), catalog.label(2)], ["cat", "train/0001", ""]);
    assert_eq!(Catalog::synthetic(1, 0).label(0), "");
}
