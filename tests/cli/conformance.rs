//! Every trace in `tests/data/conformance` comes out of the tool byte for byte as TensorFlow's pool did.

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn every_trace_gives_the_expected_text() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance");
    let mut compared = 0;
    for trace in fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path()) {
        let name = trace.file_name().unwrap().to_string_lossy();
        let Some(stem) = name.trim_end_matches(".gz").strip_suffix(".trace") else { continue };
        let tool = Command::new(env!("CARGO_BIN_EXE_pinpool"))
            .args(["replay", "--format", "conformance"])
            .arg(&trace)
            .output();
        let tool = tool.unwrap();
        assert!(tool.status.success(), "{name}: {}", String::from_utf8_lossy(&tool.stderr));
        let expected = fs::read_to_string(data.join(format!("{stem}.expected"))).unwrap();
        assert_eq!(String::from_utf8(tool.stdout).unwrap(), expected, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 17, "traces are missing from tests/data");
}
