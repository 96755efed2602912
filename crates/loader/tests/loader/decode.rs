//! Decoded fields: one array each, rows in the order of the parts, then the other fields.

use std::error::Error;
use std::fs;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pinpool::{Backend, Pool};
use pinpool_loader::{Catalog, Decode, DecodedField, LoadOptions, LoadedBatch, Loader};
use tempfile::TempDir;

/// Reverses the first `self.0` bytes of a field. A shorter field counts as damaged.
#[derive(Debug)]
struct Backwards(usize);

impl Decode for Backwards {
    fn len_bytes(&self) -> usize {
        self.0
    }

    fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        assert_ne!(encoded, b"panic");
        let first = encoded.get(..self.0).ok_or_else(|| format!("only {} B", encoded.len()))?;
        into.iter_mut().zip(first.iter().rev()).for_each(|(to, from)| *to = *from);
        Ok(())
    }
}

fn field(names: &str, len: usize) -> DecodedField {
    DecodedField::new(names.split(';').map(str::to_owned).collect(), Arc::new(Backwards(len)))
}

fn loaded(paths: &[&Path], decode: Vec<DecodedField>, batch_samples: u64) -> (Catalog, Vec<LoadedBatch>) {
    let catalog = Catalog::from_paths(paths);
    assert!(catalog.failures().is_empty());
    let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    // Samples are never split.
    let (batch_bytes, batch_samples) = (NonZeroU64::new(4), NonZeroU64::new(batch_samples));
    let options = LoadOptions { batch_bytes, batch_samples, decode, ..LoadOptions::default() };
    let batches = Loader::new(&pool, &catalog, options).batches().unwrap().collect();
    (catalog, batches)
}

fn folder_of(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
    folder
}

#[test]
fn decoded_fields_are_arrays_followed_by_the_other_fields() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.tar");
    let members: [(&str, &[u8]); 7] = [
        ("0.cls", b"10"),
        ("0.jpg", b"abcdef"),
        ("0.seg.png", b"uvw"),
        ("0.txt", b"first"),
        ("1.jpeg", b"ghijkl"),
        ("1.cls", b"2"),
        ("1.seg.png", b"xyz"),
    ];
    fs::write(&path, super::tar_file(&members)).unwrap();
    let decode = vec![field("jpg;jpeg", 4), field("seg.png", 2)];
    let (catalog, batches) = loaded(&[&path], decode.clone(), 8);
    // Each sample exceeds the limit of 4 bytes, so it has a batch to itself.
    assert_eq!(batches.len(), 2);
    let bytes = |batch: &LoadedBatch| batch.buffer.wait_slice().unwrap().to_vec();
    let first = bytes(&batches[0]);
    assert_eq!(batches[0].arrays, [0..4, 64..66]);
    assert_eq!((&first[..4], &first[64..66]), (&b"dcba"[..], &b"vu"[..]));
    assert_eq!(&first[batches[0].parts[0].range.clone()], b"10first");
    assert_eq!(catalog.samples()[0].kept_fields(&decode).collect::<Vec<_>>(), [("cls", 0..2), ("txt", 2..7)]);
    let second = bytes(&batches[1]);
    assert_eq!((&second[..4], &second[batches[1].parts[0].range.clone()]), (&b"jihg"[..], &b"2"[..]));
    let all: Vec<_> = catalog.samples()[0].kept_fields(&[]).map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    assert_eq!(all, catalog.samples()[0].fields().map(|(name, bytes)| (name.to_owned(), bytes)).collect::<Vec<_>>());
}

#[test]
fn a_failed_sample_is_named_and_leaves_no_row() {
    let folder = folder_of(&[("a.bin", "abc"), ("b.bin", "d"), ("c.txt", "efg"), ("d.BIN", "hij")]);
    let catalog = Catalog::from_paths(&[folder.path()]);
    let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    let mut options = LoadOptions { decode: vec![field("bin", 2)], ..LoadOptions::default() };
    let batch = Loader::new(&pool, &catalog, options.clone()).batches().unwrap().next().unwrap();
    let named: Vec<_> = batch.parts.iter().map(|part| part.sample).collect();
    assert_eq!((named, batch.arrays.len(), batch.arrays[0].clone()), (vec![0, 3], 1, 0..4));
    assert_eq!(&batch.buffer.wait_slice().unwrap()[..4], b"baih");
    let failures: Vec<_> = batch.failures.iter().map(ToString::to_string).collect();
    assert!(failures[0].ends_with("b.bin: its bin cannot be decoded: only 1 B"), "{failures:?}");
    assert!(failures[1].ends_with("c.txt: no field bin to decode: it has \"txt\""), "{failures:?}");

    options.decode = vec![field("none", 2)];
    let batch = Loader::new(&pool, &catalog, options).batches().unwrap().next().unwrap();
    assert_eq!((batch.parts.len(), batch.failures.len(), batch.buffer.len()), (0, 4, 0));
    assert!(batch.arrays.is_empty());
}

#[test]
fn a_batch_beyond_the_address_space_is_a_failure() {
    let folder = folder_of(&[("a.bin", "abc")]);
    let (_, batches) = loaded(&[folder.path()], vec![field("bin", usize::MAX / 2)], 8);
    assert!(batches[0].parts.is_empty() && batches[0].failures.len() == 1, "{:?}", batches[0].failures);
}

#[test]
fn a_decoder_that_panics_fails_its_sample_alone() {
    let folder = folder_of(&[("a.x", "first"), ("b.x", "panic"), ("c.x", "third")]);
    let (_, batches) = loaded(&[folder.path()], vec![field("x", 5)], 2);
    assert_eq!(batches.iter().map(|batch| batch.parts.len()).collect::<Vec<_>>(), [1, 0, 1]);
    assert!(batches[1].failures[0].to_string().contains("b.x: its x cannot be decoded: the decoder panicked"));
}

/// A decoder that breaks its contract: the length grows with each call.
#[derive(Debug)]
struct Grows(AtomicUsize);

impl Decode for Grows {
    fn len_bytes(&self) -> usize {
        self.0.fetch_add(4096, Ordering::Relaxed)
    }

    fn decode(&self, _: &[u8], _: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

#[test]
#[should_panic(expected = "mid > len")]
fn a_panic_of_a_reading_thread_does_not_end_the_load_as_complete() {
    let folder = folder_of(&[("0.jpg", "abc")]);
    let grows = DecodedField::new(vec!["jpg".to_owned()], Arc::new(Grows(AtomicUsize::new(1))));
    loaded(&[folder.path()], vec![grows], 8);
}
