//! The table of log lines. Each row describes one line and becomes a method of [`PoolLog`] that is named like the event of the line.
//!
//! A row has the level (or the argument with the level), the target without `pinpool::`, the event with its values, and the text
//! after the event. `bytes: u64 as Size` shows a value through a type or function. The comment of a row says what the line means and
//! what to do; `docs/log-lines.md` is made from the comments.

use std::fmt::Display;
use std::io;
use std::path::{self, Path};
use std::time::Duration;

use log::Level::{self, Debug, Error, Info, Trace, Warn};
use pinpool_observe::diagnosis::WindowDiagnosis;
use pinpool_os::format::{Size, Time};
use pinpool_shared_limit::Loss;

use super::texts::{still_out, totals, usage_by_state};
use super::{PoolLog, emit};
use crate::error::{self, SourceError};
use crate::quota::describe_loss;
use crate::report::dump::limit_text;
use crate::report::{Dump, Finding, HeldBuffer};
use crate::stats::Stats;

macro_rules! lines {
    ($(
        $(#[doc = $doc:literal])+
        $(#[cfg($condition:meta)])?
        $level:ident($target:ident) $name:ident($($value:ident: $type:ty $(as $shown:ident)?),*) $line:literal;
    )+) => {
        impl PoolLog {
            $(
                $(#[doc = $doc])+
                $(#[cfg($condition)])?
                #[track_caller]
                pub(crate) fn $name(&self, $($value: $type),*) {
                    if emit::is_wanted($level) {
                        $($(let $value = $shown($value);)?)*
                        let target = concat!("pinpool::", stringify!($target));
                        emit::line(target, $level, format_args!("{self}{}: {}", stringify!($name), format_args!($line)));
                    }
                }
            )+
        }

        /// The names of the methods, each with its comment.
        #[cfg(test)]
        pub(super) const COMMENTS: &[(&str, &str)] = &[$((stringify!($name), concat!($($doc),+)),)+];
    };
}

lines! {
    /// A pool started, when built or first used. To do: nothing.
    Info(pool) created(facts: &str) "{facts}";

    /// `RLIMIT_MEMLOCK` is below the pool's limit and applies instead. To do: raise `ulimit -l`, or lower `PINPOOL_MAX_BYTES`.
    Warn(limit) lock_limit(max: u64 as Size) "RLIMIT_MEMLOCK lowers the pool limit, max={max}; raise it (`ulimit -l`, \
        LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK";

    /// The GPU is not used, memory is not pinned, or similar; an error if the requested GPU or backend cannot be used. To do: run
    /// `pinpool doctor`.
    level(machine) machine(level: Level, finding: &Finding) "{finding}";

    /// A setting has no effect. To do: correct or remove the setting.
    Warn(settings) setting(unused: &str) "{unused}";

    /// A thread for maintenance could not be started. To do: raise the limit on threads, or call `maintain()` when the program is idle.
    Warn(maintenance) no_maintenance_thread(error: &io::Error) "idle memory is released only while the pool is used; call \
        maintain() when the program is idle, or raise the limit on threads (`ulimit -u`, pids.max): {error}";

    /// Held memory has doubled, from 64 MiB on. To do: nothing, unless it continues after startup; then see the `diagnosis` line.
    Info(growth) grew(before: u64 as Size, held: u64 as Size, max: Option<u64> as limit_text, pins: u64, time: Duration as Time)
        "held={before}->{held} max={max} pins={pins} time={time}";

    /// One request took memory from the system. To do: if there are many in steady state, see the `diagnosis` line.
    Debug(growth) acquired(request: u64, before: u64, held: u64, pins: u64, time: Duration as Time)
        "request={request}B held={before}B->{held}B pins={pins} time={time}";

    /// A miss was served from held memory. To do: nothing.
    Trace(growth) carved(bytes: u64) "bytes={bytes}B";

    /// Requests come in sizes that no idle buffer has. To do: nothing.
    Debug(sizes) sizes_vary() "large buffers are merged when they return";

    /// Requests repeat their sizes again. To do: nothing.
    Debug(sizes) sizes_recur() "large buffers stay idle when they return";

    /// The machine or cgroup is short of memory. To do: nothing.
    Info(pressure) memory_pressure() "idle memory is released sooner";

    /// Memory is no longer short. To do: nothing.
    Info(pressure) pressure_ended() "idle memory is kept for PINPOOL_IDLE_TIMEOUT again";

    /// No request missed for five minutes; the limit can rise again. To do: nothing.
    Info(pool_size_limit) pool_size_limit_lowered(from: u64, to: u64) "no miss for five minutes, pool_size_limit={from}->{to}";

    /// `set_max_bytes` was called, or the limit of the cgroup changed (`auto`). To do: nothing.
    Info(limit) limit_changed(from: Option<u64> as limit_text, to: Option<u64> as limit_text, why: &str) "max={from}->{to}: {why}";

    /// A partition was created; if the pool's limit is lower, that limit applies. To do: nothing.
    Info(limit) partition(name: &str, max: Option<u64> as limit_text, pool: Option<u64> as limit_text) "name={name} max={max} pool_max={pool}";

    /// A request joins the wait queue. To do: nothing.
    Trace(wait) waiting(request: u64, rounded: u64) "request={request}B rounded={rounded}B";

    /// A request left the wait queue. To do: if there are many, raise `PINPOOL_MAX_BYTES`, or return buffers sooner.
    Debug(wait) waited(request: u64, time: Duration as Time, is_served: bool as yes_or_no)
        "request={request}B time={time} served={is_served}";

    /// The pool is full, and a request waits for a return. To do: nothing if the consumer is always busy; otherwise raise the limit.
    Info(shortage) full(request: u64 as Size, why: &str, usage: &Stats as usage_by_state)
        "request={request} {usage}; waiting for a return: {why}";

    /// A request found no memory: the pool is full and the request may not wait, or the backend refused. To do: raise the limit, or
    /// fix the logged reason.
    Warn(shortage) refused(request: u64 as Size, why: &str, usage: &Stats as usage_by_state) "request={request} {usage}; {why}";

    /// No request has waited or been refused for a second. To do: nothing.
    Info(shortage) shortage_ended(after: Duration as Time, requests: u64, waited: Duration as Time, pageable: u64)
        "lasted={after} requests={requests} waited={waited} pageable={pageable}";

    /// A request got pageable memory (the first, 10th, 100th). To do: raise the limit, or set `PINPOOL_ON_FULL=error`.
    Warn(shortage) pageable(request: u64 as Size, nth: u64, held: u64 as Size, max: Option<u64> as limit_text)
        "copies from this memory are slow and block their caller, request={request} count={nth} pageable={held} \
        max_pageable={max}";

    /// A request failed (the first, 10th, 100th); the largest holders follow. To do: follow the last line of the block (`to do:`).
    Warn(out_of_memory) out_of_memory(dump: &Dump) "{dump}";

    /// The diagnosis changed; it is evaluated at most every 10 s. A warning if something costs time that can be saved. To do:
    /// apply the logged recommendation; for a `leak`, find who holds the tag's buffers.
    level(diagnosis) diagnosis(level: Level, found: &WindowDiagnosis) "{found}";

    /// The rest of the reserve is pinned while the program runs. To do: nothing.
    Info(reserve) reserve_started(pinned: u64 as Size, of: u64 as Size)
        "pinning the rest in the background, pinned={pinned} of={of}";

    /// Progress of pinning `PINPOOL_RESERVE`, with the time left if it is known. To do: nothing.
    Info(reserve) reserve_progress(pinned: u64 as Size, of: u64 as Size, left: Option<Duration> as time_left)
        "pinned={pinned} of={of}{left}";

    /// A background reserve is complete. To do: nothing.
    Info(reserve) reserve_complete(pinned: u64 as Size, time: Duration as Time, node: Option<u32> as numa_node)
        "pinned={pinned} time={time}{node}";

    // Queries the kernel for `huge` only if the line is logged.
    /// `bytes` of a reserve are pinned, `huge` of them in huge pages. To do: if they are few, check `/sys/kernel/mm/transparent_hugepage`.
    Info(reserve) reserve_call(bytes: u64 as Size, huge: impl Fn() -> u64 as measured, node: Option<u32> as numa_node)
        "bytes={bytes}{node} huge={huge}";

    /// The limit has no room for the rest of the reserve; pinning continues once there is room. To do: raise `PINPOOL_MAX_BYTES`, or
    /// lower `PINPOOL_RESERVE`.
    Warn(reserve) reserve_paused(pinned: u64 as Size, of: u64 as Size, max: Option<u64> as limit_text)
        "waiting for room in the limit, pinned={pinned} of={of} max={max}; raise PINPOOL_MAX_BYTES or lower PINPOOL_RESERVE";

    /// The backend refused the rest of the reserve; the pool continues without it. To do: fix the logged reason, then call
    /// `reserve(of - pinned)`.
    Warn(reserve) reserve_stopped(pinned: u64 as Size, of: u64 as Size, error: &SourceError)
        "pinned={pinned} of={of}: {error}; fix this and call reserve(of - pinned), or lower PINPOOL_RESERVE";

    /// There are too few huge pages, so other pages are used. To do: raise `vm.nr_hugepages` (1 GiB pages: at boot), or set
    /// `PINPOOL_HUGETLB=auto`.
    Warn(reserve) huge_pages(lack: &str) "too few, so other pages are used: {lack}";

    /// The pool joined a shared limit (`PINPOOL_LEDGER`). To do: nothing.
    Info(shared_limit) shared_limit_joined(name: &str, max: Option<u64> as limit_text, held: u64 as Size, others: usize)
        "name={name} max={max} held={held} other_pools={others}";

    /// The first process set another shared limit, which applies. To do: give all processes the same `PINPOOL_MAX_BYTES`.
    Warn(shared_limit) shared_limit_differs(name: &str, max: Option<u64> as limit_text, ignored: u64 as Size)
        "the first process set another limit, name={name} max={max} ignored={ignored}; give all processes the same PINPOOL_MAX_BYTES";

    /// The pool could not join the shared limit and uses only its own. To do: fix the logged reason.
    Warn(shared_limit) shared_limit_unused(why: &str) "the pool has only its own limit: {why}";

    /// Idle memory was released for another pool. To do: nothing.
    Debug(shared_limit) shared_limit_released(name: &str, bytes: u64)
        "idle memory was released for another pool, name={name} bytes={bytes}B";

    /// The shared limit's file was removed or its descriptor was closed; buffers stay valid. To do: restart all its processes.
    /// Prevent the cause: a cleaner of `/dev/shm` (`RemoveIPC=no`), or `closefrom` in the program.
    Error(shared_limit) shared_limit_lost(name: &str, loss: Loss as describe_loss)
        "{loss}, so this pool can no longer grow, name={name}; restart all its processes";

    /// Copies have been in flight for 30 s. To do: find what blocks the stream.
    Warn(copies) stuck(buffers: u64, bytes: u64 as Size, age: Duration as Time, stream: Option<u64> as stream_id)
        "copies do not complete,{stream} buffers={buffers} bytes={bytes} in_flight_for={age}; find what blocks the stream";

    /// The driver cannot tell whether a copy has completed; the pool asks again every 100 ms. To do: as for `leaked`.
    Error(copies) quarantined(bytes: u64 as Size, buffers: u64, keeps_all: bool as what_is_kept, error: &error::Error)
        "not reused until the device responds, bytes={bytes} quarantined={buffers}{keeps_all}: {error}";

    /// The driver can never tell whether a copy has completed. To do: if a graph captured the copy, keep the buffer until the graph's
    /// last launch has completed; otherwise check the device.
    Error(copies) leaked(bytes: u64 as Size, buffers: u64, keeps_all: bool as what_is_kept, error: &error::Error)
        "never reused, because a device may still use it, bytes={bytes} quarantined={buffers}{keeps_all}: {error}";

    /// The device responds again. To do: nothing.
    Info(copies) quarantine_ended(buffers: u64, bytes: u64 as Size)
        "quarantined buffers are reusable, buffers={buffers} bytes={bytes}";

    /// Idle memory has reached `PINPOOL_IDLE_TIMEOUT` but stays pinned, because a release would wait for the device; logged once. To do:
    /// call `trim(0)` if the host needs the memory.
    Info(release) idle_kept(idle: u64 as Size, backend: &str)
        "a release would wait for the device, idle={idle} backend={backend}";

    /// Idle memory could not be released; logged once until a release succeeds. To do: check the device.
    Error(release) release_delayed(error: &SourceError) "idle memory stays pinned and is released later: {error}";

    /// The driver did not release memory. To do: check the device.
    Error(release) release_failed(bytes: u64 as Size, error: &SourceError)
        "memory stays allocated and counted, bytes={bytes}: {error}";

    /// The device was reset. To do: create a new pool.
    Error(release) device_lost(why: &SourceError) "this pool can no longer allocate: {why}";

    /// `PINPOOL_SOCKET` is set. To do: nothing.
    #[cfg(feature = "observe")]
    Info(socket) socket_opened(path: &Path as shown) "serving statistics, path={path}";

    /// The statistics socket cannot be opened. To do: set another path in `PINPOOL_SOCKET`.
    #[cfg(feature = "observe")]
    Warn(socket) socket_failed(path: &Path as shown, why: &str) "no statistics, path={path}: {why}";

    /// `PINPOOL_TRACE` is set. To do: nothing.
    #[cfg(feature = "observe")]
    Info(trace) trace_started(path: &Path as shown) "recording, path={path}";

    /// Another process writes the file, so nothing is recorded. To do: put `%p` (the process ID) into the name.
    #[cfg(feature = "observe")]
    Warn(trace) trace_taken(path: &Path as shown)
        "path={path}: another process writes it; put %p (the process ID) into the name";

    /// The recording is complete. To do: nothing.
    Info(trace) trace_complete(path: &Path as shown, records: u64) "path={path} records={records}";

    /// Records came faster than they could be written. To do: nothing if few were lost; otherwise use a name without `.gz`, or a
    /// faster disk.
    Warn(trace) trace_records_lost(path: &Path as shown, records: u64, lost: u64)
        "records came faster than they could be written, path={path} records={records} lost={lost}";

    /// The recording is truncated; the end of the pool logs it again. To do: fix the logged reason, such as a full disk.
    Error(trace) trace_incomplete(path: &Path as shown, records: u64, lost: u64, why: &str)
        "path={path} records={records} lost={lost}: {why}";

    /// The last handle was dropped; `Pool::close` logs nothing. To do: nothing.
    Info(pool) pool_ended(stats: &Stats as totals) "{stats}";

    // This is not a warning: a buffer in a later field of a struct than its pool is normally dropped after the pool.
    /// The last handle was dropped, but buffers are still out; those with a tag or a sampled call stack are listed. To do: nothing if
    /// they are dropped soon; otherwise find who holds them.
    Info(pool) buffers_still_out(list: (&Stats, &[HeldBuffer]) as still_out) "memory stays allocated until these are dropped, {list}";

    /// Copies did not complete within 30 s after the pool ended. To do: find what blocks the stream.
    Error(copies) end_in_flight(copies: u64, bytes: u64 as Size, waited: Duration as Time) "a device may still use \
        this memory; it is never released, copies={copies} bytes={bytes} waited={waited}";

    /// A copy may not have completed, so all memory stays pinned. To do: as for `end_in_flight` or `leaked`.
    Error(release) end_left_pinned(bytes: u64 as Size)
        "memory stays pinned, because a release would wait for a copy, bytes={bytes}";

    /// The driver did not release memory at the end of the pool. To do: check the device.
    Error(release) end_unreleased(bytes: u64 as Size, error: &SourceError)
        "memory stays pinned until the process ends, bytes={bytes}: {error}";
}

fn yes_or_no(is_so: bool) -> &'static str {
    if is_so { "yes" } else { "no" }
}

fn what_is_kept(keeps_all: bool) -> &'static str {
    if keeps_all { "; no memory of the pool is released" } else { "" }
}

/// Formats a key with its value; returns an empty text if there is no value.
fn pair(key: &str, value: Option<impl Display>) -> String {
    value.map_or_else(String::new, |value| format!(" {key}={value}"))
}

fn numa_node(node: Option<u32>) -> String {
    pair("numa_node", node)
}

fn stream_id(id: Option<u64>) -> String {
    pair("stream_id", id)
}

fn time_left(left: Option<Duration>) -> String {
    pair("left", left.map(Time))
}

fn measured(bytes: impl Fn() -> u64) -> Size {
    Size(bytes())
}

fn shown(path: &Path) -> path::Display<'_> {
    path.display()
}
