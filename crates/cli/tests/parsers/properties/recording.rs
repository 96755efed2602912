//! Recordings: read, made into workloads, and counted.

use flate2::Crc;
use pinpool_replay::{Event, Input, Recording, Workload};

use super::written;

/// Returns the file of an input: `data` as it is, or, if `how` is odd, a valid block that contains `data` as its items.
pub(crate) fn file(how: u8, data: &[u8]) -> Vec<u8> {
    if how.is_multiple_of(2) { data.to_vec() } else { framed(data) }
}

pub(crate) fn recording(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else { return };
    let file = file(how, data);
    let read = |input: Input| Recording::read(input.into_reader());
    let Ok(recording) = Input::open(&written("recording", &file)).and_then(read) else { return };
    assert!(recording.records.is_sorted_by_key(|record| record.time_ns));
    let gets = recording.records.iter().filter(|record| matches!(record.event, Event::Get { bytes: 1.., .. })).count();
    // A recording that is too long or too large is an error. Otherwise the workload has each of its requests.
    if let Ok(workload) = Workload::from_recording(&recording) {
        assert_eq!(workload.requests, gets as u64);
    }
    // A truncated recording does not have more records.
    if how % 2 == 1 {
        let half = Recording::read(&file[..file.len() / 2 + 10]).map_or(0, |recording| recording.records.len());
        assert!(half <= recording.records.len());
    }
}

/// A recording of one block with these items.
fn framed(items: &[u8]) -> Vec<u8> {
    let mut sum = Crc::new();
    sum.update(items);
    let len = u32::try_from(items.len()).expect("an input is short");
    [b"PINPOOLT", &4_u32.to_le_bytes()[..], &len.to_le_bytes(), &sum.sum().to_le_bytes(), items].concat()
}
