//! `include/pinpool.h` is what cbindgen makes of the crate: WRITE_HEADER=1 cargo test -p pinpool-capi header

use std::fs;
use std::path::{Path, PathBuf};

use cbindgen::{Builder, Config, DocumentationStyle, ExportConfig, FunctionConfig, Language, Style};

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
 * Lengths are in bytes: of buffers in size_t, limits and totals of a pool in uint64_t. Results stored through pointer arguments
 * belong to the caller. Returned `const char *` strings are owned by the library; do not free them.
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
        .match_indices("pp_status pp_")
        .filter(|(at, _)| !comment_of(*at).contains("- PP_"))
        .map(|(at, _)| header[at + 10..].split('(').next().unwrap())
        .collect();
    let expected = ["pp_pool_shutdown", "pp_pool_close", "pp_trim", "pp_clear", "pp_maintain", "pp_stats_json"];
    assert_eq!(undocumented, expected);
}

/// In C++, also the types of the callbacks are C functions.
#[test]
fn everything_is_declared_within_extern_c() {
    let header = generated();
    let (before, rest) = header.split_once(EXTERN_C).unwrap();
    assert!(!before.contains("typedef") && !rest.contains(EXTERN_C) && rest.contains("}  // extern \"C\""), "{before}");
}

/// cbindgen puts this before the functions.
const EXTERN_C: &str = "#ifdef __cplusplus\nextern \"C\" {\n#endif // __cplusplus";

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
        function: FunctionConfig { must_use: Some("PP_NODISCARD".to_owned()), ..FunctionConfig::default() },
        // The lines of a function's comment count, too.
        line_length: 150,
        ..Config::default()
    };
    let builder = sources.iter().fold(Builder::new().with_config(config), |builder, source| builder.with_src(source));
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let (types, functions) = text.rsplit_once(EXTERN_C).unwrap();
    shortened(&without_safety(&format!("{types}{}", functions.trim_start())))
}

fn versions() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let parts: Vec<&str> = version.split('.').collect();
    format!(
        "\n/* The version of this header; pp_version returns the library version. */\n#define PP_VERSION \"{version}\"\n\
         #define PP_VERSION_MAJOR {}\n#define PP_VERSION_MINOR {}\n#define PP_VERSION_PATCH {}\n\n\
         /** Initial values of a pp_get_options. */\n\
         #define PP_GET_OPTIONS_INIT {{sizeof(pp_get_options), 1, PP_DEFAULT_WAIT, NULL}}\n\n\
         /** The compiler warns if the result is ignored, because the failure would leak a buffer or leave none. */\n\
         #if defined(__GNUC__)\n#define PP_NODISCARD __attribute__((warn_unused_result))\n\
         #else\n#define PP_NODISCARD\n#endif\n\n{EXTERN_C}",
        parts[0], parts[1], parts[2]
    )
}

/// Removes the `# Safety` sections.
fn without_safety(text: &str) -> String {
    let mut parts = text.split("\n *\n * # Safety\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + &part[part.find("\n */").unwrap()..])
}

/// Puts each comment that has one line of text on one line.
fn shortened(text: &str) -> String {
    let mut parts = text.split("/**\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| {
        let (line, rest) = part.split_once('\n').unwrap();
        match rest.trim_start().strip_prefix("*/") {
            Some(rest) => format!("{text}/** {} */{rest}", line.trim().trim_start_matches("* ")),
            None => format!("{text}/**\n{part}"),
        }
    })
}
