//! Requests of tasks that are dropped, moved to another thread and polled at any time.

use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use pinpool::{GetFuture, Pool, Request};

use crate::fixture::{MIB, over_sim, poll, run};
use crate::valid_stats::valid_stats;

fn pool(max_bytes: u64) -> Pool {
    over_sim(max_bytes).maintenance_thread(true).build().unwrap()
}

fn check_at_rest(pool: &Pool) {
    let stats = valid_stats(pool);
    assert!(pinpool::unstable::fast_path::is_open(pool));
    assert_eq!((stats.memory.in_use, stats.requests.served, stats.requests.failed), (0, stats.requests.returned, 0));
    // The wait queue is empty, so the whole limit is available immediately.
    let all = usize::try_from(stats.limits.max_bytes.unwrap()).unwrap();
    drop(pool.get_with(Request::new(all).timeout(Duration::from_secs(60))).unwrap());
}

#[test]
fn dropped_futures_keep_no_buffers_and_no_place_in_the_queue() {
    let rounds: usize = if cfg!(miri) { 20 } else { 2_000 };
    let pools = [pool(2 << 20), pool(4 << 20)];
    thread::scope(|scope| {
        let (pass, passed) = mpsc::sync_channel::<GetFuture>(8);
        let pools = &pools;
        for thread in 0..2 {
            let pass = pass.clone();
            scope.spawn(move || {
                let mut pending: Vec<GetFuture> = Vec::new();
                for round in 0..rounds {
                    let mut get = pools[(round + thread) % 2].get_async(MIB * (1 + round % 2));
                    let ready = round % 5 > 0 && poll(&mut get).is_ready();
                    match round % 7 {
                        // Passed to another thread, which drops or polls the request.
                        0 | 1 if !ready => pass.send(get).unwrap(),
                        2 => pending.clear(),
                        3 => pending.retain_mut(|get| poll(get).is_pending()),
                        _ if !ready => pending.push(get),
                        _ => {}
                    }
                }
            });
        }
        drop(pass);
        scope.spawn(move || {
            for (at, mut get) in passed.into_iter().enumerate() {
                let _ = (at % 2 == 0).then(|| poll(&mut get));
            }
        });
    });
    pools.iter().for_each(check_at_rest);
}

#[test]
fn thousands_of_tasks_at_once_are_served_in_order() {
    let tasks = if cfg!(miri) { 50 } else { 3_000 };
    let pool = pool(2 << 20);
    let held = pool.get(2 * MIB).unwrap();
    let mut served = Vec::new();
    run(async {
        let (pass, mut passed) = tokio::sync::mpsc::unbounded_channel();
        for task in 0..tasks {
            let (pool, pass) = (pool.clone(), pass.clone());
            tokio::spawn(async move {
                let buf = pool.get_async(2 * MIB).await.unwrap();
                pass.send(task).unwrap();
                drop(buf);
            });
        }
        drop(pass);
        while pool.stats().requests.waits < tasks {
            tokio::task::yield_now().await;
        }
        drop(held);
        while let Some(task) = passed.recv().await {
            served.push(task);
        }
    });
    assert!(served.iter().copied().eq(0..tasks));
    check_at_rest(&pool);
}

#[test]
#[should_panic(expected = "polled after completion")]
fn a_future_polled_after_completion_panics() {
    let pool = pool(2 << 20);
    drop(pool.get(2 * MIB).unwrap());
    let mut get = pool.get_async(2 * MIB);
    assert!(matches!(poll(&mut get), Poll::Ready(Ok(_))));
    pool.close();
    let _ = poll(&mut get);
}

#[test]
fn a_waiting_future_outlives_the_last_handle_of_its_pool() {
    let pool = pool(2 << 20);
    let held = pool.get(2 * MIB).unwrap();
    let mut get = pool.get_async(2 * MIB);
    assert!(poll(&mut get).is_pending());
    drop(pool);
    drop(held);
    assert!(matches!(poll(&mut get), Poll::Ready(Ok(_))));
}
