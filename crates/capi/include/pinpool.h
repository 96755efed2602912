/* Generated from crates/capi/src and crates/capi/cbindgen: WRITE_HEADER=1 cargo test -p pinpool-capi header */

/*
 * pinpool: a pool of pinned host memory for CUDA transfers.
 *
 *     pp_pool *pool;
 *     void *batch;
 *     if (pp_pool_open("max_bytes=4GiB; name=loader", &pool) != PP_OK ||
 *         pp_get(pool, 1 << 20, &batch) != PP_OK) {
 *         fprintf(stderr, "%s\n", pp_last_error(NULL));
 *         exit(1);
 *     }
 *     fread(batch, 1, 1 << 20, file);
 *     cudaMemcpyAsync(device, batch, 1 << 20, cudaMemcpyHostToDevice, stream);
 *     // The buffer is reused once that work has completed.
 *     if (pp_may_put_after(pp_put_after_stream(pool, batch, stream)))
 *         pp_put(pool, batch);   // without a driver: reusable now; otherwise: never reused
 *     pp_pool_destroy(pool);
 *
 * Link with -lpinpool or `pkg-config --cflags --libs pinpool`. The header compiles as C99 and C++11; pinpool.hpp has classes
 * for C++17. The CUDA driver is loaded at run time: no toolkit is needed to build, and without a driver the memory is resident
 * (mlock) or pageable, unless the setting backend=gpu makes that an error.
 *
 * Every function may be called from any thread, concurrently, and from log callbacks, but not from signal handlers or CUDA host
 * functions (cudaLaunchHostFunc). Release callbacks (pp_release_fn) may call those that do not wait for the pool. No function
 * throws, leaves an error in the CUDA runtime or changes the current context.
 *
 * All lengths are in bytes: size_t for buffers, uint64_t for the limits and totals of a pool. Results stored through pointer
 * arguments belong to the caller. Returned `const char *` strings are owned by the library; do not free them.
 *
 * A forked child does not inherit pools: each call on a pool of its parent returns PP_FORKED and does nothing. The child opens
 * its own pools. Buffers of `vmm` and `register`, and with PINPOOL_HUGETLB the buffers of a reserve, are not mapped in the child:
 * reading one raises SIGSEGV.
 *
 * Within one major version, including 0, no function is removed and no number changes. The shared library of version 0 is
 * libpinpool.so.0.
 */

#ifndef PINPOOL_H
#define PINPOOL_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header; pp_version returns the library version. */
#define PP_VERSION "0.1.0"
#define PP_VERSION_MAJOR 0
#define PP_VERSION_MINOR 1
#define PP_VERSION_PATCH 0

/** Initial values of a pp_request_options. */
#define PP_REQUEST_OPTIONS_INIT {sizeof(pp_request_options), 1, PP_WAIT_DEFAULT, NULL}

/**
 * The compiler warns if the result is ignored: after a failure the pointer is NULL, the buffer was not returned, or the work was
 * not recorded. It does not warn for pp_put, so that cleanup code may ignore the result, nor for pp_set_log, pp_is_pinned and the
 * functions that only change or end a pool.
 */
#if defined(__GNUC__)
#define PP_NODISCARD __attribute__((warn_unused_result))
#else
#define PP_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/** No limit, for pp_partition_open and pp_set_max_bytes. */
#define PP_NO_LIMIT UINT64_MAX

/** The `timeout_ms` of a pp_request_options that waits up to PINPOOL_WAIT. */
#define PP_WAIT_DEFAULT UINT64_MAX

/** The `timeout_ms` of a pp_request_options that waits forever. */
#define PP_WAIT_FOREVER (UINT64_MAX - 1)

