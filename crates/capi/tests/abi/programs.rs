//! Programs in C and C++ that link to the installed files, as they are and under AddressSanitizer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::fixture::{SANITIZERS, compiler, crate_folder, has_sanitizers, is_installed, language, run_to_success};

/// The folder where cargo puts this test and the libraries.
fn built_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

pub(crate) fn library() -> PathBuf {
    built_folder().join("libpinpool_c.so")
}

/// Installs the build in `folder`, with the library folder `libdir`, then moves the installation and returns its new folder.
fn install(folder: &Path, libdir: &str) -> PathBuf {
    let [first, moved] = ["first", "moved"].map(|name| folder.join(name));
    let mut command = Command::new("sh");
    command.arg(crate_folder().join("install.sh")).arg(&first).env("PINPOOL_LIBRARY_DIR", built_folder());
    run_to_success(command.envs((libdir != "lib").then_some(("LIBDIR", libdir))));
    std::fs::rename(first, &moved).unwrap();
    // Without these links, the programs would silently be linked with the static library.
    let shared = moved.join(libdir).join("libpinpool.so").canonicalize().unwrap();
    assert_eq!(shared.file_name().unwrap().to_str(), Some(concat!("libpinpool.so.", env!("CARGO_PKG_VERSION"))));
    let expected =
        [&format!("{libdir}/libpinpool.so.0"), "share/doc/pinpool/LICENSE-MIT", "share/doc/pinpool/LICENSE-APACHE"];
    assert!(expected.iter().all(|file| moved.join(file).exists()));
    moved
}

fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| install(&tempfile::tempdir().unwrap().keep(), "lib"))
}

/// Compiles a program below `capi` with the installed library.
fn compile(program: &Path, source: &str, options: Option<&str>) {
    let (prefix, (name, standard)) = (installed(), language(source));
    let mut command = compiler(name);
    command.arg(standard).arg(crate_folder().join(source)).args(options);
    command.arg("-I").arg(prefix.join("include")).arg("-L").arg(prefix.join("lib"));
    run_to_success(command.args(["-lpinpool", "-lpthread", "-o"]).arg(program));
}

/// The command that runs a compiled program.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", installed().join("lib")).env("PINPOOL_BACKEND", "heap");
    command
}

