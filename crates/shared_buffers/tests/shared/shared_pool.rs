//! Shared buffers within one process: what is refused, what a ticket represents, waits, the limit, copies.
#![allow(unsafe_code)] // Makes and seals memory files.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use pinpool::{Backend, HugeTlb, Pool, Request};
use pinpool_shared_buffers::{Error, SharedPool, SharedWorker, Ticket};
use pinpool_testing::{SinkMemory, SinkStream};

use super::{attach, attach_to, descriptor};

const SOON: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(60);

fn pool() -> Pool {
    Pool::builder().without_env().backend(Backend::Heap).max_bytes(64_u64 << 20).build().unwrap()
}

fn sent(worker: &SharedWorker, bytes: &[u8], number: u64) -> Ticket {
    let mut buf = worker.get(bytes.len(), SOON).unwrap();
    buf.as_mut_slice().copy_from_slice(bytes);
    buf.send(number).unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn bytes_arrive_in_place_and_the_buffer_comes_back() {
    let shared = SharedPool::new(&pool(), 10_000, 3).unwrap();
    let worker = attach(&shared);
    assert_eq!((worker.buffer_bytes(), worker.buffer_count(), shared.worker_count()), (10_000, 3, 1));
    for round in 0..10 {
        let tickets: Vec<_> = (0..3).map(|at| sent(&worker, &[at; 10_000], u64::from(at))).collect();
        assert!(worker.get(1, SOON).unwrap_err().is_limit(), "round {round}: all are sent");
        for (at, ticket) in (0..3).zip(&tickets) {
            let buf = shared.receive(&Ticket::from_bytes(&ticket.to_bytes()).unwrap()).unwrap();
            assert_eq!(*buf.wait_slice().unwrap(), [at; 10_000]);
            assert_eq!((shared.counts().received, shared.counts().sent), (1, 2 - usize::from(at)));
        }
        assert_eq!(shared.counts().free, 3);
    }
    assert_eq!(shared.pool().stats().memory.in_use, 0);
}

#[test]
fn without_a_message_the_buffer_that_was_sent_first_is_next() {
    let shared = SharedPool::new(&pool(), 100, 4).unwrap();
    let worker = attach(&shared);
    let first = sent(&worker, b"first", 1);
    sent(&worker, b"second", 2);
    sent(&worker, b"", 3);
    let (ticket, buf) = shared.receive_next(LONG).unwrap().unwrap();
    assert_eq!((ticket, &**buf.wait_slice().unwrap()), (first, &b"first"[..]));
    let (ticket, buf) = shared.receive_next(LONG).unwrap().unwrap();
    assert_eq!((ticket.user_data(), &**buf.wait_slice().unwrap()), (2, &b"second"[..]));
    let (ticket, buf) = shared.receive_next(LONG).unwrap().unwrap();
    assert_eq!((ticket.user_data(), buf.len()), (3, 0));
    assert!(shared.receive_next(SOON).unwrap().is_none());
}

#[test]
fn a_ticket_is_received_once_and_by_its_own_buffers_alone() {
    let (shared, others) = (SharedPool::new(&pool(), 100, 2).unwrap(), SharedPool::new(&pool(), 100, 2).unwrap());
    let worker = attach(&shared);
    let refused = |shared: &SharedPool, ticket: &Ticket, words: &str| {
        let error: Error = shared.receive(ticket).unwrap_err();
        assert!(error.is_invalid_ticket() && error.to_string().contains(words), "{words}: {error}");
    };
    let ticket = sent(&worker, b"a", 0);
    refused(&others, &ticket, "other shared buffers");
    let held = shared.receive(&ticket).unwrap();
    refused(&shared, &ticket, "received before, and the buffer is in use");
    drop(held);
    refused(&shared, &ticket, "received before, and its buffer was returned");
    let again: Vec<_> = (0..2).map(|_| sent(&worker, b"b", 0)).collect();
    refused(&shared, &ticket, "the buffer has generation 2");
    let mut forged = again[0].to_bytes();
    forged[24] = 99;
    refused(&shared, &Ticket::from_bytes(&forged).unwrap(), "length");
    forged[4] = 77;
    refused(&shared, &Ticket::from_bytes(&forged).unwrap(), "there are 2 buffers");
    assert_eq!(again.iter().filter(|ticket| shared.receive(ticket).is_ok()).count(), 2, "no buffer was lost");
}

#[test]
fn a_buffer_that_is_given_up_is_free_and_its_ticket_never_existed() {
    let shared = SharedPool::new(&pool(), 100, 1).unwrap();
    let worker = attach(&shared);
    drop(worker.get(100, SOON).unwrap());
    let mut buf = worker.get(100, SOON).unwrap();
    buf.truncate(3);
    buf.as_mut_slice().copy_from_slice(b"abc");
    assert_eq!(shared.counts().filling, 1);
    assert_eq!(*shared.receive(&buf.send(0).unwrap()).unwrap().wait_slice().unwrap(), b"abc");
    assert!(worker.get(101, SOON).unwrap_err().is_invalid_request());
}

#[test]
fn a_waiting_worker_is_served_or_refused_if_the_trainer_ends() {
    let shared = SharedPool::new(&pool(), 100, 1).unwrap();
    let worker = attach(&shared);
    let held = shared.receive(&sent(&worker, b"x", 0)).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| worker.get(1, LONG).unwrap().send(7).unwrap());
        drop(held);
        let ticket = waits.join().unwrap();
        assert_eq!((shared.receive_next(LONG).unwrap().unwrap().0), ticket);
    });
    let held = shared.receive(&sent(&worker, b"x", 0)).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| worker.get(1, LONG).unwrap_err());
        shared.set_accepting_workers(false).unwrap();
        let error = waits.join().unwrap();
        assert!(error.is_trainer_unavailable() && error.to_string().contains("ending its workers"), "{error}");
    });
    shared.set_accepting_workers(true).unwrap();
    assert!(worker.get(1, SOON).unwrap_err().is_limit(), "it waits again");
    drop(held);
    worker.get(1, LONG).unwrap();
}

