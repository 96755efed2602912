//! The string that a pool is opened with.

use pinpool::{Pool, PoolBuilder};

use crate::call::Failure;
use crate::status::pp_status;

/// Returns a builder with the settings in `config`, by the rules that `pp_pool_open` documents.
pub(crate) fn builder(config: &str) -> Result<PoolBuilder, Failure> {
    let mut builder = Pool::builder();
    let (mut pool_name, mut prefix) = (None, None);
    for item in config.split([';', '\n']).map(str::trim).filter(|item| !item.is_empty()) {
        builder = match item.split_once('=') {
            Some((name, value)) if name.trim().eq_ignore_ascii_case("name") => {
                let value = value.trim();
                if let Some(first) = pool_name.replace(value).filter(|first| *first != value) {
                    let text = format!("name={value}: already set to {first}; leave one of the two out");
                    return Err(Failure::new(pp_status::PP_INVALID_SETTING, text));
                }
                builder.name(value)
            }
            Some((name, value)) => builder.setting(name.trim(), value.trim()),
            None if !is_prefix(item) => {
                let why = "is neither NAME=VALUE nor a variable prefix (A to Z, digits and `_`, ending in `_`)";
                return Err(Failure::argument(format!("config: `{item}` {why}")));
            }
            None => {
                if let Some(first) = prefix.replace(item) {
                    let why = "one pool has one prefix; a setting is NAME=VALUE";
                    return Err(Failure::argument(format!("config: two prefixes, `{first}` and `{item}`: {why}")));
                }
                builder.env_prefix(item)
            }
        };
    }
    Ok(builder)
}

fn is_prefix(item: &str) -> bool {
    item.ends_with('_') && item.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}
