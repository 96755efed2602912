//! Programs in C and C++ that link to the installed files, as they are and under AddressSanitizer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::fixture::{SANITIZERS, has_sanitizers, is_here};

/// A compiler with the strictest warnings.
pub(crate) fn compiler(name: &str) -> Command {
    let mut command = Command::new(name);
    command.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-O1"]);
    command
}

pub(crate) fn header_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// The folder where cargo puts this test and the libraries.
fn built_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

pub(crate) fn library() -> PathBuf {
    built_folder().join("libpinpool_c.so")
}

/// Runs a command that must succeed, and returns what it printed.
pub(crate) fn ran(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// Where `install.sh` has put what was built.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = INSTALLED.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install.sh");
        ran(Command::new("sh").arg(script).arg(folder.path()).env("PINPOOL_LIBRARY_DIR", built_folder()));
        // Without these links, the programs would silently be linked with the static library.
        let shared = folder.path().join("lib/libpinpool.so").canonicalize().unwrap();
        assert_eq!(shared.file_name().unwrap().to_str(), Some(concat!("libpinpool.so.", env!("CARGO_PKG_VERSION"))));
        assert!(folder.path().join("lib/libpinpool.so.0").exists());
        folder
    });
    folder.path()
}

/// Compiles and runs a program below `capi`, plainly and if `is_sanitized` with the sanitizers. Returns what each run printed.
fn compiled_and_run(name: &str, standard: &str, source: &str, is_sanitized: bool) -> Vec<String> {
    if !is_here(name) {
        return Vec::new();
    }
    let (prefix, folder) = (installed(), tempfile::tempdir().unwrap());
    let run = |options: Option<&str>| {
        let program = folder.path().join("program");
        let mut command = compiler(name);
        command.arg(standard).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source)).args(options);
        command.arg("-I").arg(prefix.join("include")).arg("-L").arg(prefix.join("lib"));
        ran(command.args(["-lpinpool", "-lpthread", "-o"]).arg(&program));
        ran(Command::new(&program).env("LD_LIBRARY_PATH", prefix.join("lib")).env("PINPOOL_BACKEND", "heap"))
    };
    let sanitized = (is_sanitized && has_sanitizers(name)).then_some(Some(SANITIZERS));
    [Some(None), sanitized].into_iter().flatten().map(run).collect()
}

#[test]
fn the_loader_in_c_requests_fills_and_returns_in_eight_threads() {
    for printed in compiled_and_run("cc", "-std=c99", "examples/loader.c", true) {
        assert!(printed.contains("8 threads, 8000 batches") && printed.contains("\"returned\":8000"), "{printed}");
    }
}

#[test]
fn the_classes_for_cpp_put_their_buffers_and_serve_containers() {
    for printed in compiled_and_run("c++", "-std=c++17", "examples/containers.cpp", true) {
        assert!(printed.contains("sum 499500"), "{printed}");
    }
}

#[test]
fn misuse_in_c_is_a_status_and_no_crash() {
    compiled_and_run("cc", "-std=c99", "tests/programs/misuse.c", true);
}

#[test]
fn a_forked_child_is_refused_and_opens_pools_of_its_own() {
    // The locks of AddressSanitizer's own allocator stay locked in a child if another thread of the parent held them (GCC 12:
    // in one of 20 runs).
    compiled_and_run("cc", "-std=c99", "tests/programs/fork.c", false);
}

#[test]
fn a_process_may_end_without_a_close() {
    for printed in compiled_and_run("cc", "-std=c99", "tests/programs/exit.c", true) {
        assert_eq!(printed, "ends\n");
    }
}

#[test]
fn address_sanitizer_sees_a_use_after_the_return_and_behind_the_length() {
    if !is_here("cc") || !has_sanitizers("cc") {
        return;
    }
    let (prefix, folder) = (installed(), tempfile::tempdir().unwrap());
    let program = folder.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/poison.c");
    let mut command = compiler("cc");
    command.args(["-std=c99", SANITIZERS]).arg(source).arg("-I").arg(prefix.join("include"));
    ran(command.arg("-L").arg(prefix.join("lib")).arg("-lpinpool").arg("-o").arg(&program));
    let run = |mode: &str| {
        let mut command = Command::new(&program);
        command.arg(mode).env("LD_LIBRARY_PATH", prefix.join("lib")).output().unwrap()
    };
    for mode in ["right", "zeroed", "adopted", "cleared"] {
        let output = run(mode);
        assert!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for mode in ["after put", "behind the length", "behind a shorter one"] {
        let output = run(mode);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("use-after-poison"), "{mode}: {said}");
    }
}

#[test]
fn a_package_for_cmake_serves_the_major_version_as_the_header_promises() {
    let file = installed().join("lib/cmake/pinpool/pinpoolConfigVersion.cmake");
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    assert!(std::fs::read_to_string(file).unwrap().contains(&format!("MATCHES \"^{major}([.]|$)\"")));
}

#[test]
fn cmake_finds_both_libraries() {
    if !is_here("cc") || !is_here("cmake") {
        return;
    }
    let (prefix, folder) = (installed(), tempfile::tempdir().unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/misuse.c");
    let lists = format!(
        "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(pinpool 0.0.9 CONFIG REQUIRED)\n\
         foreach(kind pinpool static)\n  add_executable(with_${{kind}} \"{}\")\n  \
         target_link_libraries(with_${{kind}} pinpool::${{kind}} pthread)\nendforeach()\n",
        source.display()
    );
    std::fs::write(folder.path().join("CMakeLists.txt"), lists).unwrap();
    let build = folder.path().join("build");
    let found = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    ran(Command::new("cmake").arg("-S").arg(folder.path()).arg("-B").arg(&build).arg(found));
    ran(Command::new("cmake").arg("--build").arg(&build));
    for kind in ["pinpool", "static"] {
        ran(&mut Command::new(build.join(format!("with_{kind}"))));
    }
    let later = "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(pinpool 0.2 CONFIG REQUIRED)\n";
    std::fs::write(folder.path().join("CMakeLists.txt"), later).unwrap();
    let mut other = Command::new("cmake");
    let other = other.arg("-S").arg(folder.path()).arg("-B").arg(folder.path().join("other"));
    assert!(!other.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())).output().unwrap().status.success());
}

#[test]
fn the_archive_links_with_what_the_pc_file_says() {
    if !is_here("cc") || !is_here("pkg-config") {
        return;
    }
    let (prefix, folder) = (installed(), tempfile::tempdir().unwrap());
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let flags = ran(command.args(["--static", "--cflags", "--libs", "pinpool"]));
    assert!(flags.contains(&*prefix.join("include").to_string_lossy()), "{flags}");
    let archive = prefix.join("lib/libpinpool.a");
    let flags = flags.split_whitespace().map(|flag| match flag {
        "-lpinpool" => archive.to_str().unwrap(),
        flag => flag,
    });
    let program = folder.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/misuse.c");
    ran(compiler("cc").arg("-std=c99").arg(source).args(flags).arg("-o").arg(&program));
    ran(&mut Command::new(&program));
}
