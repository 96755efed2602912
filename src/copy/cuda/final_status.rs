//! Remembers the final answer of the driver about the end of a copy.

use std::sync::OnceLock;

use crate::driver::code::FailedCall;
use crate::error::{Error, Result};

/// Empty while the answer may still change. Once a copy has completed, or after a permanent error, the driver is not queried
/// again, because the handle may belong to another object by then.
#[derive(Debug, Default)]
pub(super) struct FinalStatus(OnceLock<Result<()>>);

impl FinalStatus {
    /// Returns whether the driver refuses the handle permanently.
    pub(super) fn is_refused(&self) -> bool {
        self.0.get().is_some_and(Result::is_err)
    }

    /// Returns the final answer if it is known. Otherwise calls `wait`; if that succeeds, the copy has completed.
    pub(super) fn or_wait(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        self.0.get().cloned().unwrap_or_else(|| wait().inspect(|()| self.set_complete()))
    }

    /// Returns the final answer if it is known, else the driver's answer to `query`.
    pub(super) fn or_query(&self, query: impl FnOnce() -> Result<bool, FailedCall>) -> Result<bool> {
        if let Some(known) = self.0.get().cloned() {
            return known.map(|()| true);
        }
        let complete = query().map_err(|failed| self.refused(failed))?;
        if complete {
            self.set_complete();
        }
        Ok(complete)
    }

    /// Records that the copy has completed.
    fn set_complete(&self) {
        // An earlier answer stays. It is the same, or it came from a device that failed.
        let _known = self.0.set(Ok(()));
    }

    /// Converts a refused call to an error. A [permanent](crate::driver::code::Code::is_permanent) refusal becomes the final
    /// answer.
    pub(super) fn refused(&self, failed: FailedCall) -> Error {
        if failed.code.is_permanent() {
            let _known = self.0.set(Err(failed.into()));
        }
        failed.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::code::Code;

    fn refuses(code: i32) -> Result<bool, FailedCall> {
        Err(FailedCall { call: "cuEventQuery", code: Code(code) })
    }

    #[test]
    fn a_refusal_is_permanent_only_if_every_later_call_is_refused() {
        let answer = FinalStatus::default();
        let once = answer.or_query(|| refuses(9999));
        assert!(once.unwrap_err().to_string().contains("(code 9999)"));
        assert!(!answer.or_query(|| Ok(false)).unwrap());
        assert!(answer.or_query(|| Ok(true)).unwrap());
        assert!(answer.or_query(|| unreachable!()).unwrap());
        let answer = FinalStatus::default();
        assert!(answer.or_query(|| refuses(700)).is_err() && answer.or_query(|| unreachable!()).is_err());
        assert!(answer.is_refused() && answer.or_wait(|| unreachable!()).is_err());
        let answer = FinalStatus::default();
        assert!(answer.or_wait(|| Err(Error::device_failed("once"))).is_err() && !answer.is_refused());
        answer.or_wait(|| Ok(())).unwrap();
        assert!(answer.or_wait(|| unreachable!()).is_ok());
    }
}
