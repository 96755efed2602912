//! Compressed files: listing, delivery, shuffles, shards and states, damage, bounds.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use pinpool_loader::Compression;

use super::*;

const ENDINGS: [&str; 4] = ["tar.gz", "tgz", "tar.zst", "tzst"];

fn compress(name: &str, data: &[u8]) -> Vec<u8> {
    if name.ends_with("gz") {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        return encoder.finish().unwrap();
    }
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// Returns the bytes of both members of sample `number` in shard `shard`.
fn sample(shard: usize, number: usize) -> Vec<u8> {
    let first = u8::try_from(shard * 16 + number).unwrap();
    (0..50 + 97 * number).map(|at| first.wrapping_add(u8::try_from(at % 7).unwrap())).collect()
}

fn shard(shard: usize, samples: usize) -> Vec<u8> {
    let members = (0..samples).flat_map(|number| {
        let bytes = sample(shard, number);
        let (image, class) = bytes.split_at(bytes.len() - 3);
        [(format!("{shard}/{number:03}.JPG"), image.to_vec()), (format!("{shard}/{number:03}.cls"), class.to_vec())]
    });
    let members: Vec<_> = members.collect();
    tar_file(&members.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect::<Vec<_>>())
}

/// Creates a shard for each of these numbers of samples, with gzip and Zstandard alternately.
fn shards(samples: &[usize]) -> (TempDir, Vec<PathBuf>) {
    let dir = directory();
    for (number, &samples) in samples.iter().enumerate() {
        let name = format!("{number}.{}", ENDINGS[number % ENDINGS.len()]);
        put(dir.path(), &name, compress(&name, &shard(number, samples)));
    }
    let paths = samples.iter().enumerate();
    let paths = paths.map(|(number, _)| dir.path().join(format!("{number}.{}", ENDINGS[number % ENDINGS.len()])));
    let paths = paths.collect();
    (dir, paths)
}

type Named = Vec<(String, Vec<u8>)>;

/// Returns the name and the bytes of each part of each batch, and all failures.
fn batches_of(pool: &Pool, catalog: &Catalog, options: LoadOptions) -> (Vec<Named>, Vec<String>) {
    let mut failures = Vec::new();
    let batches = Loader::new(pool, catalog, options).batches().unwrap().map(|batch| {
        failures.extend(batch.failures.iter().map(ToString::to_string));
        let bytes = batch.buffer.wait_slice().unwrap();
        let name = |sample: usize| catalog.samples()[sample].member.as_deref().unwrap_or_default().to_owned();
        batch.parts.iter().map(|part| (name(part.sample), bytes[part.range.clone()].to_vec())).collect()
    });
    let batches = batches.collect();
    (batches, failures)
}

fn whole(shards: &[usize]) -> BTreeMap<String, Vec<u8>> {
    let names = shards.iter().enumerate().flat_map(|(shard, &samples)| (0..samples).map(move |sample| (shard, sample)));
    names.map(|(shard, number)| (format!("{shard}/{number:03}"), sample(shard, number))).collect()
}

#[test]
fn samples_of_compressed_archives_arrive_in_order() {
    let numbers = [5, 9, 1, 6];
    let (_dir, paths) = shards(&numbers);
    let catalog = listed(&paths, false);
    assert!(catalog.failures().is_empty(), "{:?}", catalog.failures());
    assert_eq!(catalog.files()[1].compression, Some(Compression::Gzip));
    assert_eq!(catalog.files()[2].compression, Some(Compression::Zstd));
    assert_eq!(catalog.samples()[0].fields().collect::<Vec<_>>(), [("jpg", 0..47), ("cls", 47..50)]);
    let expected = whole(&numbers).into_iter().collect::<Vec<_>>();
    for (samples, bytes) in [(4, None), (1, None), (100, None), (4, NonZeroU64::new(100))] {
        let options = options(|o| (o.batch_samples, o.batch_bytes, o.epochs) = (NonZeroU64::new(samples), bytes, 2));
        let (batches, failures) = batches_of(&pool(1 << 30), &catalog, options);
        assert!(failures.is_empty(), "{failures:?}");
        let mut arrived: Vec<(String, Vec<u8>)> = Vec::new();
        for (name, bytes) in batches.into_iter().flatten() {
            match arrived.last_mut() {
                Some(last) if last.0 == name => last.1.extend(bytes),
                _ => arrived.push((name, bytes)),
            }
        }
        assert!(arrived == [&expected[..], &expected].concat(), "{samples} samples, {bytes:?} bytes");
    }
}

#[test]
fn a_compressed_plain_file_is_one_sample_and_long_ones_come_in_parts() {
    let dir = directory();
    let data: Vec<u8> = (0..100_000).map(|at| u8::try_from(at % 251).unwrap()).collect();
    ["a.bin.gz", "b.zst"].into_iter().for_each(|name| put(dir.path(), name, compress(name, &data)));
    put(dir.path(), "c.tar.gz", "as it is");
    let plain = listed(&[dir.path()], false);
    assert!(plain.files().iter().all(|file| file.compression.is_none()) && plain.failures().is_empty());
    let catalog = listed(&[dir.path().join("a.bin.gz"), dir.path().join("b.zst")], false);
    assert_eq!(catalog.samples().iter().map(|sample| sample.len_bytes).collect::<Vec<_>>(), [100_000; 2]);
    assert!(catalog.name(0).ends_with("a.bin.gz") && !catalog.files()[0].is_archive);
    let options = options(|options| (options.batch_samples, options.batch_bytes) = (None, NonZeroU64::new(7_001)));
    let (batches, failures) = batches_of(&pool(1 << 30), &catalog, options);
    assert!(failures.is_empty(), "{failures:?}");
    let arrived: Vec<u8> = batches.into_iter().flatten().flat_map(|(_, bytes)| bytes).collect();
    assert!(arrived == [&data[..], &data].concat());
}

#[test]
fn shuffled_shards_are_mixed_and_each_keeps_its_order() {
    let numbers = [30; 10];
    let (_dir, paths) = shards(&numbers);
    let catalog = listed(&paths, false);
    let load = |seed, epochs, threads| {
        let options = options(|o| {
            (o.shuffle_seed, o.epochs, o.threads) = (Some(seed), epochs, NonZeroUsize::new(threads).unwrap());
        });
        let (batches, failures) = batches_of(&pool(1 << 30), &catalog, options);
        assert!(failures.is_empty(), "{failures:?}");
        batches
    };
    let batches = load(1, 2, 3);
    assert_eq!(batches, load(1, 2, 1), "the same batches with any number of threads");
    assert_ne!(batches[..75], load(2, 1, 3)[..]);
    assert_ne!(batches[..75], batches[75..], "a different order in each epoch");
    let epoch: Vec<_> = batches[..75].iter().flatten().cloned().collect();
    assert_eq!(epoch.iter().cloned().collect::<BTreeMap<_, _>>(), whole(&numbers));
    let shard_of = |name: &str| name.split('/').next().unwrap().to_owned();
    for shard in 0..10 {
        let of: Vec<_> =
            epoch.iter().filter(|(name, _)| shard_of(name) == shard.to_string()).map(|(name, _)| name).collect();
        assert!(of.is_sorted(), "shard {shard}");
    }
    let mixed = batches[..75].iter().filter(|batch| shard_of(&batch[0].0) != shard_of(&batch[3].0)).count();
    assert!(mixed > 50, "{mixed} of 75 batches mix several shards");
}

#[test]
fn ranks_share_compressed_shards_whole() {
    let numbers = [3, 5, 2, 4, 6];
    let (_dir, paths) = shards(&numbers);
    let catalog = listed(&paths, false);
    let mut arrived = Vec::new();
    for rank in 0..2 {
        let options = options(|o| (o.rank, o.shuffle_seed) = (pinpool_loader::Rank::new(rank, 2), Some(5)));
        let (batches, _) = batches_of(&pool(1 << 30), &catalog, options);
        let names: Vec<_> = batches.into_iter().flatten().map(|(name, _)| name).collect();
        let shards: std::collections::BTreeSet<_> = names.iter().map(|name| name.split('/').next().unwrap()).collect();
        assert_eq!(shards.len(), [3, 2][usize::try_from(rank).unwrap()], "whole shards: {shards:?}");
        arrived.extend(names);
    }
    arrived.sort();
    assert_eq!(arrived, whole(&numbers).into_keys().collect::<Vec<_>>());
}

#[test]
fn a_load_resumes_within_a_compressed_shard() {
    let (_dir, paths) = shards(&[7, 9, 8]);
    let catalog = listed(&paths, false);
    for seed in [None, Some(3)] {
        let options = options(|options| (options.shuffle_seed, options.epochs) = (seed, 2));
        let loader = Loader::new(&pool(1 << 30), &catalog, options);
        let bytes = |batch: &pinpool_loader::LoadedBatch| batch.buffer.wait_slice().unwrap().to_vec();
        let mut reader = loader.clone().batches().unwrap();
        let mut all = Vec::new();
        let mut states = vec![loader.start_state()];
        while let Some(batch) = reader.next() {
            all.push(bytes(&batch));
            states.push(reader.state());
        }
        assert_eq!(all.len(), 12);
        for (taken, state) in states.into_iter().enumerate() {
            let rest: Vec<_> =
                loader.clone().resume_at(state).unwrap().batches().unwrap().map(|batch| bytes(&batch)).collect();
            assert!(rest == all[taken..], "after {taken} batches");
        }
    }
}

#[test]
fn damaged_and_cut_off_files_are_named_with_the_place() {
    let (dir, mut paths) = shards(&[6, 6, 6, 6]);
    for path in &paths[..2] {
        let whole = fs::read(path).unwrap();
        fs::write(path, &whole[..whole.len() / 2]).unwrap();
    }
    for path in &paths[2..] {
        let mut whole = fs::read(path).unwrap();
        let middle = whole.len() / 2;
        whole[middle..middle + 8].fill(0xff);
        fs::write(path, whole).unwrap();
    }
    put(dir.path(), "no.tar.gz", "x");
    put(dir.path(), "empty.gz", "");
    put(dir.path(), "empty.zst", "");
    put(dir.path(), "inside.tgz", compress("gz", b"no archive"));
    put(dir.path(), "cut_inside.tgz", compress("gz", &shard(0, 4)[..3000]));
    put(dir.path(), "good.tar.gz", compress("gz", &shard(7, 2)));
    paths.extend(
        ["no.tar.gz", "empty.gz", "empty.zst", "inside.tgz", "cut_inside.tgz", "good.tar.gz"]
            .map(|name| dir.path().join(name)),
    );
    let catalog = listed(&paths, false);
    assert_eq!(catalog.samples().len(), 2, "the good one is listed");
    let failures: Vec<_> = catalog.failures().iter().map(ToString::to_string).collect();
    let expected = [
        ("0.tar.gz: ", "truncated after byte "),
        ("1.tgz: ", "truncated after byte "),
        ("2.tar.zst: ", "damaged zstd data at or shortly before byte "),
        ("3.tzst: ", "damaged zstd data at or shortly before byte "),
        ("no.tar.gz: ", "gzip"),
        ("empty.gz: ", "truncated after byte 0"),
        ("empty.zst: ", "truncated after byte 0"),
        ("inside.tgz: ", "broken tar"),
        ("cut_inside.tgz: ", "broken tar"),
    ];
    assert_eq!(failures.len(), expected.len(), "{failures:#?}");
    for (failure, (name, why)) in failures.iter().zip(expected) {
        assert!(failure.contains(name) && failure.contains(why), "{failure}");
    }
}

#[test]
fn a_file_that_changes_between_listing_and_reading_fails_and_the_rest_arrives() {
    let (_dir, paths) = shards(&[40, 40, 40]);
    let catalog = listed(&paths, false);
    fs::write(&paths[1], compress("tgz", &shard(1, 3))).unwrap();
    fs::remove_file(&paths[2]).unwrap();
    let (batches, failures) = batches_of(&pool(1 << 30), &catalog, options(|options| options.verify = false));
    let arrived: BTreeMap<_, _> = batches.into_iter().flatten().collect();
    assert_eq!(arrived.keys().filter(|name| name.starts_with("0/")).count(), 40);
    assert!(arrived.keys().all(|name| name.starts_with("0/") || name <= &"1/003".to_owned()), "{:?}", arrived.keys());
    assert!(failures.iter().any(|failure| failure.contains("1.tgz") && failure.contains("truncated")), "{failures:?}");
    assert!(failures.iter().any(|failure| failure.contains("2.tar.zst") && failure.contains("No such file")));
}

#[test]
fn data_far_longer_than_the_pool_passes_through_it() {
    let dir = directory();
    ["a.gz", "b.zst"].into_iter().for_each(|name| put(dir.path(), name, compress(name, &vec![7; 24 << 20])));
    let paths = ["a.gz", "b.zst"].map(|name| dir.path().join(name));
    assert!(paths.iter().all(|path| fs::metadata(path).unwrap().len() < 1 << 20));
    let catalog = listed(&paths, false);
    let small = pool(8 << 20);
    let in_pieces = options(|options| {
        (options.batch_samples, options.batch_bytes, options.verify) = (None, NonZeroU64::new(1 << 20), false);
    });
    let mut bytes = 0;
    for batch in Loader::new(&small, &catalog, in_pieces).batches().unwrap() {
        assert!(batch.failures.is_empty(), "{:?}", batch.failures);
        bytes += batch.buffer.len();
    }
    assert_eq!(bytes, 48 << 20);
    assert!(small.stats().memory.peak_held_bytes <= 8 << 20);
    // Without a limit on the bytes of a batch, only the limit of the pool applies.
    let (batches, failures) = batches_of(&small, &catalog, options(one_by_one));
    assert!(batches.iter().all(Vec::is_empty));
    assert_eq!(failures.len(), 2);
    assert!(failures.iter().all(|failure| failure.contains("PINPOOL_MAX_BYTES")), "{failures:?}");
}

#[test]
fn a_stop_ends_the_listing() {
    let (_dir, paths) = shards(&[3]);
    let options = ListOptions::default();
    options.stop.raise();
    let catalog = options.from_paths(&paths);
    assert!(catalog.samples().is_empty() && catalog.failures().is_empty());
}
