//! The position of a load, from which a later process loads the rest.
//!
//! Owns the state and its text. Knows no catalog and no options: it holds a number that represents them.

use std::fmt;
use std::str::FromStr;

/// Version of the text.
const PREFIX: &str = "pinpool-load/1";

/// The next batch of a load. Its text, by [`Display`](fmt::Display), is one line that [`FromStr`] reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadState {
    /// Epoch of the next batch, from 0.
    pub epoch: u64,
    /// Its place in that epoch, from 0.
    pub batch: u64,
    /// Its place in the whole load, from 0.
    pub number: u64,
    /// A hash of what determines the batches: the samples, the limits of a batch, seed and shard.
    pub plan: u64,
}

/// Why a state is refused, in words.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct StateError(pub(super) String);

impl fmt::Display for LoadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoadState { epoch, batch, number, plan } = self;
        write!(f, "{PREFIX}:epoch={epoch},batch={batch},number={number},plan={plan:016x}")
    }
}

impl FromStr for LoadState {
    type Err = StateError;

    fn from_str(text: &str) -> Result<LoadState, StateError> {
        let parse = || {
            let mut fields = text.trim().strip_prefix(PREFIX)?.strip_prefix(':')?.split(',');
            let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=');
            let number = |digits: &str| digits.parse().ok();
            let (epoch, batch) = (number(field("epoch")?)?, number(field("batch")?)?);
            let state = LoadState {
                epoch,
                batch,
                number: number(field("number")?)?,
                plan: u64::from_str_radix(field("plan")?, 16).ok()?,
            };
            fields.next().is_none().then_some(state)
        };
        let form = format!("it has the form {PREFIX}:epoch=0,batch=0,number=0,plan=0123456789abcdef");
        parse().ok_or_else(|| StateError(format!("{text:?} is not the state of a load: {form}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_state_is_read_back() {
        let state = LoadState { epoch: 3, batch: 17, number: 417, plan: 0xfeed };
        let text = state.to_string();
        assert_eq!(text, "pinpool-load/1:epoch=3,batch=17,number=417,plan=000000000000feed");
        assert_eq!(text.parse(), Ok(state));
        let cut = (0..text.len() - 16).map(|end| text[..end].to_owned());
        for broken in cut.chain([text.replace('3', "-3"), text.replace('1', "x"), format!("{text},more=1")]) {
            let error = broken.parse::<LoadState>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{broken:?} is not the state of a load")), "{error}");
        }
    }
}
