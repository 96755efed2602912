//! The bytes of each batch: order, limits, shuffle, synthetic data, checksums.

use xxhash_rust::xxh3::xxh3_64;

use super::*;

/// Batches sent, and the number of samples in each batch, sent or empty.
fn sent(catalog: &Catalog, options: LoadOptions) -> (Vec<Vec<u8>>, Vec<u64>) {
    let mut destination = FaultyDestination::new();
    let (summary, mut observer) = run(catalog, options, &mut destination);
    assert!(summary.is_complete(), "{summary:?} {:?}", observer.failed);
    observer.done.sort_by_key(|done| done.index_overall);
    (destination.sent, observer.done.iter().map(|done| done.samples).collect())
}

#[test]
fn samples_lie_back_to_back_with_their_checksums() {
    let dir = directory();
    // Longer than one read.
    let long: Vec<u8> = (0..251).cycle().take(256 * 1024 + 77).collect();
    put(dir.path(), "a", b"first");
    put(dir.path(), "b", b"");
    put(dir.path(), "c", &long);
    put(dir.path(), "d.tar", tar_file(&[("0.x", b"one"), ("0.y", b"two"), ("1.x", b"three")]));
    let catalog = listed(&[dir.path()], true);
    let expected: [&[u8]; 5] = [b"first", b"", &long, b"onetwo", b"three"];
    assert_eq!(sent(&catalog, options(|o| o.batch_samples = None)), (vec![expected.concat()], vec![5]));

    let mut at = 0;
    for (number, bytes) in expected.into_iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
        let mut destination = FaultyDestination { flip: Some((0, at)), ..FaultyDestination::new() };
        let (_, observer) = run(&catalog, options(|o| o.batch_samples = None), &mut destination);
        let flipped = [&[bytes[0] ^ 1], &bytes[1..]].concat();
        let (name, len, arrived, read) = (catalog.name(number), bytes.len(), xxh3_64(&flipped), xxh3_64(bytes));
        let differ = format!("{len} bytes differ at the destination: checksum {arrived:016x} there, {read:016x}");
        assert_eq!(observer.failed, [format!("batch 0, {name}: {differ} when they were read")]);
        at += len;
    }
}

#[test]
fn a_seed_is_a_data_set() {
    let lengths =
        |seed| -> Vec<u64> { Catalog::synthetic(50, seed).samples().iter().map(|sample| sample.len_bytes).collect() };
    assert_eq!(lengths(1), lengths(1));
    assert_ne!(lengths(1), lengths(2));

    let bytes = |seed, stream: usize| sent(&Catalog::synthetic(2, seed), options(one_by_one)).0[stream][..100].to_vec();
    assert_eq!(bytes(1, 0), bytes(1, 0));
    assert_ne!(bytes(1, 0), bytes(1, 1));
    assert_ne!(bytes(1, 0), bytes(2, 0));
}

#[test]
fn synthetic_lengths_have_the_mean_they_claim() {
    let mean = Catalog::synthetic(20_000, 0).len_bytes() / 20_000;
    // Three standard errors: sd is 0.66 of the mean for this sigma, and 0.66 / sqrt(20,000) is 0.5 %.
    assert!((112_900..=116_400).contains(&mean), "mean {mean}");
}
