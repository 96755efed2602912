//! The terminal while a screen is drawn: taken over, and given back whatever ends the program.

use std::error::Error;
use std::io::{self, IsTerminal, Stdout};
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};

/// Whether the terminal is taken over.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// The terminal, until this is dropped.
pub(super) struct Session {
    pub(super) screen: ratatui::Terminal<CrosstermBackend<Stdout>>,
}

impl Session {
    /// Takes the terminal over.
    ///
    /// # Errors
    ///
    /// If stdout is no terminal, or the terminal refuses.
    pub(super) fn begin() -> Result<Self, Box<dyn Error>> {
        if !io::stdout().is_terminal() {
            return Err("stdout is no terminal: nothing can be shown live".into());
        }
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                restore();
                before(info);
            }));
        });
        enable_raw_mode()?;
        IS_TAKEN.store(true, Ordering::SeqCst);
        let session = execute!(io::stdout(), EnterAlternateScreen)
            .and_then(|()| ratatui::Terminal::new(CrosstermBackend::new(io::stdout())));
        if session.is_err() {
            restore();
        }
        Ok(Self { screen: session? })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back, once.
pub(crate) fn restore() {
    if IS_TAKEN.swap(false, Ordering::SeqCst) {
        // A terminal that is gone needs nothing.
        let _ = disable_raw_mode();
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    }
}
