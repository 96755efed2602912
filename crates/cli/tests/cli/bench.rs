//! `pinpool bench`: every figure is there, as a number and in words.

use crate::tool::run;

const SHORT: [&str; 5] = ["bench", "--bytes", "8MiB", "--size", "64KiB"];

#[test]
fn bench_has_each_figure_beside_what_a_program_has_without_a_pool() {
    let ran = run(&[&SHORT[..], &["--json"]].concat());
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let figures = ran.figures();
    for name in ["pin_gb_s", "ordinary_gb_s", "hit_ns", "malloc_ns", "copy_gb_s", "ordinary_copy_gb_s"] {
        assert!(figures[name].as_f64().is_some_and(|figure| figure > 0.0), "{name}: {figures}");
    }
    assert_eq!((&figures["backend"], &figures["is_pinned"]), (&"heap".into(), &false.into()));
    let text = run(&SHORT).stdout;
    for words in ["pool on heap, not pinned", "pin 8 MiB", "malloc and free", "host sink (no GPU)"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn bench_of_more_than_the_limit_is_refused_with_the_remedy() {
    let ran = run(&["bench", "--bytes", "1000TiB"]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
    ran.check_stderr("PINPOOL_MAX_BYTES");
}