#[test]
fn a_buffer_comes_back_when_its_copy_has_ended_and_not_before() {
    let shared = SharedPool::new(&pool(), 4096, 1).unwrap();
    let worker = attach(&shared);
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(4096));
    let held = stream.hold();
    shared.receive(&sent(&worker, &[5; 4096], 0)).unwrap().copy_to(&stream, &mut device).unwrap();
    assert!(worker.get(1, Duration::from_millis(30)).unwrap_err().is_limit(), "the device is reading it");
    assert_eq!((shared.counts().received, shared.pool().stats().copies.in_flight), (1, 1));
    drop(held);
    worker.get(1, LONG).unwrap();
    assert_eq!(device.read(), [5; 4096]);
}

#[test]
fn the_memory_counts_under_the_limit_of_the_pool() {
    let pool = pool();
    let mib = 1 << 20;
    drop(pool.get(50 * mib).unwrap());
    let shared = SharedPool::new(&pool, mib, 40).unwrap();
    assert!(pool.stats().memory.held_bytes <= 24 << 20, "idle memory made room: {}", pool.stats().memory.held_bytes);
    let error = pool.get_with(Request::new(30 * mib).timeout(SOON)).unwrap_err();
    assert!(error.is_limit(), "{error}");
    let error = SharedPool::new(&pool, mib, 30).unwrap_err();
    assert!(error.is_limit(), "{error}");
    let worker = attach(&shared);
    let held = shared.receive(&sent(&worker, b"kept", 0)).unwrap();
    drop(shared);
    assert_eq!(*held.wait_slice().unwrap(), b"kept", "a received buffer stays usable");
    drop(held);
    pool.get(50 * mib).unwrap();
    let exact = Pool::builder().without_env().backend(Backend::Heap).preset(pinpool::Preset::TensorFlow);
    let exact = exact.max_bytes(8_u64 << 20).build().unwrap();
    let shared = SharedPool::new(&exact, mib, 6).unwrap();
    assert!(exact.get_with(Request::new(3 * mib).timeout(SOON)).unwrap_err().is_limit());
    drop(shared);
    exact.get(3 * mib).unwrap();
}

#[test]
fn a_worker_is_told_when_its_trainer_closes() {
    let shared = SharedPool::new(&pool(), 100, 1).unwrap();
    let worker = attach(&shared);
    let descriptor = descriptor(&shared);
    let buf = worker.get(1, SOON).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| worker.get(1, LONG).unwrap_err());
        drop(shared);
        let error = waits.join().unwrap();
        assert!(error.is_trainer_unavailable() && error.to_string().contains("closed"), "{error}");
    });
    assert!(buf.send(0).unwrap_err().is_trainer_unavailable());
    assert!(attach_to(descriptor).unwrap_err().is_trainer_unavailable());
}

#[test]
fn the_descriptor_of_another_process_is_opened_through_proc() {
    let shared = SharedPool::new(&pool(), 100, 2).unwrap();
    let own = descriptor(&shared);
    // SAFETY: both sides are this test, which changes the memory only through the crate.
    let attach_to_self = |descriptor| unsafe { SharedWorker::attach_to_process(std::process::id(), descriptor) };
    let worker = attach_to_self(own.as_raw_fd()).unwrap();
    assert_eq!(shared.worker_count(), 1);
    assert_eq!(*shared.receive(&sent(&worker, b"p", 0)).unwrap().wait_slice().unwrap(), b"p");
    assert!(attach_to_self(99_999).unwrap_err().is_backend());
}

