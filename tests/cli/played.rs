//! What `replay` and `advise` say of waste and of batches of another size.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tool::{Ran, finish, number, pinpool};

fn written(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    path
}

fn ran(command: &str, path: &Path, args: &[&str]) -> Ran {
    finish(pinpool(&[command]).arg(path).args(args))
}

#[test]
fn waste_is_what_nobody_asked_for_while_the_most_is_pinned() {
    let dir = tempfile::tempdir().unwrap();
    let gets = (0..10).map(|id| format!("a {id} 1153434\n"));
    let text: String = gets.chain(["t 1000000\n".to_owned()]).chain((0..10).map(|id| format!("f {id}\n"))).collect();
    let path = written(dir.path(), "w.trace", &text);
    // Two buffers of 2 MiB fit, and are asked for 1153434 bytes each.
    let ran = ran("replay", &path, &["--json", "--set", "PRESET=tensorflow,MAX_BYTES=4MiB"]);
    let figures = ran.figures();
    assert_eq!(number(&figures, "peak_pinned_bytes"), 4 << 20, "{figures}");
    assert_eq!(number(&figures, "waste_bytes"), (4 << 20) - 2 * 1_153_434, "{figures}");
    // Without a ceiling all ten are pinned at once, as they are asked for.
    let ran = finish(pinpool(&["replay", "--json", "--set", "PRESET=tensorflow"]).arg(&path));
    assert_eq!(number(&ran.figures(), "waste_bytes"), (20 << 20) - 10 * 1_153_434, "{}", ran.stdout);
}

#[test]
fn a_batch_size_alone_asks_for_batches_twice_as_large() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", &"a 1 320000\na 2 64000\nt 1000\nf 1\nf 2\nt 1000\n".repeat(30));
    let figures = |args: &[&str]| ran("advise", &path, &[&["--json"], args].concat()).figures();
    let (twice, named) = (figures(&["--batch-size", "32"]), figures(&["--batch-size", "32", "--new-batch-size", "64"]));
    assert_eq!(twice, named);
    assert_eq!(number(&twice, "peak_requested_bytes"), 2 * 384_000, "{twice}");
    assert_eq!((number(&twice["batch"], "from"), number(&twice["batch"], "to")), (32, 64));
    let text = ran("advise", &path, &["--batch-size", "32"]).stdout;
    assert!(text.contains("with 64 samples a batch in place of 32"), "{text}");
}

#[test]
fn sizes_that_do_not_follow_the_batch_size_are_told() {
    let dir = tempfile::tempdir().unwrap();
    for (text, batch_size, words) in [
        ("a 1 1001\nf 1\n", "32", "the sizes cannot be split into a fixed part and bytes a sample"),
        ("a 1 1001\nf 1\n", "32", "what other batches need cannot be told from it alone"),
        ("a 1 64\nf 1\n", "1", "a batch of one sample"),
        ("s 9 64 32\n", "32", "sizes that grow by steps"),
    ] {
        let ran = ran("advise", &written(dir.path(), "w.trace", text), &["--batch-size", batch_size]);
        assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{text}");
        ran.check_stderr(words);
    }
}
