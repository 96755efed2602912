//! The pool live in a terminal.
//!
//! | file | owns |
//! | --- | --- |
//! | `snapshot.rs` | the figures at one moment, and how fast they change |
//! | `screen.rs` | one screen of them |
//! | `session.rs` | the terminal, taken over and given back |
//! | `overview.rs` | all pools in one table |
//! | `remote.rs` | the pools of other processes, through their sockets |

mod overview;
mod remote;
mod screen;
mod session;
mod snapshot;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pinpool::Pool;
use pinpool_loader::StopFlag;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use self::session::Session;
use self::snapshot::{History, Snapshot};
use pinpool_cli::terminal::Terminal;

pub(crate) use self::remote::{TopArgs, run};
pub(crate) use self::session::restore;

/// Time between two screens.
const EVERY: Duration = Duration::from_millis(500);

/// A thread that shows a pool of this process until this is dropped. Lines for stderr are held back until then.
pub(crate) struct Watch {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    terminal: Terminal,
}

impl Watch {
    /// Shows `pool` and the line of `progress`. The keys q and Ctrl-C raise `stop`.
    ///
    /// # Errors
    ///
    /// If stdout is no terminal, or no thread can be had.
    pub(crate) fn begin(
        pool: &Pool,
        terminal: &Terminal,
        stop: &StopFlag,
        progress: impl Fn() -> String + Send + 'static,
    ) -> Result<Self, Box<dyn Error>> {
        let session = Session::begin()?;
        terminal.hold();
        let (pool, stop, is_over) = (pool.clone(), stop.clone(), Arc::new(AtomicBool::new(false)));
        let is_over_there = is_over.clone();
        let lines = terminal.clone();
        let work = move || {
            // A screen that can no longer be drawn does not end the program that it shows.
            let _ = show(session, &pool, &lines, &stop, &is_over_there, &progress);
        };
        let mut watch = Self { is_over, thread: None, terminal: terminal.clone() };
        watch.thread = Some(thread::Builder::new().name("pinpool-top".to_owned()).spawn(work)?);
        Ok(watch)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // Its panic was printed by the hook.
            let _ = thread.join();
        }
        restore();
        self.terminal.release();
    }
}

fn show(
    mut session: Session,
    pool: &Pool,
    terminal: &Terminal,
    stop: &StopFlag,
    is_over: &AtomicBool,
    progress: &dyn Fn() -> String,
) -> Result<(), Box<dyn Error>> {
    let mut history = History::default();
    let mut last = Instant::now();
    while !is_over.load(Ordering::Acquire) {
        let now = Instant::now();
        history.add(Snapshot::of_pool(pool), now - last);
        last = now;
        let message = if stop.is_raised() { "stopping".to_owned() } else { terminal.last_held() };
        session.screen.draw(|frame| screen::draw(frame, &history, &progress(), &message))?;
        wait(&session, stop, is_over)?;
    }
    Ok(())
}

/// Reads keys until the next screen is due.
fn wait(session: &Session, stop: &StopFlag, is_over: &AtomicBool) -> Result<(), Box<dyn Error>> {
    let due = Instant::now() + EVERY;
    // Short, so that the end of the program is seen soon.
    let step = Duration::from_millis(50);
    while Instant::now() < due && !is_over.load(Ordering::Acquire) {
        match session.next_event(step)? {
            Some(Event::Key(key)) if ends(key) => {
                stop.raise();
            }
            Some(Event::Resize(..)) => return Ok(()),
            _ => {}
        }
    }
    Ok(())
}

fn ends(key: KeyEvent) -> bool {
    let is_ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (is_ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}
