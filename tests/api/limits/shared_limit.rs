//! The shared limit: pools of several processes under one limit, some of them killed.
//!
//! The other processes run the test [`worker`] of this program, which executes the orders that it reads from stdin.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `LEDGER_KILLS` | number of processes to kill (default 40) |
#![allow(unsafe_code)] // Forks, and makes system calls.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use pinpool::unstable::shared_limit::{self, SharedLimitReport};
use pinpool::{Pool, PoolBuilder, Preset, Request};

use crate::child;
use crate::draw::Draw;
use crate::fixture::heap;
use crate::until::until;

pub(crate) const MIB: usize = 1 << 20;
/// Longer than any successful wait.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The name of a test's shared limit; its file is always removed at the end.
pub(crate) struct Named(String);

impl Named {
    pub(crate) fn new(test: &str) -> Self {
        Self(format!("api-{}-{test}", std::process::id()))
    }

    pub(crate) fn path(&self) -> String {
        // SAFETY: reads a number of this process.
        let user = unsafe { libc::geteuid() };
        format!("/dev/shm/pinpool-limit.{user}.{}", self.0)
    }

    pub(crate) fn builder(&self, mib: usize) -> PoolBuilder {
        let max_bytes = (mib * MIB) as u64;
        heap().wait(LONG).idle_timeout(None).max_bytes(max_bytes).setting("PINPOOL_LEDGER", &self.0)
    }

    pub(crate) fn report(&self) -> SharedLimitReport {
        shared_limit::report(&self.0).unwrap().unwrap_or_default()
    }

    /// Waits until the last pool has removed the file. A maintenance tick may hold a pool for a moment.
    fn wait_until_removed(&self) {
        until("the file is removed", || !std::path::Path::new(&self.path()).exists());
    }

    /// Waits until the shared limit satisfies `is`.
    pub(crate) fn wait_until(&self, is: impl Fn(&SharedLimitReport) -> bool) {
        until("the shared limit is so", || is(&self.report()));
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

/// Another process with a pool under the shared limit. Dropping it kills the process.
pub(crate) struct Worker {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Returns once the worker has built its pool.
    pub(crate) fn start(named: &Named, pool: &str) -> Self {
        Self::start_with(named, pool, &[])
    }

    pub(crate) fn start_with(named: &Named, pool: &str, vars: &[(&str, &str)]) -> Self {
        let mut worker = Self::spawn(named, pool, vars);
        assert_eq!(worker.answer(), "ready");
        worker
    }

    fn spawn(named: &Named, pool: &str, vars: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "limits::shared_limit::worker", "--nocapture"]);
        command.env("LEDGER_WORKER", pool).env("LEDGER_NAME", &named.0);
        command.envs(vars.iter().copied());
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let (orders, answers) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, orders: Some(orders), answers: BufReader::new(answers) }
    }

    pub(crate) fn order(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the worker ended");
            // The test runner may have printed text before the answer on the same line.
            if let Some((_, answer)) = line.trim_end().split_once("> ") {
                return answer.to_owned();
            }
        }
    }

    /// Takes a buffer of `mib` MiB.
    pub(crate) fn hold(&mut self, mib: usize) {
        assert_eq!(self.ask(&format!("get {}", mib * MIB)), "held");
    }

    /// Makes `mib` MiB idle.
    pub(crate) fn idle(&mut self, mib: usize) {
        self.hold(mib);
        assert_eq!(self.ask("put"), "put");
    }

    pub(crate) fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Lets the process exit normally.
    pub(crate) fn end(mut self) {
        drop(self.orders.take());
        assert!(self.process.wait().unwrap().success());
    }

    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        let status = self.process.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}: nothing but the kill ended it");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Threads that request and return buffers in a loop.
struct Cycling {
    is_over: Arc<AtomicBool>,
    counts: Arc<[AtomicU64]>,
    threads: Vec<JoinHandle<()>>,
}

impl Cycling {
    fn start(pool: &Pool, threads: usize, len: usize, hold: Duration) -> Self {
        let (is_over, counts) = (Arc::<AtomicBool>::default(), (0..threads).map(|_| AtomicU64::new(0)).collect());
        let thread = |at: usize| {
            let (pool, is_over, counts): (_, _, Arc<[AtomicU64]>) =
                (pool.clone(), is_over.clone(), Arc::clone(&counts));
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let buf = pool.get(len).unwrap();
                    if !hold.is_zero() {
                        std::thread::sleep(hold);
                    }
                    drop(buf);
                    counts[at].fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..threads).map(thread).collect();
        Self { is_over, counts, threads }
    }