/**
 * The result of a function. The numbers never change; later versions may add codes.
 *
 * Every function that takes a pool may return PP_UNKNOWN_POOL or PP_FORKED and, unless its documentation allows NULL,
 * PP_INVALID_ARGUMENT for a NULL argument. Requests, pp_adopt, pp_reserve and pp_partition_open may return PP_CLOSED. Each
 * function documents its other codes. After any code other than PP_OK and PP_NONE_IDLE, pp_last_error returns its text: one or
 * more lines, usually with a remedy. Unless a function documents otherwise, such a call has changed nothing, and its results are
 * stored as NULL or 0.
 */
typedef enum {
  /** Success. */
  PP_OK = 0,
  /** An argument is NULL, out of range or invalid UTF-8. */
  PP_INVALID_ARGUMENT = 1,
  /** A setting is unknown, invalid or contradicts another, or the shared limit of PINPOOL_LEDGER cannot be joined. */
  PP_INVALID_SETTING = 2,
  /** The address is not the start of a buffer in use from this pool. */
  PP_UNKNOWN_POINTER = 3,
  /** This is not a pool or a partition, or it was destroyed (pp_pool_destroy). */
  PP_UNKNOWN_POOL = 4,
  /**
   * The request exceeds the limit of the pool (PINPOOL_MAX_BYTES), of its partition, or of pools that share a limit, or must
   * wait behind earlier requests. It did not wait, or stopped waiting when the limit became smaller than the request. A later
   * call may succeed, unless the request is larger than the limit.
   */
  PP_OVER_LIMIT = 5,
  /** No buffer of the size class is idle. Only from pp_try_get and pp_try_get_with. */
  PP_NONE_IDLE = 6,
  /** The driver or the operating system refused memory, pinned or not. A later call may succeed. */
  PP_MEMORY_REFUSED = 7,
  /**
   * The device failed, or the driver refused to examine the stream or the event for another reason than a capture, so the end
   * of the work is unknown.
   */
  PP_DEVICE_FAILED = 8,
  /** The pool belongs to the parent of this forked process. Nothing was done. */
  PP_FORKED = 9,
  /**
   * Internal error (a bug in pinpool). The pool remains usable. Any function may return it, except those that return
   * PP_BUFFER_LOST instead.
   */
  PP_INTERNAL = 10,
  /** The backend or the CUDA driver is not available on this machine. Retrying does not help. */
  PP_UNAVAILABLE = 11,
  /**
   * The stream is capturing a graph, or the event was recorded in a capture, and launches of that graph may use the buffer at
   * any time. The memory is never reused.
   */
  PP_STREAM_CAPTURING = 12,
  /** The stream or the event is not valid in this call; see pp_put_after_stream and pp_put_after_event. */
  PP_INVALID_HANDLE = 13,
  /** 4096 pools and partitions are open or have buffers in use. Destroy one. */
  PP_TOO_MANY_POOLS = 14,
  /** The process has already installed a Rust logger. Only from pp_set_log. */
  PP_LOGGER_SET = 15,
  /** The pool or partition was closed (pp_pool_close). Later requests fail, too. */
  PP_CLOSED = 16,
  /**
   * Internal error (a bug in pinpool) in a return or record: the caller no longer has the buffer. Do not return it, since
   * its address may belong to another buffer. Only from pp_put, pp_put_after_stream, pp_put_after_event, pp_record_stream
   * and pp_record_event.
   */
  PP_BUFFER_LOST = 17,
  /** The device was reset, and the pool's memory is gone. No later request of this pool succeeds: open another. */
  PP_DEVICE_RESET = 18,
  /**
   * As PP_OVER_LIMIT, but after the whole wait (PINPOOL_WAIT or `timeout_ms`), so a longer wait may help. Only from pp_get and
   * pp_get_with.
   */
  PP_TIMED_OUT = 19,
  /**
   * The driver refused to examine the stream or the event because a stream captures, for example the legacy stream while a
   * blocking stream does. The same call can succeed after the capture; until then the end of the work is unknown.
   */
  PP_REFUSED_BY_CAPTURE = 20,
} pp_status;

/**
 * Whether pp_put may return the buffer after a return or a record of it has failed with this code; see pp_put_after_stream. After
 * any other code, even of a later version, it may be another thread's buffer, or a copy may still use the memory.
 */
