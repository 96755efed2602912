//! `include/pinpool.h` must be what cbindgen makes of `src` and `cbindgen`: WRITE_HEADER=1 cargo test -p pinpool-capi header

use std::fs;
use std::path::Path;

use cbindgen::{Builder, Config, DocumentationStyle, ExportConfig, FunctionConfig, Language, Style};

/// The order of the header.
const SOURCES: [&str; 7] = ["version", "status", "call", "log", "slots", "pool", "buffer"];

/// The comments before the declarations.
const TOP: &str = include_str!("../../cbindgen/top.h.in");

/// The macros, after the version.
const MACROS: &str = include_str!("../../cbindgen/macros.h.in");

/// The functions of the header alone, after the status.
const INLINE: &str = include_str!("../../cbindgen/functions.h.in");

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

/// Functions that list no codes return only the codes that `pp_status` lists for all functions. A record and the return after
/// the same stream or event list the same codes.
#[test]
fn functions_list_their_own_status_codes() {
    let header = generated();
    let listed = |at: usize| -> std::collections::BTreeSet<_> {
        let items = header[..at].rsplit("/**").next().unwrap().split(" * - ").filter(|item| item.starts_with("PP_"));
        let words = items.flat_map(|item| item.split(':').next().unwrap().split([' ', ',', '\n']));
        words.filter(|word| word.starts_with("PP_")).collect()
    };
    let functions = header.match_indices("pp_status pp_");
    let codes: std::collections::BTreeMap<_, _> =
        functions.map(|(at, _)| (header[at + 10..].split('(').next().unwrap(), listed(at))).collect();
    let undocumented: Vec<_> = codes.keys().filter(|name| codes[*name].is_empty()).collect();
    assert_eq!(undocumented, [&"pp_pool_close", &"pp_pool_destroy", &"pp_stats_json"]);
    assert_eq!(codes["pp_record_stream"], codes["pp_put_after_stream"]);
    assert_eq!(codes["pp_record_event"], codes["pp_put_after_event"]);
}

/// In C++, the callback types are C functions too.
#[test]
fn everything_is_declared_within_extern_c() {
    let header = generated();
    let (before, rest) = header.split_once(EXTERN_C).unwrap();
    assert!(!before.contains("typedef") && !rest.contains(EXTERN_C) && rest.contains("}  // extern \"C\""), "{before}");
}

/// cbindgen puts this before the functions.
const EXTERN_C: &str = "#ifdef __cplusplus\nextern \"C\" {\n#endif // __cplusplus";

/// Generates the header from these sources.
fn generated() -> String {
    let source = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(name).with_extension("rs");
    let config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Type,
        documentation_style: DocumentationStyle::Doxy,
        usize_is_size_t: true,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        include_guard: Some("PINPOOL_H".to_owned()),
        header: Some(TOP.trim_end().to_owned()),
        after_includes: Some(versions()),
        export: ExportConfig { include: vec!["pp_log_level".to_owned()], ..ExportConfig::default() },
        function: FunctionConfig { must_use: Some("PP_NODISCARD".to_owned()), ..FunctionConfig::default() },
        // The comment lines of a function count too.
        line_length: 150,
        ..Config::default()
    };
    let builder = SOURCES.iter().fold(Builder::new().with_config(config), |built, name| built.with_src(source(name)));
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let (types, functions) = text.rsplit_once(EXTERN_C).unwrap();
    let types = types.replace("} pp_status;\n", &format!("}} pp_status;\n\n{INLINE}"));
    shortened(&without_safety(&format!("{types}{}", functions.trim_start())))
}

fn versions() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let numbers = ["MAJOR", "MINOR", "PATCH"].into_iter().zip(version.split('.'));
    let numbers: String = numbers.map(|(name, number)| format!("#define PP_VERSION_{name} {number}\n")).collect();
    let comment = "/* The version of this header; pp_version returns the library version. */";
    format!("\n{comment}\n#define PP_VERSION \"{version}\"\n{numbers}\n{MACROS}\n{EXTERN_C}")
}

/// Removes the `# Safety` sections.
fn without_safety(text: &str) -> String {
    let mut parts = text.split("\n *\n * # Safety\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + &part[part.find("\n */").unwrap()..])
}

/// Puts each comment with a single line of text on one line.
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