    fn counts(&self) -> String {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed).to_string()).collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Cycling {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// The program of the other processes, not a test.
#[test]
#[allow(clippy::print_stdout)]
fn worker() {
    let Ok(name) = std::env::var("LEDGER_WORKER") else { return };
    // SAFETY: ends this process if nothing else does.
    unsafe { libc::alarm(300) };
    let variable = |name: &str| std::env::var(name).unwrap();
    let named = Named(variable("LEDGER_NAME"));
    let build = || named.builder(64).name(&name).build().unwrap();
    let mut pool = build();
    let mut held = Vec::new();
    let mut cycling = None;
    println!("> ready");
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let (word, number) = order.split_once(' ').unwrap_or((&order, "0"));
        let number: u64 = number.parse().unwrap();
        match word {
            "get" => match pool.get(usize::try_from(number).unwrap()) {
                Ok(buf) => {
                    held.push(buf);
                    println!("> held");
                }
                Err(error) => println!("> {}", error.to_string().replace('\n', "|")),
            },
            "try" => {
                let request = Request::new(usize::try_from(number).unwrap()).timeout(Duration::from_millis(20));
                match pool.get_with(request) {
                    Ok(_) => println!("> got"),
                    Err(error) => println!("> {}", error.to_string().replace('\n', "|")),
                }
            }
            "put" => {
                held.clear();
                println!("> put");
            }
            // This many threads request and return a buffer in a loop, without a pause.
            "cycle" => {
                let len = variable("LEDGER_LEN").parse().unwrap();
                let hold = Duration::from_micros(variable("LEDGER_HOLD_US").parse().unwrap());
                cycling = Some(Cycling::start(&pool, usize::try_from(number).unwrap(), len, hold));
                println!("> cycling");
            }
            // How often each thread has done so.
            "cycles" => println!("> {}", cycling.as_ref().unwrap().counts()),
            "stop" => {
                drop(cycling.take());
                println!("> stopped");
            }
            "balance" => {
                let stats = pool.stats();
                let shared = stats.limits.shared.clone().unwrap();
                println!("> {} {} {}", stats.memory.held_bytes, shared.own_bytes, shared.name);
            }
            // Runs until the process is killed if the seed is even, otherwise for 400 steps.
            "churn" => {
                let mut draw = Draw::of(number);
                let steps = if number.is_multiple_of(2) { u64::MAX } else { 400 };
                for _ in 0..steps {
                    match draw.below(20) {
                        0 => {
                            held.clear();
                            pool.trim(0);
                        }
                        1 => {
                            held.clear();
                            drop(pool);
                            pool = build();
                        }
                        2..=9 => {
                            let len = 1 + draw.below((64 * MIB / 6) as u64);
                            // The bytes of other processes may leave no room.
                            held.extend(pool.get_with(
                                Request::new(usize::try_from(len).unwrap()).timeout(Duration::from_millis(2)),
                            ));
                        }
                        at => drop(
                            (!held.is_empty()).then(|| held.swap_remove(usize::try_from(at).unwrap() % held.len())),
                        ),
                    }
                }
                println!("> done");
            }
            other => panic!("{other}"),
        }
    }
    // The file belongs to the test process, so a worker does not remove it.
    drop((cycling, held, pool));
    std::mem::forget(named);
    std::process::exit(0);
}

#[test]
fn a_request_waits_until_another_process_returns_a_buffer_or_is_killed() {
    for is_killed in [false, true] {
        let named = Named::new("wait");
        let pool = named.builder(64).name("own").build().unwrap();
        let mut other = Worker::start(&named, "other");
        other.hold(48);
        std::thread::scope(|scope| {
            let get = scope.spawn(|| pool.get(32 * MIB).map(drop));
            named.wait_until(|report| report.members.iter().any(|each| each.pool == "own" && each.wanted_bytes > 0));
            if is_killed {
                other.kill()
            } else {
                assert_eq!(other.ask("put"), "put")
            }
            get.join().unwrap().unwrap();
        });
        named.wait_until(|report| report.members.iter().all(|member| member.wanted_bytes == 0));
    }
}

