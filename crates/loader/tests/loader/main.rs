//! Tests of the reference loader: listing, delivery, and reports.
//!
//! | module | covers |
//! | --- | --- |
//! | `batches` | the iterator over batches: order, shards, states, memory, ends |
//! | `parts` | files longer than a batch |
//! | `listing` | paths to a catalog: order, links, failures |
//! | `compressed` | `.gz` and `.zst` files: order, shuffles, shards, states, damage, bounds |
//! | `archives` | tar and safetensors files: valid, truncated and invalid |
//! | `contents` | the bytes of each batch: order, limits, shuffle, synthetic data, checksums |
//! | `decode` | decoded fields |
//! | `lanes` | slow and failing lanes, and lanes without read-back |
//! | `runs` | epochs, limits, stops and failures of whole runs |

mod archives;
mod batches;
mod compressed;
mod contents;
mod decode;
mod lanes;
mod listing;
mod parts;
mod runs;

use std::fs;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::time::Duration;

use pinpool::{Backend, Completion, Error, PinnedBuf, Pool, Request};
use pinpool_loader::{
    ArrivedBatch, Catalog, Destination, Failure, ListOptions, LoadOptions, LoadSummary, LoadedBatch, Loader, Observer,
    SinkDestination, StopFlag,
};
use tempfile::TempDir;
use test_common::until;

/// A sink that records what is sent, and refuses or corrupts one batch.
struct FaultyDestination {
    sink: SinkDestination,
    sent: Vec<Vec<u8>>,
    /// Number of the batch on each lane.
    on_lane: [usize; 2],
    refuse: Option<usize>,
    /// Flip one bit of this byte of this batch, after it arrived.
    flip: Option<(usize, usize)>,
}

impl FaultyDestination {
    fn new() -> Self {
        let sink = SinkDestination::new(2).unwrap();
        Self { sink, sent: Vec::new(), on_lane: [0; 2], refuse: None, flip: None }
    }
}

impl Destination for FaultyDestination {
    fn lanes(&self) -> usize {
        self.sink.lanes()
    }

    fn send(&mut self, lane: usize, batch: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error> {
        self.on_lane[lane] = self.sent.len();
        self.sent.push(buffer.wait_slice()?.to_vec());
        if self.refuse == Some(self.on_lane[lane]) {
            return Err(Error::device_failed("the device is gone"));
        }
        self.sink.send(lane, batch, buffer)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let flip = self.flip.filter(|(batch, _)| *batch == self.on_lane[lane]);
        self.sink.read_back(lane, &mut |bytes| {
            let mut bytes = bytes.to_vec();
            if let Some((_, byte)) = flip {
                bytes[byte] ^= 1;
            }
            read(&bytes);
        })
    }
}

/// Records every call, and acts once when a given batch is done.
#[derive(Default)]
struct RecordingObserver {
    done: Vec<ArrivedBatch>,
    failed: Vec<String>,
    action: Option<(u64, Box<dyn FnOnce()>)>,
}

impl RecordingObserver {
    fn at(batch: u64, action: impl FnOnce() + 'static) -> Self {
        Self { action: Some((batch, Box::new(action))), ..Self::default() }
    }
}

impl Observer for RecordingObserver {
    fn on_batch(&mut self, done: &ArrivedBatch) {
        self.done.push(*done);
        if let Some((_, act)) = self.action.take_if(|(batch, _)| *batch == done.index_overall) {
            act();
        }
    }

    fn on_failure(&mut self, failure: &Failure) {
        self.failed.push(failure.to_string());
    }
}

/// Returns a pool with a long wait, which only limits a hang: on a busy machine a pin call may be slow.
fn pool(max_bytes: u64) -> Pool {
    pool_with_wait(max_bytes, Duration::from_secs(300))
}

fn pool_with_wait(max_bytes: u64, wait: Duration) -> Pool {
    // No maintenance thread returns buffers while a test counts them.
    let builder = Pool::builder().without_env().backend(Backend::Heap).maintenance_thread(false);
    builder.max_bytes(max_bytes).wait(wait).build().unwrap()
}

/// Returns a pool that has pinned memory for one batch, for which requests wait only 100 ms.
fn impatient_pool() -> Pool {
    let pool = pool_with_wait(300_000, Duration::from_millis(100));
    drop(pool.get_with(Request::new(200_000).timeout(Duration::from_secs(300))).unwrap());
    pool
}

/// Returns options with three threads, batches of four samples and verification, modified by `change`.
fn options(change: impl FnOnce(&mut LoadOptions)) -> LoadOptions {
    let mut options = LoadOptions::default();
    (options.threads, options.read_ahead) = (NonZeroUsize::new(3).unwrap(), NonZeroUsize::new(4));
    (options.batch_samples, options.batch_bytes, options.verify) = (NonZeroU64::new(4), None, true);
    change(&mut options);
    options
}

fn one_by_one(options: &mut LoadOptions) {
    options.batch_samples = NonZeroU64::new(1);
}

fn run_in(
    pool: &Pool,
    catalog: &Catalog,
    options: LoadOptions,
    to: &mut FaultyDestination,
) -> (LoadSummary, RecordingObserver) {
    let mut observer = RecordingObserver::default();
    let summary = Loader::new(pool, catalog, options).run(to, &mut observer);
    let stats = pool.stats();
    assert_eq!((stats.memory.in_use, stats.copies.in_flight), (0, 0), "every buffer is back: {stats:?}");
    (summary, observer)
}

fn run(catalog: &Catalog, options: LoadOptions, to: &mut FaultyDestination) -> (LoadSummary, RecordingObserver) {
    run_in(&pool(1 << 30), catalog, options, to)
}

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn put(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    fs::write(dir.join(name), bytes).unwrap();
}

fn listed<P: AsRef<Path>>(paths: &[P], open_archives: bool) -> Catalog {
    let mut options = ListOptions::default();
    options.open_archives = open_archives;
    options.from_paths(paths)
}

/// Creates a directory with files of these lengths, each filled with its number. Also returns its catalog.
fn numbered_files(lengths: &[usize]) -> (TempDir, Catalog) {
    let dir = directory();
    for (number, &len) in lengths.iter().enumerate() {
        put(dir.path(), &format!("{number:02}"), vec![u8::try_from(number).unwrap(); len]);
    }
    let catalog = listed(&[dir.path()], false);
    (dir, catalog)
}

fn tar_file(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

fn safetensors_file(tensors: &[(&str, usize)]) -> Vec<u8> {
    use safetensors::tensor::{Dtype, TensorView};
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, len)| (0..=255).cycle().take(*len).collect()).collect();
    let tensors = tensors.iter().zip(&bytes);
    let views = tensors.map(|((name, len), bytes)| (*name, TensorView::new(Dtype::U8, vec![*len], bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}
