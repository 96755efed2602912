//! A descriptor over a Unix socket.
#![allow(unsafe_code)] // Calls `sendmsg` and `recvmsg`.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;

use crate::error::{ErrorKind, Result};

/// Room for the header and one descriptor, aligned as the header is.
#[repr(C)]
union Control {
    header: libc::cmsghdr,
    bytes: [u8; 64],
}

/// What goes with the descriptor: a message has at least one byte.
const MARK: u8 = b'p';

fn peer(what: &'static str, why: impl Into<String>) -> crate::Error {
    ErrorKind::Peer { what, why: why.into() }.into()
}

/// Passes `descriptor` to the process at the other end of `socket`.
pub(super) fn pass(socket: &UnixStream, descriptor: BorrowedFd<'_>, what: &'static str) -> Result<()> {
    let mut mark = MARK;
    let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
    let mut control = Control { bytes: [0; 64] };
    let number_bytes = u32::try_from(size_of::<i32>()).unwrap_or(4);
    // SAFETY: numbers and pointers, for which all zeros is a value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = (&raw mut control).cast();
    // SAFETY: computes a length.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(number_bytes) } as usize;
    // SAFETY: the message has control bytes, which have room for a header.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: computes a length.
    let len = unsafe { libc::CMSG_LEN(number_bytes) } as usize;
    let filled = libc::cmsghdr { cmsg_len: len, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
    // SAFETY: inside `control`, aligned.
    unsafe { header.write(filled) };
    // SAFETY: behind the header, inside `control`.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: room for one descriptor, by `CMSG_SPACE`.
    unsafe { ptr::write_unaligned(data.cast::<i32>(), descriptor.as_raw_fd()) };
    // SAFETY: all parts of the message live until the end of the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 {
        return Err(peer(what, format!("the descriptor cannot be passed: {}", io::Error::last_os_error())));
    }
    Ok(())
}

/// The descriptor that the process at the other end of `socket`, named `from` in errors, passes: the first, if there are several. Waits
/// for it as the socket's timeout says.
pub(super) fn take(socket: &UnixStream, from: &str, what: &'static str) -> Result<OwnedFd> {
    let mut mark = 0_u8;
    let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
    let mut control = Control { bytes: [0; 64] };
    // SAFETY: numbers and pointers, for which all zeros is a value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    let received = loop {
        // SAFETY: all parts of the message live until the end of the call.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if received >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break received;
        }
    };
    match received {
        0 => return Err(peer(what, format!("{from} has closed the socket without a descriptor"))),
        1.. => {}
        _ => {
            let error = io::Error::last_os_error();
            return Err(peer(
                what,
                match error.kind() {
                    // The timeout of the socket.
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        format!(
                            "{from} does not answer: is it stopped (SIGSTOP), in a debugger or short of descriptors?"
                        )
                    }
                    _ => format!("no descriptor came from {from}: {error}"),
                },
            ));
        }
    }
    // SAFETY: as filled in by the call above.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Err(peer(what, "a message came without a descriptor: pass it with `pass_to`"));
    }
    // SAFETY: not null, so inside `control`.
    let libc::cmsghdr { cmsg_level: level, cmsg_type: kind, cmsg_len: len, .. } = unsafe { header.read() };
    if level != libc::SOL_SOCKET || kind != libc::SCM_RIGHTS {
        return Err(peer(what, "a message came with something else than one descriptor"));
    }
    // SAFETY: behind the header, inside `control`.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: computes a length.
    let header_len = unsafe { libc::CMSG_LEN(0) } as usize;
    // All of one message come behind one header. Each is owned, so that those that are not asked for are closed.
    let passed: Vec<OwnedFd> = (0..len.saturating_sub(header_len) / size_of::<i32>())
        .map(|index| {
            // SAFETY: inside the length that the kernel has written, which is inside `control`.
            let place = unsafe { data.add(index * size_of::<i32>()) };
            // SAFETY: a descriptor lies there.
            let number = unsafe { ptr::read_unaligned(place.cast::<i32>()) };
            // SAFETY: the kernel made it for this process, and nothing else owns it.
            unsafe { OwnedFd::from_raw_fd(number) }
        })
        .collect();
    let is_cut = message.msg_flags & libc::MSG_CTRUNC != 0;
    passed
        .into_iter()
        .next()
        .filter(|_| !is_cut)
        .ok_or_else(|| peer(what, "a message came with something else than one descriptor"))
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Sockets.
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;

    /// Sends all of `descriptors` in one message.
    fn pass_all(socket: &UnixStream, descriptors: &[BorrowedFd<'_>]) {
        let mut mark = MARK;
        let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
        let mut control = Control { bytes: [0; 64] };
        let number_bytes = u32::try_from(size_of_val(descriptors)).unwrap();
        // SAFETY: numbers and pointers, for which all zeros is a value.
        let mut message: libc::msghdr = unsafe { zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = (&raw mut control).cast();
        // SAFETY: computes a length.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(number_bytes) } as _;
        // SAFETY: the message has control bytes, which have room for a header.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: computes a length.
        let len = unsafe { libc::CMSG_LEN(number_bytes) } as _;
        let filled = libc::cmsghdr { cmsg_len: len, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
        // SAFETY: inside `control`, aligned.
        unsafe { header.write(filled) };
        // SAFETY: behind the header, inside `control`.
        let data = unsafe { libc::CMSG_DATA(header) }.cast::<BorrowedFd<'_>>();
        // SAFETY: room for them, by `CMSG_SPACE`; a borrowed descriptor is its number.
        unsafe { ptr::copy_nonoverlapping(descriptors.as_ptr(), data, descriptors.len()) };
        // SAFETY: all parts of the message live until the end of the call.
        assert_eq!(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) }, 1);
    }

    #[test]
    fn of_several_descriptors_the_first_is_taken_and_the_others_are_closed() {
        let (here, there) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let file = File::open("/dev/null").unwrap();
        pass_all(&there, &[file.as_fd(), writer.as_fd(), writer.as_fd()]);
        drop(writer);
        drop(take(&here, "a test", "a file").unwrap());
        // A read would wait as long as somebody can write.
        let mut asked = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives until the end of the call.
        assert_eq!(unsafe { libc::poll(&raw mut asked, 1, 0) }, 1, "the others are closed");
    }

    #[test]
    fn a_process_that_does_not_answer_is_named() {
        let (here, _there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let error = take(&here, "the trainer", "a file").unwrap_err();
        assert!(error.is_peer() && error.to_string().contains("the trainer does not answer"), "{error}");
    }
}
