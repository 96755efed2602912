#![allow(missing_docs)] // Criterion makes the entry point.

//! The same as `hit` on 1 to 16 threads at once: all with one class, all with sixteen classes, and in pairs of which
//! one thread gets and the other puts. Times are of the slowest thread, for each of its pairs.
//!
//! `cargo bench --bench contention -- mix/4`

mod measured;

use criterion::{Criterion, criterion_group, criterion_main};

use measured::Side;
use measured::patterns::Pattern;

fn contention(criterion: &mut Criterion) {
    let side = Side::by_side();
    for pattern in [Pattern::Same, Pattern::Mix, Pattern::Cross] {
        // `cross` takes threads in pairs.
        let fewest = if pattern == Pattern::Cross { 2 } else { 1 };
        for threads in [1, 2, 4, 8, 16].into_iter().filter(|threads| *threads >= fewest) {
            side.measure(criterion, pattern, threads);
        }
    }
}

criterion_group! { name = benches; config = measured::criterion(); targets = contention }
criterion_main!(benches);
