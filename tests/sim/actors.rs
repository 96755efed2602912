//! The actors: loaders, the device, the clock, an operator, and faults. A seed decides who acts next.

use crate::draw::Draw;
use crate::scenario::{Call, Op, Scenario, Setup, Step};

/// Steps of a run, plus or minus half.
const STEPS: u64 = 100;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The run of `seed`.
pub(crate) fn scenario(seed: u64) -> Scenario {
    let mut draw = Draw::of(seed);
    let setup = setup(&mut draw);
    let mut actors = Actors::new(&mut draw, &setup);
    let steps = (0..draw.between(STEPS / 2, STEPS * 3 / 2)).map(|_| actors.step(&mut draw)).collect();
    Scenario { setup, steps }
}

fn setup(draw: &mut Draw) -> Setup {
    let tensorflow = u64::from(draw.once_in(4));
    let separate = tensorflow | u64::from(draw.once_in(2));
    let max_bytes = match draw.below(4) {
        0 => 0,
        1 => draw.between(16 * KIB, MIB),
        2 => draw.between(MIB, 24 * MIB),
        _ => draw.between(1, 24) * MIB,
    };
    let reserve = tensorflow == 0 && draw.once_in(6);
    let room = if max_bytes == 0 { 8 * MIB } else { max_bytes };
    Setup {
        tensorflow,
        exact: u64::from(draw.once_in(2)),
        separate,
        blocks_on_release: u64::from(separate == 1 && draw.once_in(2)),
        extra_page: u64::from(separate == 1 && draw.once_in(3)),
        max_bytes,
        limit: draw.pick(&[1, 1, 2, 3, 5, 8, 100]),
        granule_bytes: draw.pick(&[4 * KIB, 64 * KIB, 2 * MIB]).min(if max_bytes == 0 {
            2 * MIB
        } else {
            max_bytes.next_power_of_two() / 2
        }),
        reserve_bytes: if reserve { draw.between(1, room / 2) } else { 0 },
        pageable: u64::from(draw.once_in(5)),
        idle_seconds: draw.pick(&[0, 1, 45, 45]),
        serve_all: u64::from(draw.once_in(2)),
        finish_first: u64::from(!draw.once_in(3)),
        pools_first: u64::from(draw.once_in(2)),
        stay_faulty: u64::from(draw.once_in(4)),
        // Derived from an earlier draw, so that the other settings of existing seeds do not change.
        background: u64::from(max_bytes.count_ones() % 2),
        lying_device: 0,
    }
}

/// The habits of the actors that use one pool.
struct Actors {
    /// Lengths that the loaders request repeatedly.
    lens: Vec<u64>,
    streams: u64,
    /// The weight of requests, against 40 for returns: it decides how many buffers are held at once.
    hold: u64,
    copies: u64,
    faults: u64,
    operators: u64,
    /// One request in this many waits if there is no room.
    patience: u64,
    max_bytes: u64,
}

impl Actors {
    fn new(draw: &mut Draw, setup: &Setup) -> Self {
        let most = if setup.max_bytes == 0 { 3 * MIB } else { setup.max_bytes };
        let len = |draw: &mut Draw| match draw.below(8) {
            0..4 => draw.between(1, 9 * KIB),
            4..6 => draw.between(1, (most / 4).clamp(1, 400 * KIB)),
            6 => draw.between(1, (most / 2).max(1)),
            _ => draw.between(1, most),
        };
        let lens = (0..draw.between(1, 5)).map(|_| len(draw)).collect();
        Self {
            lens,
            streams: draw.between(1, 3),
            hold: draw.between(30, 60),
            copies: draw.pick(&[0, 10, 30]),
            faults: draw.pick(&[0, 0, 3, 8]),
            operators: draw.pick(&[1, 4, 8]),
            patience: draw.pick(&[2, 6, 1000]),
            max_bytes: most,
        }
    }

    fn step(&mut self, draw: &mut Draw) -> Step {
        let mut step = match draw.weighted(&[self.hold, 40, self.copies, 14, 8, self.operators, self.faults]) {
            0 => self.get(draw),
            1 => self.put(draw),
            2 => self.copy(draw),
            3 => Step::new(Op::Finish, &[draw.below(self.streams), draw.pick(&[1, 1, 2, 9])]),
            4 => self.time(draw),
            5 => self.operate(draw),
            _ => self.fault(draw),
        };
        let may_be_inside = !matches!(step.op, Op::DropPool | Op::Partition | Op::Reserve | Op::Await | Op::Rewrite);
        if may_be_inside && draw.once_in(12) {
            step.during = Some(draw.pick(&[Call::Acquire, Call::Acquire, Call::Release, Call::Remap]));
        }
        step
    }