static inline int pp_may_put_after(pp_status status)
{
    return status == PP_UNAVAILABLE || status == PP_STREAM_CAPTURING || status == PP_REFUSED_BY_CAPTURE ||
           status == PP_INVALID_HANDLE || status == PP_DEVICE_FAILED;
}

/** Levels of log lines. Each level includes those above it in this list. */
typedef enum {
  /** No lines. */
  PP_LOG_OFF = 0,
  /** Failures that the library cannot recover from. */
  PP_LOG_ERROR = 1,
  /** Conditions that need a change of settings or of the machine. */
  PP_LOG_WARN = 2,
  /** Creation and end of pools, each doubling of their memory, TensorFlow's lines. */
  PP_LOG_INFO = 3,
  /** Each request that takes memory from the system, each end of a wait, and each release for another pool. */
  PP_LOG_DEBUG = 4,
  /** Everything. */
  PP_LOG_TRACE = 5,
} pp_log_level;

/** The target of a CUevent of the CUDA driver and of a cudaEvent_t of its runtime. */
typedef struct CUevent_st CUevent_st;

/** The target of a CUstream of the CUDA driver and of a cudaStream_t of its runtime. */
typedef struct CUstream_st CUstream_st;

/** A pool. An opaque handle; do not dereference it. Any thread may use it at any time. */
typedef struct pp_pool pp_pool;

/**
 * Receives a log line: its level (pp_log_level), its text in UTF-8 without a final line break, valid during the call, and the
 * `user_data` of pp_set_log.
 *
 * Called from any thread, possibly from several at once, while the library holds no lock, so it may call any function of the
 * library. But it must not return or record the buffer that the interrupted call of this thread records: that would wait for
 * the interrupted call. It must not throw or longjmp.
 */
typedef void (*pp_log_fn)(int level, const char *text, void *user_data);

/** Options of a request. Initialize them with PP_REQUEST_OPTIONS_INIT, and then set members. */
typedef struct {
  /** sizeof(pp_request_options), by which the library recognizes the version of the header. */
  size_t struct_size;
  /**
   * The address is a multiple of this number, a power of two of at most 1 GiB. Initially 1, since every address is a
   * multiple of 4096 anyway.
   */
  size_t alignment;
  /**
   * The longest wait for room, in milliseconds. Even with a shorter timeout, the call may wait up to 100 ms for driver calls of
   * other threads. Initially PP_WAIT_DEFAULT.
   */
  uint64_t timeout_ms;
  /**
   * The buffer is counted under this tag (UTF-8). Errors, the log and `pinpool top` show how much each tag holds, and since
   * when. Use few tags: one per part of the program, not one per buffer. Initially NULL: no tag. Not for a partition.
   */
  const char *tag;
} pp_request_options;

/**
 * Returns adopted memory to its owner, with the `ptr` and `user_data` of pp_adopt.
 *
 * Called at most once (see pp_adopt), from any thread, while the library holds no lock. It must not throw or longjmp. It may
 * call functions of the library that do not wait for the pool, such as pp_try_get, pp_put and pp_stats_json. It may call CUDA,
 * but must set the device first, since any context or none may be current. If it waits for the device, other calls on the pool
 * wait, too.
 */
typedef void (*pp_release_fn)(void *ptr, void *user_data);

/** The version of the library, such as "0.1.0": PP_VERSION in the matching header. Static. */
const char *pp_version(void);

/** The name of a status: "PP_OVER_LIMIT"; "unknown" if it is not a status, since any int is allowed. Static, never NULL. */
const char *pp_status_name(int status);

/**
 * The error text of the last failed call on this thread (UTF-8, one or more lines), or "" if none has failed. Successful calls
 * do not change it. If `status` is not NULL, stores the code of that call there, or PP_OK.
 *
 * Never NULL. Valid until the next failed call on this thread, or the thread's end.
 */
const char *pp_last_error(pp_status *status);

