//! The functions on pools.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{self, NonNull};

use pinpool::{Limit, Pool};

use crate::call::{Failure, guarded, non_null, store, text_for_c};
use crate::config;
use crate::slots::{self, PoolOrPartition, pp_pool};
use crate::status::pp_status;

/// Opens a pool and stores its handle in `pool`. End it with pp_pool_destroy.
///
/// `config` is UTF-8: items separated by `;` or line breaks. A value contains neither: set such a value in the environment.
///
/// - `VARIABLE=VALUE` sets a setting by the name of its variable, with or without PINPOOL_, in upper or lower case, and
///   overrides the environment: "max_bytes=2GiB; wait=2s". `pinpool doctor --settings --all` lists the variables.
/// - `maintenance_thread=0` starts no maintenance thread; `call_stacks=100` keeps the call stack of one request in 100.
/// - `name=loader` names the pool in its log lines.
/// - An item without `=` is a prefix of A to Z, digits and `_` that ends in `_`. Variables with this prefix are read in place of
///   the PINPOOL_ variables. With "EVAL_PINPOOL_" the limit is EVAL_PINPOOL_MAX_BYTES.
///
/// With NULL or "" only the PINPOOL_* variables of the environment apply. Everything else has its default.
///
/// The call may take seconds: it pins the reserve, and may test the backends, which pins and releases up to 2 MiB. With `auto`
/// the test may be left to the next call on the pool. All pools of a process share one maintenance thread, unless
/// `maintenance_thread=0`. A GPU backend retains the primary context of the GPU that the setting `device` names, from the time
/// at which it first pins memory until the process ends. Streams of any context may be passed to the other functions.
///
/// - PP_INVALID_ARGUMENT: `config` is not UTF-8 or has an invalid item.
/// - PP_INVALID_SETTING: a setting is unknown, invalid, set twice or contradicts another, the shared limit of PINPOOL_LEDGER
///   cannot be joined, or the file of PINPOOL_TRACE cannot be written.
/// - PP_UNAVAILABLE: this machine does not have the backend that was set.
/// - PP_MEMORY_REFUSED: the driver or the kernel refused the whole reserve (see pp_reserve).
/// - PP_OVER_LIMIT: the reserve exceeds a shared limit or the limit `auto`. If it exceeds a `max_bytes` that was set, the code
///   is PP_INVALID_SETTING.
/// - PP_TOO_MANY_POOLS: 4096 pools and partitions are open or have buffers in use.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1). `config` is null or ends in 0.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_pool_open(config: *const c_char, pool: *mut *mut pp_pool) -> pp_status {
    guarded(|| {
        let out = non_null(pool, "pool")?;
        store(out, ptr::null_mut());
        // SAFETY: capi-P1.
        let config = if config.is_null() { "" } else { unsafe { str_from_c(config, "config") }? };
        let opened = config::builder(config)?.build()?;
        let zero = opened.unstable_config().zero;
        store(out, slots::open(PoolOrPartition::Pool(opened), zero)?);
        Ok(pp_status::PP_OK)
    })
}

/// Opens a part of `pool` with its own limit `max_bytes` and its own wait queue, and stores its handle in `partition`, for
/// requests that must not take all memory of the pool. End it with pp_pool_destroy. `name` (UTF-8) is the tag of its buffers,
/// which are returned, recorded and queried with the handle `partition`, not with `pool`.
///
/// Not for a partition (PP_INVALID_ARGUMENT): requests with a tag, pp_adopt, pp_reserve, pp_trim, pp_maintain and
/// pp_partition_open.
///
/// - PP_TOO_MANY_POOLS: 4096 pools and partitions are open or have buffers in use.
/// - PP_INVALID_ARGUMENT: `name` is not UTF-8, `max_bytes` is 0, or `pool` is a partition.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1). `name` ends in 0.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_partition_open(
    pool: *mut pp_pool,
    name: *const c_char,
    max_bytes: u64,
    partition: *mut *mut pp_pool,
) -> pp_status {
    guarded(|| {
        let out = non_null(partition, "partition")?;
        store(out, ptr::null_mut());
        non_null(name.cast_mut(), "name")?;
        // SAFETY: capi-P1.
        let name = unsafe { str_from_c(name, "name") }?;
        let guard = slots::enter(pool)?;
        let opened = PoolOrPartition::Partition(guard.pool()?.open_partition(name, limit(max_bytes)?)?);
        store(out, slots::open(opened, guard.pool()?.unstable_config().zero)?);
        Ok(pp_status::PP_OK)
    })
}