#[test]
fn a_request_takes_the_idle_memory_of_others_and_its_own() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        for (own, others, needed) in [(15, 47, 50), (10, 50, 60), (15, 47, 37), (24, 36, 50)] {
            let named = Named::new("both");
            let pool = named.builder(64).preset(preset).build().unwrap();
            let mut other = Worker::start(&named, "other");
            drop(pool.get(own * MIB).unwrap());
            other.idle(others);
            let got = pool.get(needed * MIB);
            let own_bytes = pool.stats().limits.shared.unwrap().own_bytes;
            assert!(got.is_ok() && own_bytes >= (needed * MIB) as u64, "{preset:?} {own} {others} {needed}: {got:?}");
        }
    }
}

#[test]
fn a_background_reserve_takes_the_idle_memory_of_others() {
    for filled in [56, 64] {
        let named = Named::new("other");
        let mut other = Worker::start(&named, "other");
        other.hold(filled);
        let pool = named.builder(64).reserve(48 << 20).reserve_wait(false).name("own").build().unwrap();
        // Nothing is idle yet: the shared limit records what it wants until memory arrives.
        named.wait_until(|report| report.members.iter().any(|each| each.pool == "own" && each.wanted_bytes > 0));
        assert_eq!(other.ask("put"), "put");
        assert!(pool.wait_for_reserve(LONG).unwrap());
        named.wait_until(|report| report.members.iter().all(|member| member.wanted_bytes == 0));
    }
}

#[test]
fn a_reserve_is_not_shown_as_idle() {
    let named = Named::new("kept");
    for waits in [true, false] {
        let builder = named.builder(64).reserve(32 << 20).reserve_wait(waits).maintenance_thread(false);
        let pool = builder.build().unwrap();
        assert!(pool.wait_for_reserve(LONG).unwrap());
        drop(pool.get(8 * MIB).unwrap());
        pool.maintain();
        let idle_bytes = || named.report().members[0].idle_bytes;
        assert_eq!(idle_bytes(), 0);
        // Free memory beyond the reserve is shown as idle.
        drop([pool.get(24 * MIB).unwrap(), pool.get(24 * MIB).unwrap()]);
        pool.maintain();
        let report = named.report();
        assert!(idle_bytes() > 0 && idle_bytes() + (32 << 20) <= report.held_bytes, "{report:?}");
    }
}

#[test]
fn a_refused_request_names_the_shared_limit_and_its_members() {
    let named = Named::new("full");
    let pool = named.builder(64).wait(Duration::ZERO).on_full(pinpool::OnFull::Error).build().unwrap();
    let mut other = Worker::start(&named, "holder");
    other.hold(48);
    let error = pool.get(32 * MIB).unwrap_err();
    assert!(error.is_limit());
    let text = error.to_string();
    let held = format!("process {} (holder) holds 48.0MiB", other.pid());
    let limit = format!("the shared limit {} of 64.0MiB is reached; 48.0MiB are held", named.0);
    for part in [held.as_str(), limit.as_str(), "Return buffers in these processes", "PINPOOL_MAX_BYTES"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let reserve = pool.reserve(32 << 20).unwrap_err();
    assert!(reserve.to_string().contains("(holder)"), "{reserve}");
    // A request over the pool limit gets the remedy for the pool limit.
    let text = pool.get(65 * MIB).unwrap_err().to_string();
    assert!(text.contains("exceeds the pool limit"), "{text}");
    let large = named.builder(256).build().unwrap();
    let text = large.get(100 * MIB).unwrap_err().to_string();
    assert!(text.contains("Request a smaller buffer, or restart all its processes"), "{text}");
}

#[test]
fn a_reserve_counts_and_takes_the_idle_memory_of_others() {
    let named = Named::new("reserve");
    let mut other = Worker::start(&named, "other");
    other.idle(60);
    let pool = named.builder(64).reserve(32 << 20).build().unwrap();
    let shared = pool.stats().limits.shared.unwrap();
    assert!(shared.own_bytes >= 32 << 20 && shared.held_bytes <= 64 << 20, "{shared:?}");
    // A reserve counts as in use until its pool ends, so other processes get none of it.
    let text = other.ask(&format!("try {}", 40 * MIB));
    assert!(text.contains("Return buffers in these processes"), "{text}");
    drop(pool);
    other.hold(40);
    let balance = other.ask("balance");
    let figures: Vec<_> = balance.split(' ').collect();
    assert_eq!(figures[0], figures[1]);
}

#[test]
fn auto_joins_where_torchrun_shows_several_processes() {
    let mut named = Named("auto".to_owned());
    let vars = |ranks| [("LOCAL_WORLD_SIZE", ranks), ("RANK", "0"), ("LOCAL_RANK", "0")];
    let mut rank = Worker::start_with(&named, "rank", &vars("2"));
    assert!(rank.ask("balance").ends_with(" auto"));
    rank.end();
    // The file of this name is shared by all processes, so it is not removed. Only the text is freed.
    drop(std::mem::take(&mut named.0));
    std::mem::forget(named);
}

#[test]
fn a_child_of_fork_owns_nothing() {
    child::alone(|| {
        let named = Named::new("fork");
        let pool = named.builder(64).build().unwrap();
        let held = pool.get(8 * MIB).unwrap();
        let before = named.report();
        child::in_a_child(|| {
            // SAFETY: the copy of the parent's object, which the parent drops in its own process.
            let buf = unsafe { std::ptr::read(&raw const held) };
            // SAFETY: as above.
            let copy = unsafe { std::ptr::read(&raw const pool) };
            let is_apart = copy.stats().limits.shared.is_none();
            drop((buf, copy));
            vec![("no shared limit in the statistics", is_apart)]
        });
        assert_eq!(named.report(), before);
        drop(held);
        pool.trim(0);
        assert_eq!(named.report().held_bytes, 0);
        drop(pool);
        named.wait_until_removed();
    });
}

/// Returns the lowest of several counts, because threads of the pool sometimes open a descriptor for a moment.
fn descriptors() -> usize {
    let looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    });
    looks.min().unwrap()
}

