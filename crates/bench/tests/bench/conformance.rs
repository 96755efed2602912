//! The output for each trace in `tests/data/conformance` equals the recorded output of TensorFlow's pool, byte for byte.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use sha2::{Digest, Sha256};

fn conformance(trace: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pinpool-bench")).arg("conformance").arg(trace).output().unwrap()
}

#[test]
fn every_trace_gives_the_expected_text() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/conformance");
    let (mut compared, mut streams) = (0, 0);
    for trace in fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path()) {
        let name = trace.file_name().unwrap().to_string_lossy();
        let Some(stem) = name.trim_end_matches(".gz").strip_suffix(".trace") else { continue };
        let tool = conformance(&trace);
        assert!(tool.status.success(), "{name}: {}", String::from_utf8_lossy(&tool.stderr));
        let text = String::from_utf8(tool.stdout).unwrap();
        assert_eq!(text, fs::read_to_string(data.join(format!("{stem}.expected"))).unwrap(), "{name}");
        compared += 1;
        // For the small traces, `tests/data` also contains the streams. The text contains their digests.
        for stream in ["outcome", "buffers"] {
            let Ok(lines) = fs::read(data.join(format!("{stem}.{stream}"))) else { continue };
            let hex: String = Sha256::digest(lines).iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(text.contains(&format!("\n{stream} sha256 {hex}\n")), "{name}: {stream}");
            streams += 1;
        }
    }
    assert_eq!((compared, streams), (17, 2 * 5), "traces are missing from tests/data");
}

#[test]
fn a_trace_with_an_error_is_refused_with_its_line() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (text, why) in [
        ("# limit 0\na 1 5\n", "PINPOOL_POOL_SIZE_LIMIT=0"),
        ("a 1 5 3\n", "power of two"),
        ("## first\n\nf 7\n", "line 3: `f 7`: no buffer 7"),
        ("r 3 18446744073709551615\n", "at most"),
    ] {
        fs::write(file.path(), text).unwrap();
        let tool = conformance(file.path());
        let error = String::from_utf8(tool.stderr).unwrap();
        assert!(!tool.status.success() && error.contains(why), "{error}");
    }
}
