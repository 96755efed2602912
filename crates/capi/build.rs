//! Sets the SONAME of the shared library to its installed name.

fn main() {
    // The name under which programs look for it. Its number is the major version, which changes when programs that
    // were linked with an earlier library would not work.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpinpool.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    // Never unloaded: the thread that maintains the pools may run until the process ends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
