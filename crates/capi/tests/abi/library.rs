//! The files: exported names, SONAME, the header in C99 and C++11.

use std::collections::BTreeSet;
use std::process::Command;

use crate::fixture::{compiler, crate_folder, is_installed, language, run_to_success};
use crate::programs::library;

#[test]
fn only_the_names_of_the_header_are_exported() {
    let header = std::fs::read_to_string(crate_folder().join("include/pinpool.h")).unwrap();
    if !is_installed("nm") {
        return;
    }
    let text = run_to_success(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(library()));
    let exported: BTreeSet<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let declared = header.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
    // `pp_may_put_after` is inline.
    let is_own = |it: &&str| it.starts_with("pp_") && header.contains(&format!("{it}(")) && !it.ends_with("_after");
    let declared: BTreeSet<_> = declared.filter(is_own).collect();
    assert_eq!(exported, declared);
    assert!(declared.len() >= 21, "{declared:?}");
}

#[test]
fn the_library_has_its_soname_and_is_never_unloaded() {
    if !is_installed("readelf") {
        return;
    }
    let text = run_to_success(Command::new("readelf").arg("-d").arg(library()));
    // NODELETE: a thread of the library may run until the process ends.
    assert!(text.contains("[libpinpool.so.0]") && text.contains("NODELETE"), "{text}");
}

#[test]
fn the_headers_warn_only_about_ignored_results() {
    let folder = tempfile::tempdir().unwrap();
    let ignored =
        "#include <pinpool.h>\nvoid f(pp_pool *p, void *b) { pp_put(p, b); pp_put_after_stream(p, b, NULL); }\n";
    let sources = [
        ("cc", "c", "-std=c99", "#include <pinpool.h>\nint (*f)(void); pp_status s = PP_OK;\n"),
        ("cc", "c", "-std=c17", "#include <pinpool.h>\n#include <pinpool.h>\nint x = PP_VERSION_MAJOR;\n"),
        ("cc", "c", "-std=c99", ignored),
        ("c++", "cpp", "-std=c++11", "#include <pinpool.h>\npp_status s = PP_OK; const char *v = pp_version();\n"),
        ("c++", "cpp", "-std=c++17", "#include <pinpool.hpp>\npinpool::buffer b;\n"),
        ("c++", "cpp", "-std=c++20", "#include <pinpool.hpp>\npinpool::request_options o{.tag = \"decode\"};\n"),
    ];
    for (number, (name, ending, standard, source)) in (0..).zip(sources).filter(|(_, source)| is_installed(source.0)) {
        let path = folder.path().join(format!("{number}.{ending}"));
        std::fs::write(&path, source).unwrap();
        let mut command = compiler(name);
        command.current_dir(crate_folder()).args([standard, "-Iinclude", "-c", "-o", "/dev/null"]).arg(&path);
        let output = command.env("LC_ALL", "C").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let refused = [!output.status.success(), said.matches(" error: ").count() == 1, said.contains("result")];
        assert_eq!(refused, [source == ignored; 3], "{said}");
    }
}

#[test]
fn the_examples_in_markdown_compile() {
    let given = "#ifdef __cplusplus\n#include <cstring>\n#include <pinpool.hpp>\n#include <vector>\n#endif\n\
                 #include <err.h>\n#include <pinpool.h>\n#include <string.h>\nenum { cudaMemcpyHostToDevice };\n\
                 int cudaMemcpyAsync(void *, void *, size_t, int, CUstream_st *), example(void *, CUstream_st *);\n\
                 int example(void *device, CUstream_st *stream)\n{\n";
    let folder = tempfile::tempdir().unwrap();
    for (page, ending) in [("README.md", "c"), ("docs/c.md", "c"), ("docs/c.md", "cpp")] {
        let path = folder.path().join("example").with_extension(ending);
        let (name, standard) = language(path.to_str().unwrap());
        let text = std::fs::read_to_string(crate_folder().join("../..").join(page)).unwrap();
        let example = text.split(&format!("```{ending}\n")).nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        std::fs::write(&path, format!("{given}{example}return 0;\n}}\n")).unwrap();
        let options = [standard, "-fsyntax-only", "-Iinclude"];
        is_installed(name).then(|| run_to_success(compiler(name).current_dir(crate_folder()).args(options).arg(path)));
    }
}
