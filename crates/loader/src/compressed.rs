//! Files compressed by gzip or Zstandard, decompressed directly into the buffer.
//!
//! A decompressor only reads forward, so the batches of a compressed file take turns in the order of the plan: each continues where
//! the previous batch ended.
//!
//! ```text
//!   batch 7   turn at a.tar.gz ─────▶ turn at b.tar.gz ─────▶
//!   batch 8                    turn at a.tar.gz ─────▶ turn at b.tar.gz ─────▶
//! ```
//!
//! - **compressed-I1**: regardless of the length of the file and its data, a decompressor holds [`INPUT_BYTES`] of the file and
//!   the window of its format (gzip 32 KiB; Zstandard at most 128 MiB, since frames that need more are refused).
//! - **compressed-I2**: a file with more data than [`max_data_bytes`] is refused, so that a small file cannot keep a thread
//!   busy forever.
//! - **turn-I1**: a thread waits only for turns of earlier batches (thread-I1), and dropping a batch ends its turns. So the first batch
//!   in progress never waits. A batch that receives no decompressor from an earlier batch decompresses the file from the start of its data.
//! - **turn-I2**: the decompressor is dropped after the last turn of an epoch, so there are at most as many decompressors as there are
//!   files that the plan has open and batches in progress.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};

use flate2::bufread::MultiGzDecoder;

use crate::failure::FailureCause;
use crate::stop::StopFlag;

const INPUT_BYTES: usize = 128 * 1024;
/// Number of bytes that are decompressed at a time while data is skipped.
const SKIP_BYTES: usize = 64 * 1024;
/// Bytes of data that a file of any length may have.
const DATA_LIMIT_MIN: u64 = 1 << 30;
/// Above that limit, bytes of data that are allowed for each byte of the file: slightly more than gzip can reach.
const EXPANSION_MAX: u64 = 1100;

/// Returns the largest number of bytes of data that a file of this length may have (compressed-I2).
fn max_data_bytes(file_bytes: u64) -> u64 {
    file_bytes.saturating_mul(EXPANSION_MAX).max(DATA_LIMIT_MIN)
}

/// A compression format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// `.gz`: one member or several.
    Gzip,
    /// `.zst`: one frame or several.
    Zstd,
}