    fn get(&mut self, draw: &mut Draw) -> Step {
        let len = if draw.once_in(10) { draw.between(1, self.max_bytes) } else { draw.pick(&self.lens) };
        let pool = if draw.once_in(2) { 0 } else { draw.below(4) };
        if draw.once_in(12) {
            return Step::new(Op::TryGet, &[pool, len]);
        }
        if draw.once_in(self.patience) {
            return match draw.below(8) {
                0 => Step::new(Op::CancelGet, &[draw.next() % 1000]),
                1..4 => Step::new(Op::PollGet, &[draw.next() % 1000]),
                // Derived from an earlier draw, so that the other steps of existing seeds do not change.
                _ => Step::new(Op::GetAsync, &[pool, len, u64::from(len % 3 == 0)]),
            };
        }
        Step::new(Op::Get, &[pool, len, if draw.once_in(16) { draw.pick(&[8192, 65_536]) } else { 0 }])
    }

    fn put(&mut self, draw: &mut Draw) -> Step {
        match draw.below(10) {
            0 => Step::new(Op::Rewrite, &[draw.next() % 1000]),
            1 => Step::new(Op::Await, &[draw.next() % 1000]),
            2 => Step::new(Op::DropPending, &[draw.next() % 1000]),
            _ => Step::new(Op::Put, &[draw.next() % 1000]),
        }
    }

    fn copy(&mut self, draw: &mut Draw) -> Step {
        let op = draw.pick(&[
            Op::CopyTo,
            Op::CopyTo,
            Op::CopyTo,
            Op::CopyRange,
            Op::CopyRange,
            Op::CopyFrom,
            Op::ReleaseAfter,
        ]);
        Step::new(op, &[draw.next() % 1000, draw.below(self.streams)])
    }

    fn time(&mut self, draw: &mut Draw) -> Step {
        match draw.below(5) {
            0 => Step::new(Op::Poll, &[draw.below(3)]),
            1 => Step::new(Op::Advance, &[draw.between(1, 100)]),
            2 => Step::new(Op::Advance, &[draw.between(10_000, 2_000_000)]),
            3 => Step::new(Op::Advance, &[draw.between(9_000_000, 60_000_000)]),
            _ => Step::new(Op::Advance, &[draw.between(1_000_000, 11_000_000)]),
        }
    }

    fn operate(&mut self, draw: &mut Draw) -> Step {
        match draw.below(14) {
            12.. => Step::new(Op::SetMaxBytes, &[draw.between(1, self.max_bytes * 2)]),
            0..4 => {
                Step::new(Op::Trim, &[draw.below(3), if draw.once_in(2) { 0 } else { draw.between(0, self.max_bytes) }])
            }
            4..6 => Step::new(Op::Clear, &[draw.below(3)]),
            6 => Step::new(Op::Reserve, &[draw.below(3), draw.between(1, self.max_bytes / 4 + 1)]),
            7..10 => Step::new(Op::Partition, &[draw.between(1, self.max_bytes)]),
            10 => Step::new(Op::DropPool, &[draw.between(1, 3)]),
            _ if draw.once_in(3) => Step::new(Op::DropPool, &[0]),
            _ => Step::new(Op::Poll, &[0]),
        }
    }

    fn fault(&mut self, draw: &mut Draw) -> Step {
        let skip = draw.pick(&[0, 0, 1, 3]);
        let count = draw.pick(&[1, 1, 2, 5]);
        match draw.below(12) {
            0..3 => Step::new(Op::FailCalls, &[Call::Acquire as u64, skip, count]),
            3..5 => Step::new(Op::FailCalls, &[Call::Release as u64, skip, count]),
            5 => Step::new(Op::FailCalls, &[Call::Remap as u64, skip, count]),
            6 => Step::new(Op::LoseRemaps, &[skip, count]),
            7 => Step::new(Op::LimitHost, &[draw.between(0, self.max_bytes)]),
            8 if draw.once_in(2) => Step::new(Op::FailStream, &[draw.below(self.streams)]),
            8 => Step::new(Op::FailQuery, &[draw.below(self.streams)]),
            9 => Step::new(Op::RefuseCopy, &[draw.below(self.streams)]),
            10 if draw.once_in(3) => Step::new(Op::UnknownCopy, &[draw.below(self.streams)]),
            _ => Step::new(Op::Heal, &[]),
        }
    }
}
