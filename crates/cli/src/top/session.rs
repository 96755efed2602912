//! The terminal in raw mode, which is restored however the program ends.

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, KeyEvent};
use ratatui::crossterm::execute;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Whether the terminal is in raw mode.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal in raw mode, which is restored when this is dropped.
pub(super) struct Session {
    pub(super) screen: DefaultTerminal,
    /// Source of key events.
    keys: OwnedFd,
}

impl Session {
    /// Enters raw mode and the alternate screen.
    ///
    /// # Errors
    ///
    /// If no keys can be read, or raw mode is refused.
    pub(super) fn begin() -> Result<Self, Box<dyn Error>> {
        let stdin = io::stdin();
        let keys = if stdin.is_terminal() {
            stdin.as_fd().try_clone_to_owned()?
        } else {
            File::open("/dev/tty").map_err(|error| format!("/dev/tty: {error}: no keys can be read"))?.into()
        };
        IS_TAKEN.store(true, Ordering::SeqCst);
        Ok(Self { screen: ratatui::try_init().inspect_err(|_| restore())?, keys })
    }

    /// Returns the next key pressed within `wait`; `None` without a key, and for other events.
    ///
    /// # Errors
    ///
    /// If the terminal has been closed. Polls the descriptor directly, because crossterm would read a closed terminal forever.
    pub(super) fn next_key(&self, wait: Duration) -> io::Result<Option<KeyEvent>> {
        let mut keys = [PollFd::new(&self.keys, PollFlags::IN)];
        let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
        match poll(&mut keys, Some(&wait)) {
            // After a signal, the window may have another size.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if keys[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            return Err(io::Error::other("the terminal was closed"));
        }
        let event = if event::poll(Duration::ZERO)? { Some(event::read()?) } else { None };
        Ok(event.and_then(|event| event.as_key_press_event()))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, unless it has been restored.
pub(crate) fn restore() {
    if IS_TAKEN.swap(false, Ordering::SeqCst) {
        // Errors are ignored, because the terminal may be closed.
        let _ = ratatui::try_restore();
        let _ = execute!(io::stdout(), Show);
    }
}
