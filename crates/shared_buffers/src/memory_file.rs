//! Memory of a file without a name (`memfd`), which several processes map.
//!
//! ```text
//!   memfd_create ──▶ its length ──▶ sealed ──▶ mapped
//!                                     └── the descriptor, to another process ──▶ checked ──▶ mapped
//! ```
//!
//! The file uses hugetlb pages if enough of them are reserved, otherwise huge pages if the kernel has some. Its length cannot
//! change once it is sealed, so an access to the mapping cannot fail later (`SIGBUS`). The memory is freed with the last
//! process that maps the file or has it open.
//!
//! - **memory-file-I1**: from its creation until its drop, `len` bytes at `start` are mapped, readable and writable, at a fixed
//!   address. Other processes may write to them at any time, so references are created only to atomics, or to bytes that the
//!   protocol assigns to one process.
#![allow(unsafe_code)] // Maps files.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

use pinpool::HugeTlb;
use pinpool::source::SourceError;
use pinpool_os::fork::ForkGeneration;
use pinpool_os::host::limits::memory_remedy;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};

/// A flag since Linux 6.3. With `vm.memfd_noexec=2` the kernel refuses to create a file without this flag.
const MFD_NOEXEC_SEAL: libc::c_uint = 0x8;
/// The seal that a file must have to be mapped: the file cannot become shorter.
const NOT_SHORTENED: libc::c_int = libc::F_SEAL_SHRINK;
const LENGTH_FIXED: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A file without a name and with a fixed length.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    descriptor: OwnedFd,
    len: usize,
    page_bytes: usize,
}

/// A mapping of the file in this process.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    page_bytes: usize,
    generation: ForkGeneration,
}

// SAFETY: the value is an address and a length, and the bytes are accessed as memory-file-I1 states.
unsafe impl Send for SharedMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedMemory {}

/// Returns the error of a failed call, from `errno`.
fn last_os(call: &'static str) -> SourceError {
    let error = io::Error::last_os_error();
    SourceError::new(call, error.kind().to_string()).with_code(error.raw_os_error().unwrap_or(0).into())
}

/// Returns the error of a failed call for `bytes` bytes, with a remedy if the kernel was out of memory.
fn without_memory(call: &'static str, bytes: usize) -> SourceError {
    let error = last_os(call);
    if error.code() != Some(libc::ENOMEM.into()) {
        return error;
    }
    let remedy = memory_remedy(Path::new("/"), bytes);
    SourceError::new(call, format!("out of memory: {bytes} bytes")).with_code(libc::ENOMEM.into()).with_remedy(remedy)
}

/// Returns the result of a system call, which is a descriptor or a number, or its error if the result is negative.
fn checked(call: &'static str, result: libc::c_int) -> Result<libc::c_int, SourceError> {
    if result < 0 { Err(last_os(call)) } else { Ok(result) }
}

impl MemoryFile {
    /// Creates a file of at least `bytes`, in whole pages.
    pub(crate) fn new(name: &CStr, bytes: usize, hugetlb: HugeTlb) -> Result<Self, SourceError> {
        let huge = || Self::in_hugetlb(name, bytes);
        let small = || Self::create(name, bytes, 0, PAGE_BYTES);
        match hugetlb {
            HugeTlb::Pages2MiB => huge()
                .map_err(|error| error.with_remedy("reserve more pages (/proc/sys/vm/nr_hugepages), or omit hugetlb")),
            HugeTlb::Off => small(),
            HugeTlb::Auto => huge().or_else(|_| small()),
            other => Err(SourceError::new("memfd_create", format!("shared buffers have no huge pages of {other}"))),
        }
    }

    fn in_hugetlb(name: &CStr, bytes: usize) -> Result<Self, SourceError> {
        let file = Self::create(name, bytes, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, GRANULE_BYTES)?;
        // A mapping reserves the pages for the file, or fails if there are too few.
        SharedMemory::map(&file)?;
        Ok(file)
    }

