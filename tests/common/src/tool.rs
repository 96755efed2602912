//! The tool as a user meets it: exit status, stdout and stderr of a built program.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;

use crate::until::until;

/// The result of one run.
#[derive(Debug)]
pub struct Ran {
    status: ExitStatus,
    /// The whole output.
    pub stdout: String,
    /// The log.
    pub stderr: String,
}

impl Ran {
    /// The exit status.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("ended by a signal: {:?}\n{}", self.status, self.stderr))
    }

    /// Checks the exit status.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "{}{}", self.stdout, self.stderr);
        self
    }

    /// Checks the exit status of a run that has no result.
    #[track_caller]
    pub fn refuses(self, code: i32) -> Self {
        assert_eq!(self.stdout, "", "{}", self.stderr);
        self.exits(code)
    }

    /// The one JSON object on stdout.
    pub fn figures(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{}{}", self.stdout, self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Checks that the log contains `words`.
    #[track_caller]
    pub fn check_stderr(&self, words: &str) {
        assert!(self.stderr.contains(words), "no \"{words}\" in:\n{}", self.stderr);
    }
}

/// A program on the `heap` backend, without the environment of the test.
pub fn program(path: &str, args: &[&str]) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("PINPOOL_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command.env("PINPOOL_BACKEND", "heap").args(args).stdin(Stdio::null());
    command
}

/// Runs a program that does not panic.
pub fn finish(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let ran = Ran {
        status: output.status,
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    assert!(!ran.stderr.contains("panicked") && !ran.stdout.contains("panicked"), "{}", ran.stderr);
    ran
}

/// Interrupts a program after its first log line; returns its log and stdout. The handler is installed before that line.
pub fn interrupted(command: &mut Command) -> (String, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let (mut log, mut stdout) = (String::new(), String::new());
    stderr.read_line(&mut log).unwrap();
    signal("INT", &child);
    stderr.read_to_string(&mut log).unwrap();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{log}");
    (log, stdout)
}

/// Sends a signal.
pub fn signal(name: &str, child: &Child) {
    assert!(Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap().success());
}

/// Waits for the end of `child`, which it kills if it hangs.
pub fn ended(what: &str, child: Child) -> ExitStatus {
    struct Killed(Child);
    impl Drop for Killed {
        fn drop(&mut self) {
            let _ended_already = self.0.kill();
        }
    }
    let (mut child, mut status) = (Killed(child), None);
    until(what, || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// A value that must be a whole number.
pub fn number(figures: &Value, name: &str) -> u64 {
    figures[name].as_u64().unwrap_or_else(|| panic!("no {name} in {figures}"))
}
