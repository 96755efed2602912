//! Variables with another prefix, for a program with several pools.

use pinpool::{Backend, Limit, Pool};

use crate::captured_log::{lines, listen};
use crate::child::alone_with;

#[test]
fn variables_with_the_prefix_stand_in_place_of_those_of_the_process() {
    let vars = || {
        vec![
            ("PINPOOL_BACKEND", "nothing of the kind".to_owned()),
            ("PINPOOL_LOG_EVERY", "7".to_owned()),
            ("EVAL_PINPOOL_BACKEND", "heap".to_owned()),
            ("EVAL_PINPOOL_MAX_BYTES", "64MiB".to_owned()),
            ("EVAL_PINPOOL_WAITS", "1s".to_owned()),
            ("BAD_MAX_BYTES", "lots".to_owned()),
        ]
    };
    alone_with(vars, || {
        listen();
        let pool = Pool::builder().env_prefix("EVAL_PINPOOL_").build().unwrap();
        let lines = lines();
        assert_eq!((pool.stats().backend, pool.config().max_bytes), ("heap", Limit::Bytes(64 << 20)));
        assert_eq!(pool.config().log_every, 10, "the variables of the process are not read");
        assert!(
            lines.iter().any(|line| line.contains("EVAL_PINPOOL_WAITS=1s: unknown and ignored; did you mean")),
            "{lines:?}"
        );
        // Code wins.
        let pool = Pool::builder().env_prefix("EVAL_PINPOOL_").max_bytes(Some(1 << 20)).build().unwrap();
        assert_eq!(pool.config().max_bytes, Limit::Bytes(1 << 20));
        let said = crate::captured_log::lines().join("\n");
        let ignored = "EVAL_PINPOOL_MAX_BYTES=64MiB: ignored; the program sets 1MiB in code, which takes precedence\n";
        assert!(said.contains(ignored) && !said.contains("nothing of the kind"), "{said}");
        // The same value from both is no conflict.
        Pool::builder().env_prefix("EVAL_PINPOOL_").max_bytes(64 << 20).build().unwrap();
        let said = crate::captured_log::lines().join("\n");
        assert!(said.contains("(builder)") && !said.contains("ignored; the"), "{said}");
        let error = Pool::builder().env_prefix("BAD_").backend(Backend::Heap).build().unwrap_err();
        let text = error.to_string();
        assert!(error.is_setting() && text.contains("PINPOOL_MAX_BYTES=lots: "), "{text}");
        assert!(text.contains("(from BAD_MAX_BYTES)"), "{text}");
    });
}
