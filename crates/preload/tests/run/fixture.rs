//! Builds the programs, and runs them with and without the library.

use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use mock_driver::MockDriver;
use tempfile::TempDir;

/// A program that has not ended by then is stopped, and the test fails.
const PATIENCE: Duration = Duration::from_secs(300);

/// The folder where cargo puts this test and the libraries.
fn built_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

pub(crate) fn library() -> PathBuf {
    let library = built_folder().join("libpinpool_preload.so");
    assert!(library.exists(), "{}", library.display());
    library
}

/// The tool, if it was built.
pub(crate) fn tool() -> Option<PathBuf> {
    let tool = built_folder().parent()?.join("pinpool");
    if !tool.exists() {
        skipped("the tool is not built: cargo build --workspace --all-features");
    }
    tool.exists().then_some(tool)
}

/// Reports a skipped check on stderr, even if the output of tests is captured.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// How a program finds the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    Linked,
    Dlsym,
    ProcAddress,
    Runtime,
}

pub(crate) const LOOKUPS: [Lookup; 4] = [Lookup::Linked, Lookup::Dlsym, Lookup::ProcAddress, Lookup::Runtime];

/// A folder with the mock driver under the names of the driver, and the programs.
pub(crate) struct Built {
    folder: TempDir,
}

/// Returns the programs, which the first call builds with the C compiler that Rust links with.
pub(crate) fn build() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libcuda.so.1", "libcuda.so"] {
            symlink(MockDriver::library(), folder.path().join(name)).unwrap();
        }
        let built = Built { folder };
        built.compile("runtime.c", "libcudart.so", &["-shared", "-fPIC", "-ldl", "-lpthread"]);
        built.compile("steps.c", "steps", &["-ldl", "-lpthread"]);
        built.compile("steps.c", "linked", &["-DLINKED", "-L.", "-l:libcuda.so.1", "-ldl", "-lpthread"]);
        built.compile("steps.c", "runtime", &["-DRUNTIME", "-L.", "-lcudart", "-ldl", "-lpthread"]);
        built.compile("wrapper.c", "libwrapper.so", &["-shared", "-fPIC", "-ldl"]);
        built.compile("completed_events.c", "libcompleted_events.so", &["-shared", "-fPIC"]);
        built.compile("same_pid.c", "libsame_pid.so", &["-shared", "-fPIC"]);
        built.compile("inner.c", "libinner.so", &["-shared", "-fPIC"]);
        built.compile("outer.c", "libouter.so", &["-shared", "-fPIC", "-ldl"]);
        built.compile("outer.c", "libplugin.so", &["-shared", "-fPIC", "-ldl"]);
        built.compile("symbols.c", "symbols", &["-Wl,--no-as-needed", "-L.", "-louter", "-linner", "-ldl"]);
        built
    })
}

impl Built {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn compile(&self, source: &str, name: &str, arguments: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
        let mut command = Command::new("cc");
        command.args(["-Wall", "-Wextra", "-O1", "-o", name]).arg(source).args(arguments);
        let output = command.current_dir(self.path()).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A command that runs the steps `what` in a program that finds the driver in this way.
    pub(crate) fn command(&self, lookup: Lookup, what: &str) -> Command {
        let (program, argument) = match lookup {
            Lookup::Linked => ("linked", "linked"),
            Lookup::Dlsym => ("steps", "dlsym"),
            Lookup::ProcAddress => ("steps", "query"),
            Lookup::Runtime => ("runtime", "dlsym"),
        };
        let mut command = Command::new(self.path().join(program));
        command.args([argument, what]);
        self.environment(&mut command);
        command
    }

    /// With the mock driver, which delays copies, and without settings from the environment.
    pub(crate) fn environment(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PINPOOL_")) {
            command.env_remove(name);
        }
        command.env_remove("RUST_LOG").env_remove("LD_PRELOAD").env("LD_LIBRARY_PATH", self.path());
        command.env("MOCK_DRIVER_REPORT", "stderr").env("MOCK_DRIVER_COPY_DELAY", "5");
    }
}

/// The same command with the library preloaded and its log at `log`.
pub(crate) fn preload(mut command: Command, log: &Path) -> Command {
    command.env("LD_PRELOAD", library()).env("PINPOOL_PRELOAD_LOG", log).env("PINPOOL_MAX_BYTES", "64MiB");
    command
}

/// What a program wrote.
#[derive(Debug)]
pub(crate) struct ProgramRun {
    pub(crate) out: String,
    pub(crate) err: String,
}

impl ProgramRun {
    /// How often the driver's function was called, by the mock driver's report.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let calls = self.err.split_once("calls: ").unwrap_or_else(|| panic!("no report: {self:?}")).1;
        let mut words = calls.split_whitespace();
        words
            .find(|word| *word == name)
            .and_then(|_| words.next())
            .map_or(0, |count| count.trim_end_matches(',').parse().unwrap())
    }

    /// Returns the number of calls that pin memory.
    pub(crate) fn pin_calls(&self) -> u64 {
        self.calls("cuMemHostAlloc") + self.calls("cuMemAllocHost_v2")
    }
}

/// Runs a command that must end in time and succeed.
pub(crate) fn run_to_success(command: &mut Command) -> ProgramRun {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (until, mut timed_out) = (Instant::now() + PATIENCE, false);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            timed_out = true;
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let ran = ProgramRun { out, err };
    assert!(!timed_out && output.status.success(), "{command:?}: {}, timed out: {timed_out}\n{ran:?}", output.status);
    ran
}

/// The lines of a log.
pub(crate) fn log_of(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
