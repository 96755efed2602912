//! A switch for tests of both kinds of fences.

/// While this exists, copies record events instead of writing to timelines. It must be dropped before the driver or the
/// device, which only one test has at a time.
pub(crate) struct EventsOnly(());

impl EventsOnly {
    pub(crate) fn begin() -> Self {
        pinpool::unstable::set_timelines_enabled(false);
        Self(())
    }
}

impl Drop for EventsOnly {
    fn drop(&mut self) {
        pinpool::unstable::set_timelines_enabled(true);
    }
}
