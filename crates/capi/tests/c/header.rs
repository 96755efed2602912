//! `include/pinpool.h` is what cbindgen makes of the crate: WRITE_HEADER=1 cargo test -p pinpool-capi header

use std::fs;
use std::path::{Path, PathBuf};

use cbindgen::{Builder, Config, DocumentationStyle, ExportConfig, Language, Style};

/// The order of the header.
const SOURCES: [&str; 7] = ["version", "status", "call", "log", "handle", "pool", "buffer"];

const TOP: &str = "\
/* Generated from the comments of crates/capi/src: WRITE_HEADER=1 cargo test -p pinpool-capi header */

/*
 * pinpool: a pool of pinned host memory for CUDA transfers.
 *
 *     pp_pool *pool;
 *     void *batch;
 *     if (pp_pool_open(\"max_bytes=4GiB; name=loader\", &pool) != PP_OK ||
 *         pp_get(pool, 1 << 20, &batch) != PP_OK) {
 *         fprintf(stderr, \"%s\\n\", pp_last_error(NULL));
 *         exit(1);
 *     }
 *     fread(batch, 1, 1 << 20, file);
 *     cudaMemcpyAsync(device, batch, 1 << 20, cudaMemcpyHostToDevice, stream);
 *     // The buffer is reused once that work has completed.
 *     if (pp_put_after_stream(pool, batch, stream) != PP_OK) {
 *         fprintf(stderr, \"%s\\n\", pp_last_error(NULL));
 *         pp_put(pool, batch);   // no driver: reused now; the driver refused: never reused
 *     }
 *     pp_pool_close(pool);
 *
 * Link with -lpinpool or `pkg-config --cflags --libs pinpool`. C99 and C++11; pinpool.hpp has classes for C++17. The CUDA driver
 * is loaded at run time: no toolkit is needed to build, and without a driver the memory is resident (mlock) or pageable,
 * unless the setting backend=gpu makes that an error.
 *
 * Every function may be called from any thread, concurrently, and from log callbacks, but not from signal handlers or CUDA host
 * functions (cudaLaunchHostFunc). None throws, leaves an error in the CUDA runtime or changes the current context.
 *
 * Lengths are in bytes. Results stored through pointer arguments belong to the caller. Returned `const char *` strings are owned by
 * the library; do not free them.
 *
 * A forked child does not inherit pools: each call on a pool of its parent returns PP_FORKED and does nothing. The child opens
 * its own pools. Buffers of `vmm` and `register` are not mapped in the child: reading one raises SIGSEGV.
 *
 * Within one major version, including 0, no function is removed and no number changes. The shared library of version 0 is
 * libpinpool.so.0.
 */";

#[test]
fn the_header_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/pinpool.h");
    let fresh = generated();
    if std::env::var_os("WRITE_HEADER").is_some() {
        fs::write(&path, &fresh).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == fresh, "stale: WRITE_HEADER=1 cargo test -p pinpool-capi header\n{fresh}");
}

/// All other functions return only the codes that `pp_status` lists for all functions.
#[test]
fn functions_with_codes_of_their_own_list_them() {
    let header = generated();
    let comment_of = |at: usize| header[..at].rsplit("/**").next().unwrap();
    let undocumented: Vec<_> = header
        .match_indices("\npp_status pp_")
        .filter(|(at, _)| !comment_of(*at).contains("- PP_"))
        .map(|(at, _)| header[at + 11..].split('(').next().unwrap())
        .collect();
    assert_eq!(undocumented, ["pp_pool_close", "pp_trim", "pp_clear", "pp_maintain"]);
}

/// The header of these sources.
fn generated() -> String {
    let source = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(name).with_extension("rs");
    let sources: Vec<PathBuf> = SOURCES.iter().map(|name| source(name)).collect();
    let config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Type,
        documentation_style: DocumentationStyle::Doxy,
        usize_is_size_t: true,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        include_guard: Some("PINPOOL_H".to_owned()),
        header: Some(TOP.to_owned()),
        after_includes: Some(versions()),
        export: ExportConfig { include: vec!["pp_log_level".to_owned()], ..ExportConfig::default() },
        // The lines of a function's comment count, too.
        line_length: 140,
        ..Config::default()
    };
    let builder = sources.iter().fold(Builder::new().with_config(config), |builder, source| builder.with_src(source));
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    shortened(&without_safety(&String::from_utf8(text).unwrap()))
}

fn versions() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let parts: Vec<&str> = version.split('.').collect();
    format!(
        "\n/* The version of this header; pp_version returns the library version. */\n#define PP_VERSION \"{version}\"\n\
         #define PP_VERSION_MAJOR {}\n#define PP_VERSION_MINOR {}\n#define PP_VERSION_PATCH {}\n\n\
         /** Initial values of a pp_get_options. */\n\
         #define PP_GET_OPTIONS_INIT {{sizeof(pp_get_options), 1, PP_DEFAULT_WAIT, NULL}}",
        parts[0], parts[1], parts[2]
    )
}

/// Removes the `# Safety` sections.
fn without_safety(text: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    let mut is_safety = false;
    for line in text.lines() {
        match line.trim() {
            "* # Safety" => {
                is_safety = true;
                // The empty line before it.
                lines.pop_if(|line| line.trim() == "*");
            }
            "*/" => is_safety = false,
            _ => {}
        }
        if !is_safety {
            lines.push(line);
        }
    }
    lines.join("\n") + "\n"
}

/// Puts each comment that has one line of text on one line.
fn shortened(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        let is_one = line.trim() == "*/" && lines.len() > 1 && lines[lines.len() - 2].trim() == "/**";
        if is_one && let (Some(text), Some(opening)) = (lines.pop(), lines.pop()) {
            lines.push(format!("{} {} */", opening, text.trim().trim_start_matches("* ")));
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n") + "\n"
}
