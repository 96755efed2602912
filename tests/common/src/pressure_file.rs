//! The file in which the kernel reports how long tasks wait for memory.

use std::path::PathBuf;

/// Such a file for `CodeOnlySettings::pressure`, and its folder.
#[derive(Debug)]
pub struct PressureFile(tempfile::TempDir);

impl PressureFile {
    /// No task waits.
    #[allow(clippy::new_without_default)] // It makes a folder.
    pub fn new() -> Self {
        let file = Self(tempfile::tempdir().unwrap());
        file.write(0.0, 0.0);
        file
    }

    /// Some tasks, and all tasks, wait for these percentages of the time.
    pub fn write(&self, some: f64, full: f64) {
        let line = |kind, share| format!("{kind} avg10={share:.2} avg60=0.00 avg300=0.00 total=0\n");
        std::fs::write(self.path(), line("some", some) + &line("full", full)).unwrap();
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("memory")
    }
}
