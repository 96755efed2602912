//! What the pool holds and for whom, printed at each SIGUSR1 (`PINPOOL_DUMP=1`).

use std::thread::JoinHandle;

use pinpool::Pool;
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::{Handle, Signals};

use pinpool_cli::terminal::Terminal;

/// Waits for the signal on a thread of its own, until it is dropped: so the pool ends with the run.
#[derive(Debug)]
pub(crate) struct DumpOnSignal {
    signals: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Prints a dump of `pool` at each SIGUSR1, if the settings say so.
pub(crate) fn dump_on_signal(pool: &Pool, terminal: &Terminal) -> Option<DumpOnSignal> {
    if !pool.config().dump_on_signal {
        return None;
    }
    let started = start(pool.clone(), terminal.clone());
    let cannot = |error| terminal.message(format_args!("PINPOOL_DUMP: SIGUSR1 cannot be waited for: {error}"));
    started.map_err(cannot).ok()
}

fn start(pool: Pool, terminal: Terminal) -> std::io::Result<DumpOnSignal> {
    let mut signals = Signals::new([SIGUSR1])?;
    let handle = signals.handle();
    let print = move || signals.forever().for_each(|_| terminal.lines(pool.dump()));
    let thread = std::thread::Builder::new().name("pinpool-dump".to_owned()).spawn(print)?;
    Ok(DumpOnSignal { signals: handle, thread: Some(thread) })
}

impl Drop for DumpOnSignal {
    fn drop(&mut self) {
        self.signals.close();
        // It ends at once, and its handle of the pool with it.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}
