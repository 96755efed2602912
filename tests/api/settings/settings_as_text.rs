//! Settings given as text, and a request with both alignment and time limit.

use std::time::Duration;

use pinpool::{Backend, Limit, Pool, Request};

#[test]
fn a_variable_set_by_code_is_read_as_in_the_environment() {
    let builder = Pool::builder().without_env().setting("PINPOOL_BACKEND", "heap");
    let pool = builder.setting("wait", " 250ms ").setting("max_bytes", "").setting("max_bytes", "64M").build().unwrap();
    assert_eq!(
        (pool.config().wait, pool.config().max_bytes),
        (Some(Duration::from_millis(250)), Limit::Bytes(64 << 20))
    );
}

#[test]
fn an_unknown_variable_and_a_value_that_cannot_be_read_are_errors_that_say_what_to_do() {
    let error = Pool::builder().setting("PINPOOL_MAX_BYTE", "1G").build().unwrap_err();
    assert!(error.is_setting());
    let text = error.to_string();
    assert_eq!(text, "setting=PINPOOL_MAX_BYTE: unknown setting; did you mean PINPOOL_MAX_BYTES?");
    let text = Pool::builder().setting("PURPLE", "1G").build().unwrap_err().to_string();
    assert!(text.ends_with("`pinpool doctor --settings --all` lists the variables"), "{text}");
    let text = Pool::builder().setting("PINPOOL_WAIT", "soon").build().unwrap_err().to_string();
    assert!(text.starts_with("PINPOOL_WAIT=soon: not a time") && text.contains("the default 30s"), "{text}");
}

#[test]
fn a_get_may_have_an_alignment_and_a_time_limit() {
    let pool = Pool::builder().without_env().backend(Backend::Heap).max_bytes(Some(4 << 20)).build().unwrap();
    let held = pool.get_with(Request::new(1 << 20).align(1 << 16).wait(Duration::ZERO)).unwrap();
    assert!(held.as_ptr().addr().is_multiple_of(1 << 16));
    let tagged = pool.tagged("loader");
    assert!(tagged.get_with(Request::new(1 << 20).align(1 << 16).wait(Duration::ZERO)).is_ok());
    assert!(tagged.get_with(Request::new(8 << 20).align(4096).wait(Duration::ZERO)).unwrap_err().is_limit());
}