/**
 * Passes the log lines of all pools up to `level` (pp_log_level) to `callback`, replacing an earlier one; NULL disables it.
 * Without a callback, or with PP_LOG_OFF, log lines are dropped, but each kind of warning about settings or the machine is
 * written once to standard error.
 *
 * When this function returns, the earlier callback has returned in all threads and is not called again, so its `user_data` may
 * be freed. The caller must not hold a lock that the earlier callback takes. A call from inside a callback does not wait. Each
 * new pair of `callback` and `user_data` costs a few bytes, which are never freed.
 *
 * - PP_INVALID_ARGUMENT: no such level.
 * - PP_LOGGER_SET: the process has already installed a Rust logger.
 */
pp_status pp_set_log(pp_log_fn callback, void *user_data, int level);

/**
 * Opens a pool and stores its handle in `pool`. End it with pp_pool_destroy.
 *
 * `config` is UTF-8: items separated by `;` or line breaks. A value contains neither: set such a value in the environment.
 *
 * - `VARIABLE=VALUE` sets a setting by the name of its variable, with or without PINPOOL_, in upper or lower case, and
 *   overrides the environment: "max_bytes=2GiB; wait=2s". `pinpool doctor --settings --all` lists the variables.
 * - `maintenance_thread=0` starts no maintenance thread; `call_stacks=100` keeps the call stack of one request in 100.
 * - `name=loader` names the pool in its log lines.
 * - An item without `=` is a prefix of A to Z, digits and `_` that ends in `_`. Variables with this prefix are read in place of
 *   the PINPOOL_ variables. With "EVAL_PINPOOL_" the limit is EVAL_PINPOOL_MAX_BYTES.
 *
 * With NULL or "" only the PINPOOL_* variables of the environment apply. Everything else has its default.
 *
 * The call may take seconds: it pins the reserve, and may test the backends, which pins and releases up to 2 MiB. With `auto`
 * the test may be left to the next call on the pool. All pools of a process share one maintenance thread, unless
 * `maintenance_thread=0`. A GPU backend retains the primary context of the GPU that the setting `device` names, from the time
 * at which it first pins memory until the process ends. Streams of any context may be passed to the other functions.
 *
 * - PP_INVALID_ARGUMENT: `config` is not UTF-8 or has an invalid item.
 * - PP_INVALID_SETTING: a setting is unknown, invalid, set twice or contradicts another, the shared limit of PINPOOL_LEDGER
 *   cannot be joined, or the file of PINPOOL_TRACE cannot be written.
 * - PP_UNAVAILABLE: this machine does not have the backend that was set.
 * - PP_MEMORY_REFUSED: the driver or the kernel refused the whole reserve (see pp_reserve).
 * - PP_OVER_LIMIT: the reserve exceeds a shared limit or the limit `auto`. If it exceeds a `max_bytes` that was set, the code
 *   is PP_INVALID_SETTING.
 * - PP_TOO_MANY_POOLS: 4096 pools and partitions are open or have buffers in use.
 */
PP_NODISCARD pp_status pp_pool_open(const char *config, pp_pool **pool);

/**
 * Opens a part of `pool` with its own limit `max_bytes` and its own wait queue, and stores its handle in `partition`, for
 * requests that must not take all memory of the pool. End it with pp_pool_destroy. `name` (UTF-8) is the tag of its buffers,
 * which are returned, recorded and queried with the handle `partition`, not with `pool`.
 *
 * Not for a partition (PP_INVALID_ARGUMENT): requests with a tag, pp_adopt, pp_reserve, pp_trim, pp_maintain and
 * pp_partition_open.
 *
 * - PP_TOO_MANY_POOLS: 4096 pools and partitions are open or have buffers in use.
 * - PP_INVALID_ARGUMENT: `name` is not UTF-8, `max_bytes` is 0, or `pool` is a partition.
 */
PP_NODISCARD pp_status pp_partition_open(pp_pool *pool, const char *name, uint64_t max_bytes, pp_pool **partition);