/// No limit, for pp_partition_open and pp_set_max_bytes.
pub const PP_NO_LIMIT: u64 = u64::MAX;

fn limit(max_bytes: u64) -> Result<Limit, Failure> {
    match max_bytes {
        0 => Err(Failure::argument("max_bytes=0: every request would fail")),
        PP_NO_LIMIT => Ok(Limit::Unlimited),
        _ => Ok(Limit::Bytes(max_bytes)),
    }
}

/// Returns the argument `name` as text, or fails if it is not UTF-8.
///
/// # Safety
///
/// `text` points to a string that ends in 0 and lives as long as the result is used.
pub(crate) unsafe fn str_from_c<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller promises that `text` ends in 0.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| Failure::argument(format!("the argument `{name}` is not UTF-8: {error}")))
}

/// Closes a pool or a partition: waiting requests of the pool and its partitions fail with PP_CLOSED, and so do later requests
/// and later calls of pp_adopt, pp_reserve and pp_partition_open. The call then releases idle memory, but no reserves. Under
/// `register` and `cuda`, this release waits for all work of the device. If `pool` is a partition, nothing is released and only
/// its own requests fail; those that already wait for memory of its pool are still served.
///
/// Unlike pp_pool_destroy, this call keeps the handle: buffers in use are not affected, and the other functions work. Join the
/// threads that make requests, and then call pp_pool_destroy.
#[unsafe(no_mangle)]
pub extern "C" fn pp_pool_close(pool: *mut pp_pool) -> pp_status {
    guarded(|| {
        match slots::enter(pool)?.pool_or_partition()? {
            PoolOrPartition::Pool(pool) => pool.close(),
            PoolOrPartition::Partition(partition) => partition.close(),
        }
        Ok(pp_status::PP_OK)
    })
}

/// Destroys a pool or a partition: later calls with its handle, except returns, records and pp_is_pinned, return PP_UNKNOWN_POOL.
/// Running calls of other threads continue and may succeed; a pp_get that waits for memory continues to wait, so call
/// pp_pool_close and join such threads first.
///
/// Buffers in use stay valid. Return them through the same handle, which becomes invalid with the last return. Open partitions
/// keep the memory of a destroyed pool and still serve requests: destroy them first. The memory is released by one call, which
/// first waits until no copy is in flight:
///
/// - if no buffer is in use: this call
/// - if buffers are in use: the call that returns the last of them (under `register` and `cuda` pp_pool_destroy waits, too)
/// - if other calls on the pool are running: the last of them to end
///
/// The wait ends after 30 s unless copies keep completing. The memory of the remaining copies and the reserves (under
/// `register` and `cuda`, all memory of the pool) then stay pinned, the log says so, and the result is still PP_OK.
///
/// Under `register` and `cuda`, and for a reserve of `vmm`, the release waits for all work of the device, including the work of
/// other libraries. May be called from a log callback. A process may exit without destroying its pools. NULL is allowed and
/// does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn pp_pool_destroy(pool: *mut pp_pool) -> pp_status {
    guarded(|| NonNull::new(pool).map_or(Ok(()), |pool| slots::destroy(pool.as_ptr())).map(|()| pp_status::PP_OK))
}

/// Pins `bytes` more and keeps them until the pool ends. With PINPOOL_RESERVE_WAIT=0 most of them are pinned in the background;
/// only those are released earlier, by a lower limit (pp_set_max_bytes). Requests that fit into the reserve need no driver call.
/// `vmm` and `register` pin the reserve in slices of at most 128 MiB, and a request must fit into one slice. Needs the preset
/// adaptive.
///
/// - PP_OVER_LIMIT: the reserve exceeds the limit, or would leave no room for a waiting request.
/// - PP_INVALID_SETTING: the preset is tensorflow.
/// - PP_INVALID_ARGUMENT: `pool` is a partition.
/// - PP_MEMORY_REFUSED: the driver or the kernel refused all of it. If a part was refused, the call logs a warning, keeps a
///   smaller reserve and returns PP_OK.
/// - PP_DEVICE_RESET: as pp_get.
#[unsafe(no_mangle)]
pub extern "C" fn pp_reserve(pool: *mut pp_pool, bytes: u64) -> pp_status {
    guarded(|| Ok(slots::enter(pool)?.pool()?.reserve(bytes).map(|()| pp_status::PP_OK)?))
}

