//! Runs a test again in its own process, and checks in a child of `fork`.
#![allow(unsafe_code)] // Forks.

use std::any::type_name;
use std::env;
use std::ffi::OsStr;
use std::process::Command;

/// Names the test that a process was started for.
const ALONE: &str = "TEST_ALONE";

/// Runs `test` in a process if no other test runs. The closure must be written in the test function itself: its type
/// carries the name of that function.
pub fn alone<F: FnOnce()>(test: F) {
    alone_in(Command::new(env::current_exe().unwrap()), test);
}

/// Runs `test` as [`alone`] does, in an environment with `vars` as its only pinpool variables.
pub fn alone_with<F: FnOnce()>(vars: impl IntoIterator<Item = (&'static str, impl AsRef<OsStr>)>, test: F) {
    let mut command = Command::new(env::current_exe().unwrap());
    env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PINPOOL_")).for_each(|(name, _)| {
        command.env_remove(name);
    });
    command.envs(vars);
    alone_in(command, test);
}

fn alone_in<F: FnOnce()>(mut command: Command, test: F) {
    let (_crate, name) = type_name::<F>().trim_end_matches("::{{closure}}").split_once("::").unwrap();
    if env::var(ALONE).is_ok_and(|alone| alone == name) {
        return test();
    }
    let child = command.args(["--exact", name, "--nocapture"]).env(ALONE, name).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("1 passed"), "{name}, {}: {out}{err}", child.status);
}

/// A child of this process; killed when this is dropped.
#[derive(Debug)]
pub struct Child(libc::pid_t);

impl Child {
    /// Runs `work` in a child of `fork`.
    pub fn new(work: impl FnOnce()) -> Self {
        // SAFETY: the child runs `work` on its one thread and exits without unwinding.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: ends the child if it hangs.
            unsafe { libc::alarm(180) };
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: ends the child without running its parent's exit handlers.
            unsafe { libc::_exit(i32::from(worked.is_err())) };
        }
        Self(child)
    }

    /// The process ID.
    pub fn id(&self) -> libc::pid_t {
        self.0
    }

    /// Waits for the end of the process, and returns its wait status.
    pub fn wait(&mut self) -> i32 {
        let mut status = 0;
        // SAFETY: a place for a number, and a child of this process.
        unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        self.0 = 0;
        status
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.0 > 0 {
            // SAFETY: a child of this process that has not been waited for.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
            self.wait();
        }
    }
}

/// Runs `checks` in a child of `fork`; each returns its name and whether it holds.
pub fn in_a_child(checks: impl FnOnce() -> Vec<(&'static str, bool)>) {
    let status = Child::new(|| {
        let broken: Vec<_> = checks().into_iter().filter(|(_, held)| !held).collect();
        assert!(broken.is_empty(), "{broken:?}");
    })
    .wait();
    assert_eq!(status, 0, "the wait status of the child, which prints what does not hold");
}
