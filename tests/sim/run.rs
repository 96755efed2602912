//! Runs scenarios on dedicated threads, so that panics and hangs are detected too, and reports failures.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::memory::Slab;
use crate::scenario::Scenario;
use crate::shrink::shrink;
use crate::world;

/// A run takes a millisecond; one that takes this long waits for something that never comes. On a machine with much other
/// work a run at the lowest priority may not get a core for 20 s.
const PATIENCE: Duration = Duration::from_secs(180);
const THREAD_NAME: &str = "simulation";

/// A failed check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broken {
    /// After this many steps.
    pub(crate) at: usize,
    pub(crate) what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after step {}: {}", self.at, self.what)
    }
}

/// Runs `scenario` on a new thread with unused thread-locals. Returns its trace.
pub(crate) fn run_alone(scenario: &Scenario, slab: Slab) -> Result<u64, Broken> {
    be_quiet();
    let (result, received) = channel();
    let scenario = scenario.clone();
    let steps = scenario.steps.len();
    let body = move || {
        let run = || world::run(&scenario, slab);
        let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err((world::reached(), format!("a panic: {}", text.unwrap_or_default())))
        });
        let _ = result.send(outcome);
    };
    let running = thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(body).unwrap();
    let outcome = match received.recv_timeout(PATIENCE) {
        Ok(outcome) => {
            running.join().unwrap();
            outcome
        }
        // The hanging thread is abandoned.
        Err(_) => Err((steps, "the run hangs".to_owned())),
    };
    outcome.map_err(|(at, what)| Broken { at, what })
}

/// Silences the panic hook, because a run's panic is reported with its seed.
fn be_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if thread::current().name() != Some(THREAD_NAME) {
                hook(info);
            }
        }));
    });
}

/// Shrinks a failing run, writes its steps to a file, and says how to repeat it.
pub(crate) fn report(seed: u64, scenario: &Scenario, broken: &Broken) -> String {
    let slab = Slab::new();
    let fails = |part: &Scenario| run_alone(part, slab).is_err();
    // A run that hangs takes too long to be shrunk.
    let smallest = if broken.what.contains("hangs") { scenario.clone() } else { shrink(scenario, fails) };
    let why = run_alone(&smallest, slab).err();
    let why = why.as_ref().map_or_else(|| format!("(not any more) {broken}"), Broken::to_string);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sim-{seed}.steps"));
    let text = format!("# seed {seed}: {why}\n{smallest}");
    let written = std::fs::write(&path, &text).map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!(
        "seed {seed}: {broken}\n\nall steps:      SIM_FIRST={seed} SIM_SEEDS=1 cargo test --test sim seeds\n\
         {} of {}: SIM_REPLAY={written} cargo test --test sim replay\n\n{text}",
        smallest.steps.len(),
        scenario.steps.len(),
    )
}
