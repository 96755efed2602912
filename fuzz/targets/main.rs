//! All targets share this file: the name of the binary selects the property.
#![no_main]

#[path = "../../crates/cli/tests/parsers/properties/mod.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let name = env!("CARGO_BIN_NAME");
    let (_, property) = properties::ALL.iter().find(|(target, _)| *target == name).expect("a property of this name");
    property(data);
});
