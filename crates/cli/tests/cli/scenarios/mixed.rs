//! Programs with one fault among ordinary activity.

use std::collections::VecDeque;

use pinpool_testing::{SinkMemory, SinkStream};

use super::{MIB, Program, STEPS_IN_A_SECOND};

#[test]
fn a_leak_that_creeps_among_thirty_tags_with_bursts_is_found() {
    let mut program = Program::one(|pool| pool);
    let (mut bursts, mut kept) = (VecDeque::new(), Vec::new());
    let tags: Vec<_> = (0..30).map(|tag| format!("shard{tag}")).collect();
    program.run(180, |program, step| {
        // Every half second a burst of the next tag begins, which lasts for two seconds.
        let tag = &tags[usize::try_from(step / 10 % 30).unwrap()];
        if step % 10 == 0 {
            bursts.push_back((step, (0..12).map(|_| program.must_get(tag, MIB)).collect::<Vec<_>>()));
        }
        if bursts.front().is_some_and(|(since, _)| since + 2 * STEPS_IN_A_SECOND <= step) {
            bursts.pop_front();
        }
        if step % 20 == 7 {
            kept.push(program.must_get("shard7", MIB));
        }
    });
    let said = program.diagnosed((bursts, kept));
    said.check("leak", true);
    assert!(said.log.last().is_some_and(|line| line.contains("shard7")), "{said:?}");
}

#[test]
fn one_of_four_streams_that_is_stuck_is_named() {
    let mut program = Program::one(|pool| pool);
    let mut streams: Vec<_> = (0..4).map(|_| (SinkStream::new().unwrap(), SinkMemory::new(MIB))).collect();
    let (stream, device) = &mut streams[3];
    let gate = Program::copy(program.must_get("images", MIB), stream, device);
    program.run(60, |program, step| {
        let (stream, device) = &mut streams[usize::try_from(step % 3).unwrap()];
        drop(Program::copy(program.must_get("images", MIB), stream, device));
        stream.synchronize().unwrap();
    });
    program.diagnosed((gate, streams)).check("stuck_copy", true);
}
