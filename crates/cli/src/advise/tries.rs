//! The costs of named settings: `pinpool advise --try`, and its former name `pinpool replay`.

use std::error::Error;
use std::path::Path;

use pinpool_os::format::Size;
use pinpool_replay::Replay;
use serde_json::json;

use super::AdviseArgs;
use super::costs::{Column, Costs, table};
use crate::files::{in_file, named};
use crate::input;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

impl AdviseArgs {
    /// Plays each trace under each of the settings, or as it was recorded. Exits with 1 if a trace is truncated.
    pub(super) fn show_costs(&self, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
        let sets = if self.replay { &self.set } else { &self.tries };
        // Invalid settings are refused before any file is read.
        sets.iter().try_for_each(Set::check_for_replay)?;
        let mut whole = true;
        for path in &self.traces {
            whole &= self.play(path, sets, terminal)?;
        }
        if whole { Ok(()) } else { Err(ExitError::Failure.into()) }
    }

    /// Returns whether the trace is whole.
    fn play(&self, path: &Path, sets: &[Set], terminal: &Terminal) -> Result<bool, Box<dyn Error>> {
        let as_given = [Set { text: "as given".to_owned(), ..Set::default() }];
        let workload = input::read_workload(path, |_| Ok(()))?;
        // The name of a trace is its file name up to the first dot.
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = file.split('.').next().unwrap_or_default();
        let notes = workload.warning.clone().into_iter().chain(workload.pools_note());
        notes.for_each(|note| terminal.message(named(path, &note)));
        let costs = Costs::of(&workload);
        let play = |Set { text, pairs }: &Set| -> Result<Column, Box<dyn Error>> {
            let replay = Replay::with_recorded_settings(&workload, pairs).map_err(|error| named(path, &error))?;
            let replay = Replay { source: self.source.unwrap_or_default(), ..replay };
            Ok(Column::play(text, &workload, &replay, &costs).map_err(|error| in_file(path, &error))?)
        };
        let played = if sets.is_empty() { &as_given } else { sets };
        let columns = played.iter().map(play).collect::<Result<Vec<_>, _>>()?;
        if let ([as_recorded], true, None) = (columns.as_slice(), sets.is_empty(), self.source) {
            workload.doubt(&as_recorded.outcome).iter().for_each(|doubt| terminal.message(named(path, doubt)));
        }
        if self.json {
            for column in &columns {
                let mut line = json!(column);
                (line["workload"], line["costs"]) = (name.into(), json!(costs));
                workload.pools_merged().into_iter().for_each(|pools| line["pools_merged"] = pools.into());
                terminal.print(line)?;
            }
        } else {
            let mut text = format!("{name}: requested at most {} at once\n", Size(workload.peak_requested_bytes()));
            text += &table(&columns.iter().collect::<Vec<_>>());
            text += &costs.line();
            terminal.print(text.trim_end())?;
        }
        Ok(workload.warning.is_none())
    }
}
