#![allow(missing_docs)] // Criterion makes the entry point.

//! A get and its put through the public pool when the buffer is idle, beside what else one could use: on one thread,
//! and from one thread to another.
//!
//! `cargo bench --bench hit`

mod measured;

use criterion::{Criterion, criterion_group, criterion_main};

use measured::Side;
use measured::patterns::Pattern;

fn hit(criterion: &mut Criterion) {
    let side = Side::by_side();
    side.measure(criterion, Pattern::Same, 1);
    side.measure(criterion, Pattern::Mix, 1);
    side.measure(criterion, Pattern::Cross, 2);
}

criterion_group! { name = benches; config = measured::criterion(); targets = hit }
criterion_main!(benches);