impl Compression {
    /// Returns the format that the last extension of `path` names, and whether the data is a tar archive.
    pub(super) fn of(path: &Path) -> Option<(Self, bool)> {
        let inner = path.file_stem().map(Path::new).and_then(Path::extension);
        let holds_tar = inner.is_some_and(|inner| inner.eq_ignore_ascii_case("tar"));
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "gz" => Some((Self::Gzip, holds_tar)),
            "tgz" => Some((Self::Gzip, true)),
            "zst" => Some((Self::Zstd, holds_tar)),
            "tzst" => Some((Self::Zstd, true)),
            _ => None,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

/// Decompresses a file, from the first byte of its data to the last. The reader of an archive can move it forward ([`Seek`]).
pub(super) struct Decompressor {
    stream: Stream,
    pub(super) compression: Compression,
    file_bytes: u64,
    max_bytes: u64,
    /// Number of the next byte of data.
    pub(super) at: u64,
    /// Start of the next [`Read::read`], which skips the bytes before it.
    next: u64,
    stop: StopFlag,
    /// The reason why reading failed; set once.
    pub(super) broken: Option<String>,
}

enum Stream {
    Gzip(Box<MultiGzDecoder<Input>>),
    Zstd(Box<zstd::Decoder<'static, Input>>),
}

/// The compressed bytes.
type Input = BufReader<File>;

impl Decompressor {
    /// Creates a decompressor at the start of the file at `path`.
    pub(super) fn open(path: &Path, compression: Compression, stop: &StopFlag) -> io::Result<Self> {
        Self::new(File::open(path)?, compression, stop.clone())
    }

    fn new(file: File, compression: Compression, stop: StopFlag) -> io::Result<Self> {
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let (file_bytes, max_bytes) = (meta.len(), max_data_bytes(meta.len()));
        let input = Input::with_capacity(INPUT_BYTES, file);
        let stream = match compression {
            Compression::Gzip => Stream::Gzip(Box::new(MultiGzDecoder::new(input))),
            Compression::Zstd => Stream::Zstd(Box::new(zstd::Decoder::with_buffer(input)?)),
        };
        Ok(Self { stream, compression, file_bytes, max_bytes, at: 0, next: 0, stop, broken: None })
    }

    fn input(&mut self) -> &mut Input {
        match &mut self.stream {
            Stream::Gzip(stream) => stream.get_mut(),
            Stream::Zstd(stream) => stream.get_mut(),
        }
    }

    /// Decompresses the next bytes of data into `into` and returns their number: at least one, or 0 at the end of the data.
    pub(super) fn decompress(&mut self, into: &mut [u8]) -> Result<usize, FailureCause> {
        if let Some(broken) = &self.broken {
            return Err(FailureCause::Compressed(broken.clone()));
        }
        if into.is_empty() {
            return Ok(0);
        }
        let read = match &mut self.stream {
            Stream::Gzip(stream) => stream.read(into),
            Stream::Zstd(stream) => stream.read(into),
        };
        let (format, at, file_bytes) = (self.compression, self.at, self.file_bytes);
        let truncated = || {
            format!(
                "truncated after byte {file_bytes}: the {format} data has no end there, after {at} bytes of contents; fetch the \
                 file again"
            )
        };
        let broken = match read {
            Ok(0) if file_bytes == 0 => truncated(),
            Ok(read) => {
                self.at += read as u64;
                if self.at <= self.max_bytes {
                    return Ok(read);
                }
                format!(
                    "{file_bytes} bytes expand to more than {} bytes, unlike ordinary data: decompress the file yourself if \
                     you trust it",
                    self.max_bytes
                )
            }
            Err(error) if error.raw_os_error().is_some() => return Err(error.into()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => truncated(),
            Err(error) => format!(
                "damaged {format} data at or shortly before byte {}, after {at} bytes of contents: {error}; fetch or compress the \
                 file again",
                self.input().stream_position()?
            ),
        };
        self.broken = Some(broken.clone());
        Err(FailureCause::Compressed(broken))
    }

    /// Skips the data before byte number `to`. Ends earlier at the end of the data or when the load is stopped.
    pub(super) fn skip_to(&mut self, to: u64) -> Result<(), FailureCause> {
        let mut skipped = [0; SKIP_BYTES];
        while self.at < to && !self.stop.is_raised() {
            let len = usize::try_from(to - self.at).unwrap_or(usize::MAX).min(SKIP_BYTES);
            if self.decompress(&mut skipped[..len])? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Skips the rest of the data and returns the length of all data.
    pub(super) fn skip_to_end(&mut self) -> Result<u64, FailureCause> {
        self.skip_to(u64::MAX)?;
        Ok(self.at)
    }
}

impl Read for Decompressor {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let failed = |cause: FailureCause| match cause {
            FailureCause::Io(error) => error,
            cause => io::Error::other(cause),
        };
        self.skip_to(self.next).map_err(failed)?;
        if self.stop.is_raised() {
            return Err(io::Error::other("stopped"));
        }
        if self.at < self.next {
            return Ok(0);
        }
        let read = self.decompress(into).map_err(failed)?;
        self.next = self.at;
        Ok(read)
    }
}

impl Seek for Decompressor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.next = match to {
            SeekFrom::Start(to) => Some(to),
            SeekFrom::Current(by) => self.next.checked_add_signed(by),
            SeekFrom::End(_) => None,
        }
        .filter(|next| *next >= self.at)
        .ok_or_else(|| io::Error::other("compressed data can only be read forward"))?;
        Ok(self.next)
    }
}

/// The use of a compressed file by one batch. Dropping it ends the turn.
#[derive(Debug)]
pub(super) struct Turn {
    /// Index into [`Catalog::files`](crate::Catalog::files).
    pub(super) file: usize,
    /// Receives the decompressor of the previous batch that reads the file, unless this is the first one.
    pub(super) previous: Option<Receiver<Decompressor>>,
    /// Passes the decompressor to the next batch that reads the file. After the last turn of an epoch, the decompressor is dropped.
    pub(super) next: Sender<Decompressor>,
}

impl Turn {
    /// Waits until the previous turn ends. Returns the decompressor that it passed on, if any. The caller must have no file open.
    pub(super) fn wait(&mut self) -> Option<Decompressor> {
        self.previous.take()?.recv().ok()
    }

    /// Ends the turn and passes the decompressor on.
    pub(super) fn end(self, decoder: Decompressor) {
        // An error means that no further batch of this epoch reads the file.
        let _ = self.next.send(decoder);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        file
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn compress(compression: Compression, data: &[u8]) -> Vec<u8> {
        match compression {
            Compression::Gzip => gzip(data),
            Compression::Zstd => zstd::encode_all(data, 1).unwrap(),
        }
    }

    /// Bytes that compress a little.
    fn data(len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from(at * at / 7 % 31).unwrap()).collect()
    }

    fn read_all(decoder: &mut Decompressor) -> Result<Vec<u8>, FailureCause> {
        let (mut all, mut piece) = (Vec::new(), [0; 1000]);
        loop {
            match decoder.decompress(&mut piece)? {
                0 => return Ok(all),
                read => all.extend_from_slice(&piece[..read]),
            }
        }
    }

    fn decoder(bytes: &[u8], compression: Compression) -> Decompressor {
        Decompressor::new(file_of(bytes), compression, StopFlag::new()).unwrap()
    }

    const BOTH: [Compression; 2] = [Compression::Gzip, Compression::Zstd];

    #[test]
    fn members_form_one_stream() {
        for compression in BOTH {
            let data = data(300_000);
            let parts = data.chunks(100_000).flat_map(|part| compress(compression, part)).collect::<Vec<_>>();
            let mut decoder = decoder(&parts, compression);
            decoder.skip_to(150_000).unwrap();
            assert_eq!(decoder.at, 150_000);
            assert_eq!(read_all(&mut decoder).unwrap(), data[150_000..], "{compression}");
        }
    }

    #[test]
    fn every_truncation_is_a_permanent_error() {
        for compression in BOTH {
            let whole = compress(compression, &data(5000));
            for len in 0..whole.len() {
                let mut decoder = decoder(&whole[..len], compression);
                let error = read_all(&mut decoder).unwrap_err().to_string();
                assert!(error.contains(&format!("truncated after byte {len}")), "{compression} cut to {len}: {error}");
                assert_eq!(decoder.decompress(&mut [0]).unwrap_err().to_string(), error);
            }
        }
    }

    #[test]
    fn flipped_bits_are_found_in_gzip_and_never_panic() {
        let data = data(3000);
        for compression in BOTH {
            let whole = compress(compression, &data);
            for at in 0..whole.len() {
                let mut flipped = whole.clone();
                flipped[at] ^= 0x10;
                match read_all(&mut decoder(&flipped, compression)) {
                    // The time and the text flag in the header of gzip are not data, and zstd has no checksum here.
                    Ok(read) => assert!(read == data || compression == Compression::Zstd, "{compression} byte {at}"),
                    Err(error) => assert!(error.to_string().contains("byte"), "{error}"),
                }
            }
        }
    }

    #[test]
    fn data_that_expands_beyond_the_limit_is_refused() {
        for compression in BOTH {
            let mut decoder = decoder(&compress(compression, &[0; 100_000]), compression);
            assert_eq!(decoder.max_bytes, DATA_LIMIT_MIN);
            decoder.max_bytes = 50_000;
            let error = read_all(&mut decoder).unwrap_err().to_string();
            assert!(error.contains("more than 50000 bytes"), "{error}");
        }
        assert_eq!(max_data_bytes(2 << 20), EXPANSION_MAX << 21);
        assert_eq!(max_data_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_window_of_more_than_128_mib_is_refused() {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(28).unwrap();
        encoder.write_all(&data(10_000)).unwrap();
        let error = read_all(&mut decoder(&encoder.finish().unwrap(), Compression::Zstd)).unwrap_err().to_string();
        assert!(error.contains("too much memory"), "{error}");
    }
}
