//! `pinpool doctor --bench` under its former name.

use crate::tool::{finish, pinpool, run};

const SHORT: [&str; 5] = ["bench", "--bytes", "8MiB", "--size", "64KiB"];

#[test]
fn bench_measures_the_pool_and_its_alternatives() {
    let printed = run(&[&SHORT[..], &["--json"]].concat()).exits(0).figures();
    for name in ["pin_gb_s", "ordinary_gb_s", "hit_ns", "malloc_ns", "copy_gb_s", "ordinary_copy_gb_s"] {
        assert!(printed[name].as_f64().is_some_and(|number| number > 0.0), "{name}: {printed}");
    }
    assert_eq!((&printed["backend"], &printed["pinned_by"]), (&"heap".into(), &serde_json::Value::Null));
    let text = run(&SHORT).stdout;
    for words in ["pool on heap, not pinned", "pin 8.0MiB", "malloc and free", "host sink (no GPU)"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn bench_of_more_than_the_limit_is_refused_with_the_remedy() {
    run(&["bench", "--bytes", "1000TiB"]).refuses(1).check_stderr("PINPOOL_MAX_BYTES");
}

#[test]
fn bench_measures_under_settings_that_need_a_preset_or_a_reserve() {
    for set in [["PRESET=tensorflow", "ROUNDING=pow2"], ["GROWTH=0", "RESERVE=64M"]] {
        let set = set.map(|set| set.split_once('=').unwrap()).map(|(name, value)| (format!("PINPOOL_{name}"), value));
        finish(pinpool(&SHORT).envs(set)).exits(0);
    }
}
