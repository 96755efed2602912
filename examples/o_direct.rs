//! Reads a file into a pinned buffer without the page cache (`O_DIRECT`).
//!
//! Address, length and file offset must be multiples of the device's block size, at most 4096 bytes. Pool buffers are
//! page-aligned, so only the length needs rounding.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use pinpool::Pool;

/// The alignment that the file system requires for the length of a read.
const BLOCK_BYTES: usize = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "Cargo.toml".into());
    let pool = Pool::builder().build()?;
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
    // Without direct reads (tmpfs before Linux 6.6), read through the page cache.
    let (mut file, how) = match direct {
        Ok(file) => (file, "directly"),
        Err(_) => (OpenOptions::new().read(true).open(&path)?, "through the page cache"),
    };
    let len = usize::try_from(file.metadata()?.len())?;

    let mut buf = pool.get(len.next_multiple_of(BLOCK_BYTES))?;
    let target = buf.wait_slice_mut()?;
    let mut filled = 0;
    // The last read ends at the end of the file, within a block. A read of 0 bytes means that the file was truncated during the loop.
    // After a shorter read elsewhere, `O_DIRECT` refuses the next read, which is an error.
    while filled < len {
        match file.read(&mut target[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    buf.truncate(filled);
    println!("{} of {len} bytes read {how}", buf.len());
    Ok(())
}