/// Changes the limit on all pinned bytes, in use and idle. PP_NO_LIMIT removes it; a shared limit still applies, and so does
/// RLIMIT_MEMLOCK if `auto` has chosen `mlock`. A lower limit releases idle memory now, the oldest first, and the part of a
/// reserve that was pinned in the background. Under `register` and `cuda` this waits for all work of the device. The memory of
/// returned buffers is released within a second by the maintenance thread, by pp_maintain, or by a miss that finds no room. A
/// higher limit serves waiting requests, but under `vmm`, `mlock` and `heap` the pool has addresses only for 8 times its first
/// limit, at least 16 GiB and at most 4 TiB. A partition has its own limit, which releases nothing, and its pool's limit
/// applies as well.
///
/// - PP_INVALID_ARGUMENT: `max_bytes` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn pp_set_max_bytes(pool: *mut pp_pool, max_bytes: u64) -> pp_status {
    guarded(|| {
        let max_bytes = limit(max_bytes)?;
        match slots::enter(pool)?.pool_or_partition()? {
            PoolOrPartition::Pool(pool) => pool.set_max_bytes(max_bytes)?,
            PoolOrPartition::Partition(partition) => partition.set_max_bytes(max_bytes)?,
        }
        Ok(pp_status::PP_OK)
    })
}

/// Releases idle memory, the oldest first, until at most `to_bytes` are pinned or nothing is idle. Does not touch buffers in
/// use or reserves. The call is slow; under `register` and `cuda` it waits for all work of the device, and with these backends
/// and the preset adaptive it releases nothing while a buffer is quarantined.
///
/// - PP_INVALID_ARGUMENT: `pool` is a partition.
#[unsafe(no_mangle)]
pub extern "C" fn pp_trim(pool: *mut pp_pool, to_bytes: u64) -> pp_status {
    guarded(|| slots::enter(pool)?.pool().map(|pool| pool.trim(to_bytes)).map(|()| pp_status::PP_OK))
}

/// Detects completed copies, and releases memory that has been idle for long (`register`, `cuda`: only under memory pressure).
/// Call it periodically with `maintenance_thread=0`.
///
/// - PP_INVALID_ARGUMENT: `pool` is a partition.
#[unsafe(no_mangle)]
pub extern "C" fn pp_maintain(pool: *mut pp_pool) -> pp_status {
    guarded(|| slots::enter(pool)?.pool().map(Pool::maintain).map(|()| pp_status::PP_OK))
}

/// Stores the statistics of the pool in `json`, as one JSON object on one line. Names that end in `_bytes` are bytes, names that
/// end in `_seconds` are seconds. Later versions may add names. For a partition, only its requests, waits, limit and bytes are
/// counted; all other values are 0. Free the string with pp_string_free.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_stats_json(pool: *mut pp_pool, json: *mut *mut c_char) -> pp_status {
    guarded(|| {
        let out = non_null(json, "json")?;
        store(out, ptr::null_mut());
        let stats = match slots::enter(pool)?.pool_or_partition()? {
            PoolOrPartition::Pool(pool) => pool.stats(),
            PoolOrPartition::Partition(partition) => partition.stats(),
        };
        let failed = |error| Failure::new(pp_status::PP_INTERNAL, format!("no statistics as JSON: {error}"));
        let text = serde_json::to_string(&stats).map_err(failed)?;
        store(out, text_for_c(&text).into_raw());
        Ok(pp_status::PP_OK)
    })
}

/// Frees a string of pp_stats_json. NULL is allowed. Do not call free() instead.
///
/// # Safety
///
/// A text of `pp_stats_json`, not released yet, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pp_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: `pp_stats_json` made the text by `into_raw`, and the caller does not use it again.
        drop(unsafe { CString::from_raw(text) });
    }
}
