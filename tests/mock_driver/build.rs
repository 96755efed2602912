//! Gives the `cdylib` the name under which a CUDA program looks for the driver.

fn main() {
    // Only the SONAME: `dlopen("libcuda.so")` finds an object already loaded under it. The file keeps its own name,
    // since a file called libcuda.so in the target folder would hide the real driver from every other test.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
