//! A snapshot of the statistics waits for no call of another thread.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use pinpool::source::Source;
use pinpool::{Pool, Preset};
use pinpool_replay::SimSource;
use pinpool_testing::FaultSource;

use crate::fixture::over;

const MIB: usize = 1 << 20;

/// Takes all statistics of `pool` on a separate thread; fails if that takes longer than it ever should.
fn figures_come_at_once(pool: &Pool, during: &str) {
    let (done, result) = channel();
    let pool = pool.clone();
    thread::spawn(move || {
        let text = pool.stats().to_string();
        let _all = (pool.class_stats(), pool.partition_stats());
        let _ = done.send(text);
    });
    let text = result.recv_timeout(Duration::from_secs(60));
    assert!(text.is_ok(), "the statistics waited for {during}");
}

fn faulty(source: impl Source + 'static) -> Arc<FaultSource> {
    Arc::new(FaultSource::around(Arc::new(source)))
}

#[test]
fn while_gets_wait_and_a_listener_runs() {
    let (entered, has_entered) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let waits = std::sync::Mutex::new((entered, may_go_on));
    let listener = move |_: &pinpool::unstable::CheckReport| {
        let (entered, may_go_on) = &*waits.lock().unwrap();
        let _ = entered.send(());
        let _ = may_go_on.recv();
    };
    let source = faulty(SimSource::discrete(1 << 40));
    let pool = over(source, 64 << 20)
        .preset(Preset::TensorFlow)
        .setting("pool_size_limit", 1)
        .unstable_on_check(listener)
        .build()
        .unwrap();
    thread::scope(|scope| {
        let evicting = scope.spawn(|| {
            for _ in 0..600 {
                drop([MIB, 2 * MIB, 3 * MIB].map(|len| pool.get(len).unwrap()));
            }
        });
        has_entered.recv_timeout(Duration::from_secs(60)).expect("a thousandth eviction");
        figures_come_at_once(&pool, "a listener");
        drop(go_on);
        evicting.join().unwrap();
    });
    let _held = pool.get(64 * MIB - 4096);
}