/**
 * Closes a pool or a partition: waiting requests of the pool and its partitions fail with PP_CLOSED, and so do later requests
 * and later calls of pp_adopt, pp_reserve and pp_partition_open. The call then releases idle memory, but no reserves. Under
 * `register` and `cuda`, this release waits for all work of the device. If `pool` is a partition, nothing is released and only
 * its own requests fail; those that already wait for memory of its pool are still served.
 *
 * Unlike pp_pool_destroy, this call keeps the handle: buffers in use are not affected, and the other functions work. Join the
 * threads that make requests, and then call pp_pool_destroy.
 */
pp_status pp_pool_close(pp_pool *pool);

/**
 * Destroys a pool or a partition: later calls with its handle, except returns, records and pp_is_pinned, return PP_UNKNOWN_POOL.
 * Running calls of other threads continue and may succeed; a pp_get that waits for memory continues to wait, so call
 * pp_pool_close and join such threads first.
 *
 * Buffers in use stay valid. Return them through the same handle, which becomes invalid with the last return. Open partitions
 * keep the memory of a destroyed pool and still serve requests: destroy them first. The memory is released by one call, which
 * first waits until no copy is in flight:
 *
 * - if no buffer is in use: this call
 * - if buffers are in use: the call that returns the last of them (under `register` and `cuda` pp_pool_destroy waits, too)
 * - if other calls on the pool are running: the last of them to end
 *
 * The wait ends after 30 s unless copies keep completing. The memory of the remaining copies and the reserves (under
 * `register` and `cuda`, all memory of the pool) then stay pinned, the log says so, and the result is still PP_OK.
 *
 * Under `register` and `cuda`, and for a reserve of `vmm`, the release waits for all work of the device, including the work of
 * other libraries. May be called from a log callback. A process may exit without destroying its pools. NULL is allowed and
 * does nothing.
 */
pp_status pp_pool_destroy(pp_pool *pool);

/**
 * Pins `bytes` more and keeps them until the pool ends. With PINPOOL_RESERVE_WAIT=0 most of them are pinned in the background;
 * only those are released earlier, by a lower limit (pp_set_max_bytes). Requests that fit into the reserve need no driver call.
 * `vmm` and `register` pin the reserve in slices of at most 128 MiB, and a request must fit into one slice. Needs the preset
 * adaptive.
 *
 * - PP_OVER_LIMIT: the reserve exceeds the limit, or would leave no room for a waiting request.
 * - PP_INVALID_SETTING: the preset is tensorflow.
 * - PP_INVALID_ARGUMENT: `pool` is a partition.
 * - PP_MEMORY_REFUSED: the driver or the kernel refused all of it. If a part was refused, the call logs a warning, keeps a
 *   smaller reserve and returns PP_OK.
 * - PP_DEVICE_RESET: as pp_get.
 */
pp_status pp_reserve(pp_pool *pool, uint64_t bytes);

/**
 * Changes the limit on all pinned bytes, in use and idle. PP_NO_LIMIT removes it; a shared limit still applies, and so does
 * RLIMIT_MEMLOCK if `auto` has chosen `mlock`. A lower limit releases idle memory now, the oldest first, and the part of a
 * reserve that was pinned in the background. Under `register` and `cuda` this waits for all work of the device. The memory of
 * returned buffers is released within a second by the maintenance thread, by pp_maintain, or by a miss that finds no room. A
 * higher limit serves waiting requests, but under `vmm`, `mlock` and `heap` the pool has addresses only for 8 times its first
 * limit, at least 16 GiB and at most 4 TiB. A partition has its own limit, which releases nothing, and its pool's limit
 * applies as well.
 *
 * - PP_INVALID_ARGUMENT: `max_bytes` is 0.
 */
pp_status pp_set_max_bytes(pp_pool *pool, uint64_t max_bytes);

