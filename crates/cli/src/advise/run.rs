//! `advise --run`: the promise of an advice, measured. The program runs as it is and with the advice in turns, so that what else the
//! machine does meanwhile falls on both.

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::served::{pools, statistics_of};
use pinpool_cli::table::columns;

/// Runs of each: once before and once after the other.
const TURNS: u32 = 2;
/// Between two looks at a program.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A program that does not end at SIGTERM is killed after this.
const PATIENCE: Duration = Duration::from_secs(10);

/// What one or several runs showed.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Measured {
    pub(super) gets: u64,
    lost_seconds: f64,
    /// Until the last figures.
    seconds: f64,
    /// How long the runs took, if all ended by themselves.
    took: Option<f64>,
    runs: u32,
    /// The highest ceiling of its pools.
    max_bytes: Option<u64>,
}

impl Measured {
    fn add(self, other: Self) -> Self {
        let took = if self.runs == 0 { other.took } else { self.took.zip(other.took).map(|(one, other)| one + other) };
        Self {
            gets: self.gets + other.gets,
            lost_seconds: self.lost_seconds + other.lost_seconds,
            seconds: self.seconds + other.seconds,
            took,
            runs: self.runs + other.runs,
            max_bytes: self.max_bytes.max(other.max_bytes),
        }
    }

    fn gets_each_second(&self) -> f64 {
        self.gets as f64 / self.seconds.max(1e-9)
    }
}

/// Runs the program for so long at most, with these variables.
///
/// # Errors
///
/// If it cannot be started, or shows no pool.
pub(super) fn measure(
    command: &[OsString],
    variables: &[(String, String)],
    length: Duration,
    folder: &Path,
) -> Result<Measured, Box<dyn Error>> {
    let [program, args @ ..] = command else { return Err("--run: name a program behind --".into()) };
    let socket = folder.join("run.sock");
    let mut child = Command::new(program);
    child.args(args).env("PINPOOL_SOCKET", &socket).envs(variables.iter().map(|(name, value)| (name, value)));
    // What it prints is not the answer of this command.
    let child = child.stdout(Stdio::null()).spawn();
    let mut child = child.map_err(|error| format!("{}: {error}", program.display()))?;
    let begun = Instant::now();
    let mut measured = Measured { runs: 1, ..Measured::default() };
    while begun.elapsed() < length {
        if child.try_wait()?.is_some() {
            measured.took = Some(begun.elapsed().as_secs_f64());
            break;
        }
        if let Ok(object) = socket.exists().then(|| statistics_of(&socket.to_string_lossy())).transpose()
            && let Some(object) = object
        {
            let sum = |path: &str| pools(&object).iter().filter_map(|pool| pool.pointer(path)?.as_f64()).sum::<f64>();
            let times = ["/requests/wait_time", "/memory/pin/time", "/memory/unpin/time", "/memory/remap/time"];
            measured.lost_seconds = times.iter().map(|time| sum(&format!("{time}/total_seconds"))).sum();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A sum of counts.
            let gets = sum("/requests/served") as u64;
            measured.max_bytes = pools(&object).iter().filter_map(|pool| pool["limits"]["max_bytes"].as_u64()).max();
            (measured.gets, measured.seconds) = (gets, begun.elapsed().as_secs_f64());
        }
        thread::sleep(LOOK_EVERY);
    }
    end(&mut child)?;
    if measured.gets == 0 {
        return Err("--run: the program showed no get of a pool: it is to use pinpool with the feature `observe`, and to run for some \
                    seconds"
            .into());
    }
    Ok(measured)
}

#[allow(unsafe_code)]
fn end(child: &mut Child) -> Result<(), Box<dyn Error>> {
    if child.try_wait()?.is_none() {
        // SAFETY: takes numbers alone; the process is a child that was not waited for.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
        let asked = Instant::now();
        while child.try_wait()?.is_none() && asked.elapsed() < PATIENCE {
            thread::sleep(LOOK_EVERY);
        }
        // Of one that has ended this is no error.
        let _ = child.kill();
    }
    child.wait()?;
    Ok(())
}

/// The program as it is and with the advice, in turns.
///
/// # Errors
///
/// Those of [`measure`].
pub(super) fn in_turns(
    command: &[OsString],
    advised: &[(String, String)],
    length: Duration,
    folder: &Path,
) -> Result<String, Box<dyn Error>> {
    let (mut before, mut after) = (Measured::default(), Measured::default());
    for _ in 0..TURNS {
        before = before.add(measure(command, &[], length / TURNS, folder)?);
        after = after.add(measure(command, advised, length / TURNS, folder)?);
    }
    let took = before.took.zip(after.took);
    let row = |name: &str, of: &Measured| {
        vec![
            name.to_owned(),
            format!("{:.1}", of.gets_each_second()),
            format!("{:.3}", of.lost_seconds / of.seconds.max(1e-9)),
            of.took
                .filter(|_| took.is_some())
                .map_or_else(|| "-".to_owned(), |took| format!("{:.1}", took / f64::from(of.runs))),
        ]
    };
    let head =
        ["measured", "gets a second", "seconds lost each second", "seconds to its end"].map(str::to_owned).to_vec();
    // A program that ends by itself is judged by when it does, another by how far it comes.
    let gain =
        took.map_or_else(|| after.gets_each_second() / before.gets_each_second(), |(before, after)| before / after);
    let table = columns(&[head, row("as given", &before), row("advised", &after)]);
    let ceiling =
        advised.iter().find(|(name, _)| name == "PINPOOL_MAX_BYTES").and_then(|(_, bytes)| bytes.parse().ok());
    let other = after.max_bytes.filter(|&own| ceiling.is_some_and(|advised: u64| own != advised)).map(|own| {
        format!("it ran under a ceiling of {own} bytes, and not under the advice: it sets its own, in its code or its variables\n")
    });
    let other = other.unwrap_or_default();
    Ok(format!("{table}the program runs at {gain:.2} times its speed with the advice\n{other}"))
}
