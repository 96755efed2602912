//! `pinpool bench`: what the pool costs on this machine, for machines without cargo.
//!
//! | file | owns |
//! | --- | --- |
//! | `hit` | a get and its put when the buffer is idle, beside the baselines |
//! | `keepers` | the pool and the baselines, behind one trait |
//! | `patterns` | who gets and who puts, on how many threads |
//! | `histogram` | percentiles of single operations |
//!
//! `keepers` and `patterns` serve the criterion benches too.

mod histogram;
mod hit;
mod keepers;
mod patterns;

use clap::{Args, Subcommand};

use crate::Failed;
use crate::screen::Screen;

/// Measures the pool on this machine
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Hit(hit::HitArgs),
}

pub(crate) fn run(args: &BenchArgs, screen: &Screen) -> Result<(), Failed> {
    match &args.what {
        What::Hit(args) => hit::run(args, screen),
    }
}