/**
 * Releases idle memory, the oldest first, until at most `to_bytes` are pinned or nothing is idle. Does not touch buffers in
 * use or reserves. The call is slow; under `register` and `cuda` it waits for all work of the device, and with these backends
 * and the preset adaptive it releases nothing while a buffer is quarantined.
 *
 * - PP_INVALID_ARGUMENT: `pool` is a partition.
 */
pp_status pp_trim(pp_pool *pool, uint64_t to_bytes);

/**
 * Detects completed copies, and releases memory that has been idle for long (`register`, `cuda`: only under memory pressure).
 * Call it periodically with `maintenance_thread=0`.
 *
 * - PP_INVALID_ARGUMENT: `pool` is a partition.
 */
pp_status pp_maintain(pp_pool *pool);

/**
 * Stores the statistics of the pool in `json`, as one JSON object on one line. Names that end in `_bytes` are bytes, names that
 * end in `_seconds` are seconds. Later versions may add names. For a partition, only its requests, waits, limit and bytes are
 * counted; all other values are 0. Free the string with pp_string_free.
 */
PP_NODISCARD pp_status pp_stats_json(pp_pool *pool, char **json);

/** Frees a string of pp_stats_json. NULL is allowed. Do not call free() instead. */
void pp_string_free(char *text);

/**
 * Allocates a buffer of `bytes` bytes and stores its address in `ptr`. Reuses pinned memory, or pins more. Return the buffer
 * with pp_put, pp_put_after_stream or pp_put_after_event.
 *
 * The address is a multiple of 4096. The content is undefined, or zero with PINPOOL_ZERO. If the limit leaves no room, or the
 * driver refuses while pools of this process hold memory, the call waits up to PINPOOL_WAIT. Then it fails or, with
 * PINPOOL_ON_FULL=pageable, returns pageable memory (see pp_is_pinned). For 0 bytes the call stores NULL and returns PP_OK.
 *
 * - PP_TIMED_OUT: over the limit after the whole wait.
 * - PP_OVER_LIMIT: over the limit, and not after the whole wait, for example if the request is larger than the limit.
 * - PP_MEMORY_REFUSED: the driver or the kernel refused.
 * - PP_DEVICE_RESET: the device was reset.
 * - PP_INVALID_ARGUMENT: `bytes` exceeds PTRDIFF_MAX after rounding.
 */
PP_NODISCARD pp_status pp_get(pp_pool *pool, size_t bytes, void **ptr);

/**
 * Allocates as pp_get does, with these options:
 *
 *     pp_request_options options = PP_REQUEST_OPTIONS_INIT;
 *     options.timeout_ms = 500;
 *     pp_status status = pp_get_with(pool, 1 << 20, &options, &batch);
 *
 * - PP_INVALID_ARGUMENT: an option is invalid, or `struct_size` is not its size in this version or an earlier one.
 * - The other codes of pp_get.
 */
PP_NODISCARD pp_status pp_get_with(pp_pool *pool, size_t bytes, const pp_request_options *options, void **ptr);

/**
 * Allocates as pp_get does if a buffer of the size class of `bytes` is idle. Free memory of a reserve is not an idle buffer.
 * Pins no memory and does not wait for room, but may release memory under the preset tensorflow, PINPOOL_MAX_IDLE_BYTES or a
 * shared limit. The first call on a pool may test the backends (see pp_pool_open).
 *
 * - PP_NONE_IDLE: no such buffer is idle or, for a partition, its limit leaves no room or earlier requests wait. This is not an
 *   error, so pp_last_error does not change.
 * - PP_INVALID_ARGUMENT: `bytes` exceeds PTRDIFF_MAX after rounding.
 */
PP_NODISCARD pp_status pp_try_get(pp_pool *pool, size_t bytes, void **ptr);

/**
 * Allocates as pp_try_get does, with the alignment and the tag of these options. Ignores their timeout.
 *
 * - PP_NONE_IDLE: no such buffer is idle, as for pp_try_get.
 * - PP_INVALID_ARGUMENT: as pp_get_with.
 */
