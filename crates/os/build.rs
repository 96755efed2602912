//! Refuses systems on which nothing would compile, with a clear error. It is here because all other crates depend on this one.
#![allow(clippy::print_stdout)] // Cargo reads it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_UNIX").is_none() {
        println!(
            "cargo::error=pinpool does not build on this system: it needs Linux, or another Unix system, where its memory is not pinned"
        );
    }
}
