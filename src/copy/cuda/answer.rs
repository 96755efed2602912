//! What the driver has said permanently about the end of a copy.

use std::sync::OnceLock;

use super::stream::failed;
use crate::driver::code::Code;
use crate::error::{Error, Result};

/// Empty while the driver may still say something else. It is not queried again once a copy is over, nor after an error that
/// stays: the handle may belong to something else by then.
#[derive(Debug, Default)]
pub(super) struct Answer(OnceLock<Result<(), String>>);

impl Answer {
    /// Whether the copy is known to be over.
    pub(super) fn is_over(&self) -> bool {
        self.0.get().is_some_and(Result::is_ok)
    }

    /// Whether the driver refuses the handle permanently.
    pub(super) fn is_refused(&self) -> bool {
        self.0.get().is_some_and(Result::is_err)
    }

    fn known(&self) -> Option<Result<()>> {
        self.0.get().map(|known| known.clone().map_err(Error::device))
    }

    /// What was said permanently; else waits by `wait`, after which the copy is over.
    pub(super) fn or_wait(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        self.known().unwrap_or_else(|| wait().inspect(|()| self.set_over()))
    }

    /// What was said permanently, or else what the driver says now to `ask`.
    pub(super) fn or_ask(&self, call: &str, ask: impl FnOnce() -> Result<bool, Code>) -> Result<bool> {
        if let Some(known) = self.known() {
            return known.map(|()| true);
        }
        match ask() {
            Ok(is_over) => {
                if is_over {
                    self.set_over();
                }
                Ok(is_over)
            }
            Err(error) => Err(self.refused(call, error)),
        }
    }

    /// The copy is over.
    fn set_over(&self) {
        // A copy that is over stays so: an answer that is there already says the same, or came from a device that failed.
        let _known = self.0.set(Ok(()));
    }

    /// The driver refused `call`. Whether that is permanently depends on the error.
    pub(super) fn refused(&self, call: &str, error: Code) -> Error {
        let text = failed(call, error);
        if stays(error.number()) {
            let _known = self.0.set(Err(text.clone()));
        }
        Error::device(text)
    }
}

/// Whether an error is the answer to every later call as well: by the manual the process has to be started anew after it
/// (214, 220, 700 to 720), the handle or its context is gone (201, 400, 709), or the event is part of a graph, and with it the copy
/// (907), which each launch makes again.
pub(super) fn stays(code: i64) -> bool {
    matches!(code, 201 | 214 | 220 | 400 | 700..=720 | 907)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_for_good_only_if_the_driver_says_the_same_ever_after() {
        let answer = Answer::default();
        let once = answer.or_ask("cuEventQuery", || Err(Code(9999)));
        assert!(once.unwrap_err().to_string().contains("(code 9999)"));
        assert!(!answer.or_ask("cuEventQuery", || Ok(false)).unwrap());
        assert!(answer.or_ask("cuEventQuery", || Ok(true)).unwrap());
        assert!(answer.is_over() && answer.or_ask("cuEventQuery", || unreachable!()).unwrap());
        let answer = Answer::default();
        let lost = answer.or_ask("cuEventQuery", || Err(Code(700)));
        assert!(lost.is_err() && answer.or_ask("cuEventQuery", || unreachable!()).is_err());
        assert!(answer.is_refused() && answer.or_wait(|| unreachable!()).is_err());
        let answer = Answer::default();
        assert!(answer.or_wait(|| Err(Error::device("once"))).is_err() && !answer.is_refused());
        answer.or_wait(|| Ok(())).unwrap();
        assert!(answer.is_over() && answer.or_wait(|| unreachable!()).is_ok());
    }
}