PP_NODISCARD pp_status pp_try_get_with(pp_pool *pool, size_t bytes, const pp_request_options *options, void **ptr);

/**
 * Makes the `bytes` bytes at `ptr`, memory of the program or another library, a buffer of the pool. Return it like any
 * other buffer. Once device work with the buffer has completed, the pool calls `on_release` with `ptr` and `user_data`; only
 * `user_data` may be NULL. pp_is_pinned stores `is_pinned` for the buffer. The bytes do not count towards the limit.
 *
 * `ptr` must stay valid, and pinned by the driver if `is_pinned` is 1, until `on_release` is called.
 *
 * - PP_INVALID_ARGUMENT: 0 bytes or more than PTRDIFF_MAX, `pool` is a partition, or a buffer that starts at `ptr` is in use.
 *   Memory that overlaps a buffer is not detected.
 *
 * `on_release` is not called after a failure, nor if the end of the work stays unknown (see pp_put_after_stream).
 */
PP_NODISCARD pp_status pp_adopt(pp_pool *pool, void *ptr, size_t bytes, int is_pinned, pp_release_fn on_release, void *user_data);

/**
 * Returns the buffer at `ptr`, the address of an allocation or of adopted memory, to its pool. NULL is allowed and does
 * nothing. If device work that is not recorded may still use the buffer, use pp_put_after_stream or pp_put_after_event
 * instead. If one of these fails, pp_put may return the buffer instead (pp_may_put_after); pp_put_after_stream says when the memory
 * is then reused. Any thread may call this function. It waits while another thread records work on the buffer. The last
 * return to a destroyed pool releases the pool's memory and may wait (pp_pool_destroy).
 *
 * - PP_UNKNOWN_POINTER: `ptr` was already returned, is being returned by another thread, belongs to another pool, or points
 *   into the middle of a buffer; see pp_last_error. Once the address is handed out again, a second return is not detected, and
 *   returns the new buffer.
 */
pp_status pp_put(pp_pool *pool, void *ptr);

/**
 * Returns the buffer at `ptr` to its pool, which reuses it once all work enqueued on `stream` so far has completed. `stream` is
 * a CUstream or a cudaStream_t. The stream may be destroyed after this call. Its context, unless it is a primary context, may be
 * destroyed (cuCtxDestroy) only after pp_pool_destroy and the return of every buffer of the pool. Until then another thread may
 * query the context, even if the work has completed.
 *
 * NULL is always the legacy default stream (in pinpool.hpp it is the translation unit's default stream): code compiled with
 * `--default-stream per-thread` should pass `cudaStreamPerThread`. With NULL the fence is on the legacy stream, which is safe
 * but slow: the fence and the blocking streams of the context (those without CU_STREAM_NON_BLOCKING) wait for each other.
 * While one of them captures, the driver refuses the fence. The legacy stream belongs to the current context, and
 * `cudaStreamPerThread` also to the calling thread. Make this call on the thread that enqueued the work, with the same device
 * current, or use pp_put_after_event.
 *
 * - PP_REFUSED_BY_CAPTURE: a stream captures, for example a blocking stream while `stream` is NULL. After the capture, call
 *   this function again with the same stream, which must still exist; if that succeeds, the buffer is reused.
 * - PP_DEVICE_FAILED: the driver refused for another reason. A second call, as above, may succeed, except with a default
 *   stream of a green context: pass another stream. If the driver only refuses to record an event, the call succeeds: it waits
 *   up to 0.5 s for the stream (not for a default stream), and if that is not enough, the pool waits for all work of the
 *   context.
 * - PP_STREAM_CAPTURING: the stream is capturing a graph.
 * - PP_INVALID_HANDLE: the driver reported an invalid stream handle, or `stream` is a default stream and no context is current:
 *   make the context of the work current (cudaSetDevice) and repeat the call on this thread. The pool takes the next successful
 *   call on this thread with this buffer and this handle as the repetition, even if another context is then current. Passing
 *   the handle of a destroyed stream or event is undefined behavior.
 * - PP_UNAVAILABLE: there is no CUDA driver, or cuInit fails, so no work of this process uses the buffer.
 * - PP_UNKNOWN_POINTER: as pp_put.
 *
 * NULL for `ptr` is allowed and does nothing. After a code that pp_may_put_after accepts, the caller still has the buffer,
 * and pp_put returns it. After any other code do not return `ptr` to this pool again. After pp_put the memory is:
 *
 * - after PP_UNAVAILABLE: reused immediately.
 * - after PP_STREAM_CAPTURING or a NULL event: never reused, even if a second call succeeds.
 * - after PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, or PP_INVALID_HANDLE for another reason: never reused, unless a second call
 *   with the same stream or event has succeeded first.
 */
