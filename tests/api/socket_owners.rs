//! Who holds what, over the socket of the statistics.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

use pinpool::{Backend, Pool};

#[test]
fn the_socket_tells_the_owners_the_largest_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stats.sock");
    let pool = Pool::builder().without_env().backend(Backend::Heap).socket(path.clone()).build().unwrap();
    let _images = pool.tagged("images").get(1 << 20).unwrap();
    let _labels = [4096, 4096].map(|bytes| pool.tagged("labels").get(bytes).unwrap());
    let mut line = String::new();
    BufReader::new(UnixStream::connect(&path).unwrap()).read_line(&mut line).unwrap();
    let object: serde_json::Value = serde_json::from_str(&line).unwrap();
    let owners = object["pools"][0]["owners"].as_array().unwrap();
    let of = |at: usize| (owners[at]["tag"].as_str().unwrap(), owners[at]["buffers"].as_u64().unwrap());
    assert_eq!((of(0), of(1), owners.len()), (("images", 1), ("labels", 2), 2), "{line}");
    assert_eq!(owners[0]["asked_bytes"], 1 << 20);
    assert!(owners[0]["oldest_seconds"].is_number(), "{line}");
}
