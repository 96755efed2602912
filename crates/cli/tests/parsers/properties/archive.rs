//! Files that contain many samples: each listed range is within the file, and the list agrees with the crates for the formats.

use pinpool_loader::ListOptions;
use safetensors::SafeTensors;

use super::written;

/// The samples of an archive, each with its ranges as offsets and lengths, or the error text.
type Listed = Result<Vec<(String, Vec<(u64, u64)>)>, String>;

fn listed(name: &str, data: &[u8]) -> Listed {
    let mut options = ListOptions::default();
    options.open_archives = true;
    let list = options.from_paths(&[&written(name, data)]);
    assert_eq!(list.files().len() + list.failures().len(), 1, "listed once, or refused once");
    if let Some(failure) = list.failures().first() {
        assert!(failure.to_string().contains(name), "{failure} does not name the file");
        return Err(failure.cause.to_string());
    }
    let samples = list.samples().iter().map(|sample| {
        let ranges: Vec<_> = sample.ranges.iter().map(|range| (range.offset, range.len_bytes)).collect();
        for (offset, len_bytes) in &ranges {
            let end = offset.checked_add(*len_bytes).expect("a range ends");
            assert!(end <= data.len() as u64, "{end} of {}", data.len());
        }
        assert_eq!(ranges.iter().map(|(_, len_bytes)| len_bytes).sum::<u64>(), sample.len_bytes);
        (sample.member.as_deref().expect("a sample of an archive has a name").to_owned(), ranges)
    });
    Ok(samples.collect())
}

/// A tar archive. Its members are those that the `tar` crate finds when it reads the whole archive.
pub(crate) fn tar(data: &[u8]) {
    let Ok(samples) = listed("shard.tar", data) else { return };
    let mut archive = tar::Archive::new(data);
    let mut members = Vec::new();
    for entry in archive.entries().expect("it was listed") {
        let entry = entry.expect("it was listed");
        if matches!(entry.header().entry_type(), tar::EntryType::Regular | tar::EntryType::Continuous) {
            members.push((entry.raw_file_position(), entry.size()));
        }
    }
    assert_eq!(samples.into_iter().flat_map(|(_, ranges)| ranges).collect::<Vec<_>>(), members);
}

/// A safetensors file. It is accepted, with the same tensors, if the `safetensors` crate accepts the whole file.
pub(crate) fn safetensors(data: &[u8]) {
    let (samples, tensors) = match (listed("weights.safetensors", data), SafeTensors::deserialize(data)) {
        (Ok(samples), Ok(tensors)) => (samples, tensors),
        (Err(_), Err(_)) => return,
        (Ok(_), Err(error)) => panic!("accepted, but the crate says {error}"),
        (Err(error), Ok(_)) => panic!("refused: {error}, but the crate accepts it"),
    };
    let mut named: Vec<_> = samples
        .into_iter()
        .map(|(name, ranges)| {
            let [(offset, len_bytes)] = ranges[..] else { panic!("{name} has {} ranges", ranges.len()) };
            let at = |bytes: u64| usize::try_from(bytes).expect("it lies in the file");
            (name, data[at(offset)..][..at(len_bytes)].to_vec())
        })
        .collect();
    named.sort();
    let mut whole: Vec<_> = tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect();
    whole.sort();
    assert_eq!(named, whole);
}