PP_NODISCARD pp_status pp_put_after_stream(pp_pool *pool, void *ptr, CUstream_st *stream);

/**
 * Returns the buffer at `ptr` to its pool, which reuses it once the work before the last cudaEventRecord of `event` has completed.
 * `event` is a CUevent or a cudaEvent_t, and may be recorded again or destroyed after this call. An event that was never
 * recorded covers no work. If the work has not completed, a context (the event's or another) must be current on this thread.
 * The call then creates an internal stream that waits for the event. If the driver refuses that stream, the call itself waits
 * until the work has completed. pp_put_after_stream needs fewer driver calls. The event's context, and the context that is
 * current on this thread, must live as long as pp_put_after_stream says. NULL for `ptr` is allowed and does nothing.
 *
 * - PP_INVALID_HANDLE: `event` is NULL, the driver reported an invalid event handle, or the work has not completed and no
 *   context is current.
 * - PP_STREAM_CAPTURING (also for an event recorded in a capture), PP_DEVICE_FAILED, PP_REFUSED_BY_CAPTURE, PP_UNAVAILABLE,
 *   PP_UNKNOWN_POINTER: as pp_put_after_stream. The event must not be recorded again before a second call.
 */
PP_NODISCARD pp_status pp_put_after_event(pp_pool *pool, void *ptr, CUevent_st *event);

/**
 * Records that the work enqueued so far on `stream` uses the buffer at `ptr`, which stays with the caller. Once the buffer is
 * returned, the pool reuses the memory when this work, too, has completed. For a buffer that several streams use, call this
 * function for each stream, concurrently or not, and then pp_put. pp_put_after_stream describes default streams and how long
 * the context must live. NULL for `ptr` is allowed and does nothing.
 *
 * - PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, PP_STREAM_CAPTURING, PP_INVALID_HANDLE, PP_UNAVAILABLE, PP_UNKNOWN_POINTER: as
 *   pp_put_after_stream.
 */
PP_NODISCARD pp_status pp_record_stream(pp_pool *pool, void *ptr, CUstream_st *stream);

/**
 * Records that the work before the last cudaEventRecord of `event` uses the buffer at `ptr`, as pp_record_stream does for a
 * stream. pp_put_after_event describes the event. NULL for `ptr` is allowed and does nothing.
 *
 * - PP_STREAM_CAPTURING, PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, PP_INVALID_HANDLE, PP_UNAVAILABLE, PP_UNKNOWN_POINTER: as
 *   pp_put_after_event.
 */
PP_NODISCARD pp_status pp_record_event(pp_pool *pool, void *ptr, CUevent_st *event);

/**
 * Stores in `is_pinned` whether the driver pinned the buffer at `ptr`, so that copies can be asynchronous: 1 or 0. For
 * adopted memory it is the argument of pp_adopt. For other memory it is 0 with the backends heap and mlock, and for the pageable
 * memory of a full pool (PINPOOL_ON_FULL=pageable).
 *
 * - PP_UNKNOWN_POINTER: no buffer in use of this pool begins at `ptr`.
 */
pp_status pp_is_pinned(pp_pool *pool, const void *ptr, int *is_pinned);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINPOOL_H */
