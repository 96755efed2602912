//! Links the library so that it stays loaded.

fn main() {
    // Never unloaded: programs hold addresses of its functions.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