    fn create(name: &CStr, bytes: usize, flags: libc::c_uint, page_bytes: usize) -> Result<Self, SourceError> {
        let len = bytes
            .max(1)
            .checked_next_multiple_of(page_bytes)
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or_else(|| SourceError::new("memfd_create", format!("{bytes} bytes exceed the address space")))?;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
        let create = |flags| {
            // SAFETY: the call reads a C string and takes flags.
            checked("memfd_create", unsafe { libc::memfd_create(name.as_ptr(), flags) })
        };
        let number = create(flags | MFD_NOEXEC_SEAL)
            .or_else(|_| create(flags))
            .map_err(|error| error.with_remedy("allow this process to call memfd_create (seccomp, vm.memfd_noexec)"))?;
        // SAFETY: the descriptor is new, and nothing else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        let length = libc::off_t::try_from(len).unwrap_or(libc::off_t::MAX);
        // SAFETY: the call takes a descriptor of this process and writes to no memory.
        checked("ftruncate", unsafe { libc::ftruncate(number, length) })
            .map_err(|_| without_memory("ftruncate", len))?;
        // SAFETY: as above.
        checked("fcntl", unsafe { libc::fcntl(number, libc::F_ADD_SEALS, LENGTH_FIXED) })?;
        Ok(Self { descriptor, len, page_bytes })
    }

    /// Takes a file that another process created. Fails unless the file can be mapped safely.
    pub(crate) fn from_descriptor(descriptor: OwnedFd) -> Result<Self, SourceError> {
        // SAFETY: the call takes a descriptor of this process and writes to no memory.
        let seals = checked("fcntl", unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) })
            .map_err(|_| SourceError::new("fcntl", "the descriptor is not a memory file (memfd)"))?;
        if seals & NOT_SHORTENED == 0 {
            return Err(SourceError::new("fcntl", "it could be truncated while in use: seal it with F_SEAL_SHRINK"));
        }
        if seals & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0 {
            return Err(SourceError::new(
                "fcntl",
                "it is sealed against writes (F_SEAL_WRITE): no buffer can be filled",
            ));
        }
        let descriptor = File::from(descriptor);
        let metadata = descriptor.metadata().map_err(|_| last_os("fstat"))?;
        let len = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        let page_bytes = usize::try_from(std::os::unix::fs::MetadataExt::blksize(&metadata)).unwrap_or(PAGE_BYTES);
        Ok(Self { descriptor: descriptor.into(), len, page_bytes: page_bytes.max(PAGE_BYTES) })
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl SharedMemory {
    /// Maps the whole file.
    pub(crate) fn map(file: &MemoryFile) -> Result<Self, SourceError> {
        let (descriptor, flags) = (file.descriptor.as_raw_fd(), libc::MAP_SHARED);
        if file.len == 0 {
            return Err(SourceError::new("mmap", "the file is empty"));
        }
        // SAFETY: at an address of the kernel's choice, the mapping replaces no existing memory; the file cannot become shorter.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), file.len, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(without_memory("mmap", file.len));
        }
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| SourceError::new("mmap", "the kernel mapped page zero"))?;
        if file.page_bytes == PAGE_BYTES {
            // SAFETY: the call changes which pages back the mapping, not its content.
            let _ = unsafe { libc::madvise(start.as_ptr().cast(), file.len, libc::MADV_HUGEPAGE) };
        }
        let generation = ForkGeneration::now();
        Ok(Self { start, len: file.len, page_bytes: file.page_bytes, generation })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_hugetlb(&self) -> bool {
        self.page_bytes > PAGE_BYTES
    }

    /// Returns the address `offset` bytes after the start, or the end of the mapping if `offset` is larger.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: the address is inside the mapping or at its end.
        unsafe { self.start.add(offset.min(self.len)) }
    }

    /// Returns the value `offset` bytes after the start, which other processes may change. Returns `None` if the value is not
    /// inside the mapping, or is unaligned.
    pub(crate) fn shared<T: Shared>(&self, offset: usize) -> Option<&T> {
        let end = offset.checked_add(size_of::<T>())?;
        let pointer = self.at(offset).cast::<T>();
        if end > self.len || !pointer.is_aligned() {
            return None;
        }
        // SAFETY: the value is inside the mapping, which lives as long as `self`, is aligned, and consists of atomics (`Shared`).
        Some(unsafe { pointer.as_ref() })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A forked child may lack the mapping if a driver has pinned it.
        if self.generation.is_stale() {
            return;
        }
        // SAFETY: `map` created the mapping, and nothing uses it any more.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Types that consist of atomics: any process may change them at any time, and each bit pattern is a valid value.
///
/// # Safety
///
/// The type must consist of atomics and have C layout.
pub(crate) unsafe trait Shared {}