fn memory_file(seals: libc::c_int, bytes: u64) -> OwnedFd {
    // SAFETY: the call reads a C string and takes flags.
    let made = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(made) };
    file.set_len(bytes).unwrap();
    // SAFETY: the call takes a descriptor of this process and writes to no memory.
    unsafe { libc::fcntl(made, libc::F_ADD_SEALS, seals) };
    file.into()
}

/// Returns a copy of the file of `shared`, with bytes changed by `change`.
fn changed(shared: &SharedPool, change: impl FnOnce(&mut Vec<u8>)) -> OwnedFd {
    let mut bytes = Vec::new();
    let mut file = File::from(descriptor(shared));
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    change(&mut bytes);
    let copy = memory_file(0, 0);
    let mut copy = File::from(copy);
    copy.write_all(&bytes).unwrap();
    // SAFETY: the call takes a descriptor of this process and writes to no memory.
    unsafe { libc::fcntl(copy.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
    copy.into()
}

#[test]
fn files_that_are_no_shared_buffers_are_refused_with_the_reason() {
    let shared = SharedPool::new(&pool(), 100, 2).unwrap();
    let refused = |descriptor: OwnedFd, words: &str| {
        let error = attach_to(descriptor).unwrap_err();
        assert!(error.is_backend() && error.to_string().contains(words), "{words}: {error}");
    };
    refused(File::open("/dev/null").unwrap().into(), "not a memory file");
    refused(tempfile::tempfile().unwrap().into(), "");
    refused(memory_file(0, 1 << 20), "F_SEAL_SHRINK");
    let shrink = libc::F_SEAL_SHRINK;
    refused(memory_file(shrink, 0), "empty");
    refused(memory_file(shrink, 100), "less than a header");
    refused(memory_file(shrink, 1 << 20), "does not contain shared buffers");
    refused(memory_file(shrink | libc::F_SEAL_WRITE, 1 << 20), "F_SEAL_WRITE");
    refused(changed(&shared, |bytes| bytes[8] = 9), "version 9");
    refused(
        changed(&shared, |bytes| bytes.truncate(4096)),
        "the file has 4096 bytes and the header claims 2 buffers of 100 bytes",
    );
    refused(changed(&shared, |bytes| bytes[0] = 0), "does not contain shared buffers");
    for (at, value) in [(12, 0), (12, 200), (31, 255)] {
        refused(changed(&shared, |bytes| bytes[at] = value), "it is truncated or damaged");
    }
    let error = attach_to(changed(&shared, |_| {})).unwrap_err();
    assert!(error.is_trainer_unavailable(), "a copy has no trainer: {error}");
    for (bytes, buffers) in [(0, 1), (1, 0), (1, 1 << 20), (usize::MAX, 2), (usize::MAX / 2, 3)] {
        let error = SharedPool::new(&pool(), bytes, buffers).unwrap_err();
        assert!(error.is_invalid_request() && !error.is_backend(), "{bytes} {buffers}: {error}");
    }
}

#[test]
fn hugetlb_pages_are_used_or_reported_missing() {
    let pool =
        Pool::builder().without_env().backend(Backend::Heap).max_bytes(pinpool::Limit::Unlimited).build().unwrap();
    let error = SharedPool::with_hugetlb(&pool, 1 << 40, 4, HugeTlb::Pages2MiB).unwrap_err();
    assert!(error.to_string().contains("nr_hugepages"), "{error}");
    let error = SharedPool::with_hugetlb(&pool, 1 << 30, 1, HugeTlb::Pages1GiB).unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("1GiB"), "{error}");
    assert!(!SharedPool::with_hugetlb(&pool, 4 << 20, 1, HugeTlb::Off).unwrap().is_hugetlb());
    if let Ok(shared) = SharedPool::with_hugetlb(&pool, 4 << 20, 1, HugeTlb::Pages2MiB) {
        let worker = attach(&shared);
        assert!(shared.is_hugetlb());
        assert_eq!(*shared.receive(&sent(&worker, &[3; 4 << 20], 0)).unwrap().wait_slice().unwrap(), [3; 4 << 20]);
    }
}

#[test]
fn nothing_is_left_behind() {
    super::child::alone(|| {
        let pool = pool();
        let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("pinpool-shared").count();
        drop(SharedPool::new(&pool, 100, 2).unwrap());
        let before = descriptors();
        for _ in 0..50 {
            let shared = SharedPool::new(&pool, 100, 2).unwrap();
            let (worker, other) = (attach(&shared), attach(&shared));
            let held = shared.receive(&sent(&worker, b"x", 0)).unwrap();
            let _filling = other.get(1, SOON).unwrap();
            drop(shared);
            drop(held);
        }
        assert_eq!((descriptors(), mappings()), (before, 0));
    });
}