#[test]
fn processes_killed_at_any_moment_leave_a_shared_limit_that_balances() {
    child::alone(|| {
        let kills: u64 = std::env::var("LEDGER_KILLS").map_or(40, |kills| kills.parse().unwrap());
        let named = Named::new("kills");
        let mut draw = Draw::of(kills);
        let pool = named.builder(64).name("survivor").build().unwrap();
        drop(pool.get(8 * MIB).unwrap());
        let before = descriptors();
        let mut workers: Vec<Worker> = Vec::new();
        let mut gone = Vec::new();
        for kill in 0..kills {
            while workers.len() < 3 {
                let mut worker = Worker::spawn(&named, "victim", &[]);
                worker.order(&format!("churn {}", 2 * draw.below(1 << 30)));
                workers.push(worker);
            }
            std::thread::sleep(Duration::from_micros(draw.below(12_000)));
            let victim = workers.swap_remove(usize::try_from(draw.below(3)).unwrap());
            gone.push(victim.pid());
            victim.kill();
            let report = named.report();
            assert!(report.members.iter().all(|member| !gone.contains(&member.pid)), "the dead count: {report:?}");
            assert!(report.held_bytes <= 64 << 20, "{report:?}");
            // Process IDs are reused.
            gone.drain(..gone.len().saturating_sub(8));
            // The survivor continues, with other processes and alone.
            drop(pool.get_with(Request::new(MIB).timeout(LONG)).unwrap());
            if kill % 8 == 7 {
                workers.drain(..).for_each(Worker::kill);
                let (report, stats) = (named.report(), pool.stats());
                assert_eq!(report.members.len(), 1, "{report:?}");
                assert_eq!(report.held_bytes, stats.memory.held_bytes, "{report:?}");
                // Everything that the killed processes held is free immediately.
                drop(pool.get_with(Request::new(60 * MIB).timeout(Duration::ZERO)).unwrap());
                pool.trim(0);
                assert_eq!(named.report().held_bytes, 0);
            }
        }
        drop(workers);
        assert_eq!(descriptors(), before);
        drop(pool);
        named.wait_until_removed();
    });
}

#[test]
fn four_processes_stay_within_their_limit_and_serve_each_other() {
    let named = Named::new("four");
    let mut workers = [1, 2, 3, 4].map(|rank| Worker::start(&named, &format!("rank{rank}")));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                let report = named.report();
                assert!(report.held_bytes <= 64 << 20, "{report:?}");
                most = most.max(report.held_bytes);
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });
        (1..).step_by(2).zip(&mut workers).for_each(|(seed, worker)| worker.order(&format!("churn {seed}")));
        workers.iter_mut().for_each(|worker| assert_eq!(worker.answer(), "done"));
        for round in 0..4 {
            workers.iter_mut().for_each(|worker| assert_eq!(worker.ask("put"), "put"));
            // One process fills nearly all of the shared limit and is then idle; the next one needs an eighth, or half of it.
            workers[round].idle(60);
            workers[(round + 1) % 4].hold([8, 32][round % 2]);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(sampler.join().unwrap() > 0);
    });
}
