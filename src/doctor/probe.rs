//! One question to the driver, asked in this process or, by the caller of [`examine_apart`](super::examine_apart), in another.
//!
//! A driver that ends the process, or never answers, is then a finding, and is not asked again in this process.

use std::path::Path;

use crate::backend::{self, PinOptions, Source, trial};
use crate::config::text::format_about;
use crate::config::{Config, Preset};
use crate::error::SourceError;
use crate::finding::{Finding, Level};
use crate::pool::{ceiling_in_bytes, pin_threads};

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
    Some(encode(&tried_here(name, config, &backend::gpu(config.device))))
}

/// Asks the question of this name in another process: the text of the answer, or how that process ended.
pub(super) type Apart<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// How questions are asked: in this process, or in others.
#[derive(Clone, Copy)]
pub(super) struct Asker<'a>(pub(super) Option<Apart<'a>>);

/// The answer to a question.
pub(super) struct Answer {
    pub(super) finding: Finding,
    /// The process that asked did not survive it: it is not to be asked here.
    pub(super) is_deadly: bool,
}

impl Asker<'_> {
    /// Whether there is a device.
    pub(super) fn gpu(self, device: u32) -> Answer {
        self.ask(GPU, || backend::gpu(device))
    }

    /// What a back-end does with a little memory.
    pub(super) fn backend(self, name: &'static str, config: &Config, gpu: &Answer) -> Answer {
        if gpu.is_deadly {
            let finding = Finding::note(name, "not tried, since the driver does not answer");
            return Answer { finding, is_deadly: true };
        }
        self.ask(name, || tried_here(name, config, &gpu.finding))
    }

    fn ask(self, name: &'static str, here: impl FnOnce() -> Finding) -> Answer {
        let Some(apart) = self.0 else { return Answer { finding: here(), is_deadly: false } };
        let how = match apart(name).map(|text| decode(name, &text)) {
            Ok(Some(finding)) => return Answer { finding, is_deadly: false },
            Ok(None) => "gave no answer".to_owned(),
            Err(how) => how,
        };
        let finding = Finding::error(name, format!("the process that tried it {how}"));
        Answer { finding: finding.remedy("update the driver, or do without what it fails at"), is_deadly: true }
    }
}

/// The settings of a pool, as far as they say how memory is pinned.
pub(super) fn options<'a>(config: &Config, not_here: &'a [(&'static str, String)]) -> PinOptions<'a> {
    PinOptions {
        root: Path::new("/"),
        device: config.device,
        node: config.numa_node,
        threads: pin_threads(config),
        arena: config.preset == Preset::Adaptive,
        max_bytes: ceiling_in_bytes(config).0,
        handle_types: config.handle_types,
        hugetlb: config.hugetlb,
        write_combined: config.write_combined,
        not_here,
    }
}

fn tried_here(name: &'static str, config: &Config, gpu: &Finding) -> Finding {
    let insists = config.backend.name() == name;
    match backend::driver_source(name, options(config, &[]), insists) {
        Ok(source) => match trial::of_driver(&*source, config.device, None).transpose() {
            Some(tried) => after_trial(name, &*source, tried, Level::Warning),
            None => Finding::note(name, "a capture forbids its trial at this moment"),
        },
        Err(_) if gpu.level != Level::Ok => Finding::note(name, "needs a GPU and its driver"),
        Err(why) => Finding::warning(name, why),
    }
}

/// The finding after the trial of `source`, of this level if it failed.
pub(super) fn after_trial(
    name: &'static str,
    source: &dyn Source,
    tried: Result<(usize, std::time::Duration), SourceError>,
    level: Level,
) -> Finding {
    match tried {
        // Pages that are not locked come when they are touched.
        Ok((bytes, _)) if !source.is_pinned() => {
            Finding::ok(name, format!("took {} and gave it back", format_about(bytes as u64)))
        }
        Ok((bytes, took)) => {
            let (bytes, millis) = (format_about(bytes as u64), took.as_secs_f64() * 1e3);
            Finding::ok(name, format!("took {bytes} in {millis:.2} ms and gave it back"))
        }
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
            let found = finding.found.replace('\n', " ");
            assert_eq!(decode("vmm", &encode(&finding)), Some(Finding { found, ..finding }));
        }
        for text in ["", "ok", "fine\nfound\n\n"] {
            assert_eq!(decode("vmm", text), None, "{text:?}");
        }
    }
}
