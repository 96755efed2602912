//! `pinpool bench`: what the pool costs on this machine, for machines without cargo.
//!
//! | file | owns |
//! | --- | --- |
//! | `pin` | how fast each back-end pins |
//! | `stall` | what growth and give-back do to another thread's copies |
//! | `copy` | how fast buffers go to the device |
//! | `tracked` | what it costs to know when they arrived |
//! | `loader` | what a loader gets out of the pool |
//! | `feed` | its loop: producers, and a thread that copies |
//! | `far` | where those copy to, and by which call: the GPU, or the host sink |
//! | `asked` | what may be asked: values that mean something, and no more memory than there is |
//! | `sources` | the back-ends there are |
//! | `figure` | figures for people |
//! | `hit` | a get and its put when the buffer is idle, beside the baselines |
//! | `keepers` | the pool and the baselines, behind one trait |
//! | `patterns` | who gets and who puts, on how many threads |
//! | `histogram` | percentiles of single operations |
//!
//! `keepers` and `patterns` serve the criterion benches too.

mod asked;
mod copy;
mod far;
mod feed;
mod figure;
mod histogram;
mod hit;
mod keepers;
mod loader;
mod patterns;
mod pin;
mod sources;
mod stall;
mod tracked;

use clap::{Args, Subcommand};

use self::figure::NotMeasured;
use crate::ExitError;
use crate::terminal::Terminal;

/// Measures the pool on this machine
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Hit(hit::HitArgs),
    Pin(pin::PinArgs),
    Stall(stall::StallArgs),
    Copy(copy::CopyArgs),
    Loader(loader::LoaderArgs),
}

pub(crate) fn run(args: &BenchArgs, terminal: &Terminal) -> Result<(), ExitError> {
    match &args.what {
        What::Hit(args) => hit::run(args, terminal),
        What::Pin(args) => pin::run(args, terminal),
        What::Stall(args) => stall::run(args, terminal),
        What::Copy(args) => copy::run(args, terminal),
        What::Loader(args) => loader::run(args, terminal),
    }
}

/// Says why a bench could not be run.
fn failed(error: &NotMeasured, terminal: &Terminal) -> ExitError {
    terminal.message(error);
    match error {
        NotMeasured::Setting(_) => ExitError::Settings,
        NotMeasured::Missing(_) => ExitError::Failure,
        NotMeasured::Pool(error) => ExitError::from(error),
    }
}
