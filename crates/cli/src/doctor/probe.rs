//! One question to the driver, asked in a process of its own, and its answer as text.
//!
//! A driver that ends that process, or never answers, is a finding, and is not asked again in this process.

use pinpool::SourceError;
use pinpool::source::Source;
use pinpool::unstable::backend::{self, Trial};
use pinpool::unstable::config::Config;
use pinpool::unstable::{Finding, Level};
use pinpool_cli::table::format_about;

/// The question whether there is a device.
pub(super) const GPU: &str = "gpu";
/// The back-ends of the driver, best first.
pub(super) const BACKENDS: [&str; 3] = ["vmm", "register", "cuda"];

/// The answer to the question of this name, as text; `None` if there is none of this name.
pub(super) fn answer(name: &str, config: &Config) -> Option<String> {
    if name == GPU {
        return Some(encode(&backend::gpu(config.device)));
    }
    let name = BACKENDS.into_iter().find(|backend| *backend == name)?;
    Some(encode(&tried_here(name, config)))
}

/// Asks the question of this name in another process: the text of the answer, or how that process ended.
pub(super) type Apart<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// Asks the questions in other processes.
#[derive(Clone, Copy)]
pub(super) struct Asker<'a>(pub(super) Apart<'a>);

/// The answer to a question.
pub(super) struct Answer {
    pub(super) finding: Finding,
    /// The process that asked did not survive it: it is not to be asked here.
    pub(super) is_deadly: bool,
}

impl Asker<'_> {
    /// Whether there is a device.
    pub(super) fn gpu(self) -> Answer {
        self.ask(GPU)
    }

    /// What a back-end does with a little memory.
    pub(super) fn backend(self, name: &'static str, gpu: &Answer) -> Answer {
        if gpu.is_deadly {
            let finding = Finding::note(name, "not tried, since the driver does not answer");
            return Answer { finding, is_deadly: true };
        }
        self.ask(name)
    }

    fn ask(self, name: &'static str) -> Answer {
        let how = match (self.0)(name).map(|text| decode(name, &text)) {
            Ok(Some(finding)) => return Answer { finding, is_deadly: false },
            Ok(None) => "gave no answer".to_owned(),
            Err(how) => how,
        };
        let finding = Finding::error(name, format!("the process that tried it {how}"));
        Answer { finding: finding.remedy("update the driver, or do without what it fails at"), is_deadly: true }
    }
}

fn tried_here(name: &'static str, config: &Config) -> Finding {
    match config.driver_source(name) {
        Ok(source) => tried(name, &*source, config.device, Level::Warning),
        Err(finding) => finding,
    }
}

/// The finding after a trial of `source`, of this level if it fails.
pub(super) fn tried(name: &'static str, source: &dyn Source, device: u32, level: Level) -> Finding {
    match backend::try_out(source, device) {
        // Pages that are not locked come when they are touched.
        Ok(Some(Trial { bytes, .. })) if !source.is_pinned() => {
            Finding::ok(name, format!("took {} and gave it back", format_about(bytes as u64)))
        }
        Ok(Some(Trial { bytes, took, .. })) => {
            let (bytes, millis) = (format_about(bytes as u64), took.as_secs_f64() * 1e3);
            Finding::ok(name, format!("took {bytes} in {millis:.2} ms and gave it back"))
        }
        Ok(None) => Finding::note(name, "a capture forbids its trial at this moment"),
        Err(error) => of_error(name, level, error),
    }
}

pub(super) fn of_error(check: &'static str, level: Level, error: SourceError) -> Finding {
    let (found, remedy) = error.split();
    remedy.into_iter().fold(Finding::new(check, level, found), Finding::remedy)
}

/// Three lines: level, what was found, what to do.
fn encode(finding: &Finding) -> String {
    let line = |text: &str| text.replace(['\n', '\r'], " ");
    let remedy = finding.remedy.as_deref().unwrap_or_default();
    format!("{}\n{}\n{}\n", finding.level.name(), line(&finding.found), line(remedy))
}

fn decode(check: &'static str, text: &str) -> Option<Finding> {
    let mut lines = text.lines();
    let (level, found) = (lines.next()?, lines.next()?);
    let levels = [Level::Ok, Level::Note, Level::Warning, Level::Error];
    let level = levels.into_iter().find(|one| one.name() == level)?;
    let finding = Finding::new(check, level, found);
    Some(match lines.next() {
        Some(remedy) if !remedy.is_empty() => finding.remedy(remedy),
        _ => finding,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_survives_its_way_between_processes() {
        for finding in [
            Finding::ok("vmm", "took 2 MiB"),
            Finding::warning("vmm", "one\nline").remedy("do this"),
            Finding::error("vmm", ""),
        ] {
            let mut expected = finding.clone();
            expected.found = finding.found.replace('\n', " ");
            assert_eq!(decode("vmm", &encode(&finding)), Some(expected));
        }
        for text in ["", "ok", "fine\nfound\n\n"] {
            assert_eq!(decode("vmm", text), None, "{text:?}");
        }
    }
}
