//! What happened, told on stderr at the end of a program that cannot turn knobs and ask.

use std::fmt::Write as _;

use crate::{faults, ledger};

/// From now on the end of the process tells.
pub(crate) fn at_exit() {
    // SAFETY: a plain function that lives as long as the process: nobody unloads a driver.
    let _untold = unsafe { libc::atexit(tell) };
}

extern "C" fn tell() {
    eprintln!("{}", text(&ledger::figures(), &faults::all_calls()));
}

fn text(figures: &ledger::Figures, calls: &[(&str, u64)]) -> String {
    let ledger::Figures { frees_with_work_in_flight, wrong_uses, peak_pinned_bytes, .. } = figures;
    let mut text = format!(
        "driver double: {frees_with_work_in_flight} frees with work in flight, {wrong_uses} wrong uses, \
         {peak_pinned_bytes} bytes pinned at most; calls:"
    );
    for (name, count) in calls {
        let _infallible = write!(text, " {name} {count}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_be_nothing_comes_first() {
        let figures = ledger::Figures { frees_with_work_in_flight: 3, peak_pinned_bytes: 4096, ..Default::default() };
        assert_eq!(
            text(&figures, &[("cuInit", 1), ("cuMemFreeHost", 3)]),
            "driver double: 3 frees with work in flight, 0 wrong uses, 4096 bytes pinned at most; calls: cuInit 1 cuMemFreeHost 3"
        );
    }
}