/// Compiles and runs a program below `capi`, and again with the sanitizers if `is_sanitized`. Returns what each run printed.
fn compiled_and_run(source: &str, is_sanitized: bool, argument: Option<&str>) -> Vec<String> {
    let (name, _) = language(source);
    if !is_installed(name) {
        return Vec::new();
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let print = |options| {
        compile(&program, source, options);
        run_to_success(run(&program).args(argument))
    };
    let sanitized = (is_sanitized && has_sanitizers(name)).then_some(Some(SANITIZERS));
    [Some(None), sanitized].into_iter().flatten().map(print).collect()
}

#[test]
fn the_c_threads_example_runs_in_eight_threads() {
    for printed in compiled_and_run("examples/threads.c", true, None) {
        assert!(printed.contains("8 threads, 8000 batches") && printed.contains("\"returned\":8000"), "{printed}");
    }
}

#[test]
fn the_cpp_classes_return_buffers_and_serve_containers() {
    let include = format!("-I{}", crate_folder().join("include").display());
    let options = ["-std=c++14", &include, "-fsyntax-only", "-include", "pinpool.hpp", "-xc++", "/dev/null"];
    let old = Command::new("c++").args(options).output();
    assert!(old.is_err() || String::from_utf8_lossy(&old.unwrap().stderr).contains("pinpool.hpp needs C++17"));
    for printed in compiled_and_run("tests/programs/classes.cpp", true, None) {
        assert!(printed.contains("sum 499500"), "{printed}");
    }
}

#[test]
fn c_programs_misuse_a_pool_close_it_fork_and_exit() {
    compiled_and_run("tests/programs/misuse.c", true, None);
    compiled_and_run("tests/programs/close.c", true, None);
    // The locks of AddressSanitizer's own allocator stay locked in a child if another thread of the parent held them (GCC 12:
    // in one of 20 runs).
    compiled_and_run("tests/programs/fork.c", false, None);
    for printed in compiled_and_run("tests/programs/exit.c", true, None) {
        assert_eq!(printed, "ends\n");
    }
}

#[test]
fn the_c_benchmark_runs() {
    let printed = compiled_and_run("benches/cost.c", false, Some("1000"));
    assert!(printed.iter().all(|printed| printed.contains("4 threads: ")), "{printed:?}");
}

#[test]
fn address_sanitizer_detects_use_after_return_and_overflow() {
    if !is_installed("cc") || !has_sanitizers("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    compile(&program, "tests/programs/poison.c", Some(SANITIZERS));
    let run = |mode: &str| run(&program).arg(mode).output().unwrap();
    for mode in ["right", "zeroed", "adopted", "trimmed"] {
        let output = run(mode);
        assert!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for mode in ["after put", "past the length", "past a shorter length"] {
        let output = run(mode);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("use-after-poison"), "{mode}: {said}");
    }
}

#[test]
fn the_cmake_package_accepts_its_major_version() {
    let file = installed().join("lib/cmake/pinpool/pinpoolConfigVersion.cmake");
    let matches = concat!("MATCHES \"^", env!("CARGO_PKG_VERSION_MAJOR"), "([.]|$)\"");
    assert!(std::fs::read_to_string(file).unwrap().contains(matches));
}

#[test]
fn cmake_finds_both_libraries() {
    if !is_installed("cc") || !is_installed("cmake") {
        return;
    }
    let (prefix, folder) = (installed(), tempfile::tempdir().unwrap());
    let source = crate_folder().join("tests/programs/misuse.c");
    let lists = format!(
        "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(pinpool 0.0.9 CONFIG REQUIRED)\n\
         foreach(kind pinpool pinpool_static)\n  add_executable(with_${{kind}} \"{}\")\n  \
         target_link_libraries(with_${{kind}} pinpool::${{kind}} pthread)\nendforeach()\n",
        source.display()
    );
    std::fs::write(folder.path().join("CMakeLists.txt"), lists).unwrap();
    let build = folder.path().join("build");
    let found = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    run_to_success(Command::new("cmake").arg("-S").arg(folder.path()).arg("-B").arg(&build).arg(found));
    run_to_success(Command::new("cmake").arg("--build").arg(&build));
    for kind in ["pinpool", "pinpool_static"] {
        run_to_success(&mut Command::new(build.join(format!("with_{kind}"))));
    }
    let later = "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(pinpool 0.2 CONFIG REQUIRED)\n";
    std::fs::write(folder.path().join("CMakeLists.txt"), later).unwrap();
    let mut other = Command::new("cmake");
    let other = other.arg("-S").arg(folder.path()).arg("-B").arg(folder.path().join("other"));
    assert!(!other.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())).output().unwrap().status.success());
}

#[test]
fn the_static_library_links_with_the_pkg_config_flags() {
    if !is_installed("cc") || !is_installed("pkg-config") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let lib = install(folder.path(), "lib/nested").join("lib/nested");
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
    let flags = run_to_success(command.args(["--static", "--cflags", "--libs", "pinpool"]));
    assert!(flags.contains(&*lib.to_string_lossy()), "{flags}");
    let in_usr = [("DESTDIR", folder.path()), ("PINPOOL_LIBRARY_DIR", &built_folder())];
    run_to_success(Command::new("sh").arg(crate_folder().join("install.sh")).arg("/usr").envs(in_usr));
    let pc = std::fs::read_to_string(folder.path().join("usr/lib/pkgconfig/pinpool.pc")).unwrap();
    assert!(pc.starts_with("prefix=/usr\n"), "{pc}");
    let archive = format!("{}/libpinpool.a", lib.display());
    let flags = flags.split_whitespace().map(|flag| if flag == "-lpinpool" { &*archive } else { flag });
    let program = folder.path().join("program");
    let source = crate_folder().join("tests/programs/misuse.c");
    run_to_success(compiler("cc").arg("-std=c99").arg(source).args(flags).arg("-o").arg(&program));
    run_to_success(&mut Command::new(&program));
}
