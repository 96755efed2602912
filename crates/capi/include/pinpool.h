/*
 * pinpool: a pool of pinned host memory for programs that feed GPUs.
 *
 *     pp_pool *pool;
 *     void *batch;
 *     if (pp_pool_open("max_bytes=4GiB; name=loader", &pool) != PP_OK ||
 *         pp_get(pool, 1 << 20, &batch) != PP_OK) {
 *         fprintf(stderr, "%s\n", pp_last_error(NULL));
 *         exit(1);
 *     }
 *     ...                                      fill it, copy it on a stream
 *     pp_put_on_stream(pool, batch, stream);   reused when the stream is that far
 *     pp_pool_close(pool);
 *
 * Link with -lpinpool, or by `pkg-config --cflags --libs pinpool`. C99, C++11; pinpool.hpp has classes for C++17. CUDA is
 * looked for when the program runs: no toolkit is needed to build, and without a driver the memory comes from the kernel.
 *
 * Every function may be called from any thread at any time, in parallel with any other, and from log callbacks. Not from
 * signal handlers. None throws, none leaves an error in the CUDA runtime behind or changes the current context.
 *
 * Lengths are in bytes. What a function stores through a pointer argument belongs to the caller; texts that it returns belong
 * to the library. A NULL pointer is PP_INVALID_ARGUMENT unless its function allows it.
 *
 * After fork() the pools of the parent are the parent's: in the child each call on one is PP_FORKED and does nothing. A child
 * opens pools of its own.
 *
 * Within one major version, 0 included, nothing is taken away and no number changes. libpinpool.so.0 is the name of the binary
 * interface of version 0.
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

/**
 * What a function returns. The numbers never change; new ones may come.
 *
 * After every code but PP_OK and PP_NONE_IDLE, pp_last_error has a text that names the value, the limit and what to do. Unless
 * a function says otherwise, nothing has changed then, and what it would have stored is NULL or 0. Each function lists its codes.
 */
typedef enum {
  /** Done. */
  PP_OK = 0,
  /** An argument is NULL, out of range, or no text in UTF-8. */
  PP_INVALID_ARGUMENT = 1,
  /** A setting is unknown, cannot be read, or contradicts another. */
  PP_BAD_SETTING = 2,
  /** No buffer of this pool begins at this address: it was put already, lies inside a buffer, or comes from elsewhere. */
  PP_UNKNOWN_POINTER = 3,
  /** The handle is of a pool that was closed, or of none. */
  PP_UNKNOWN_POOL = 4,
  /** Over the limit (PINPOOL_MAX_BYTES), after the wait and with all idle memory released. A later call may succeed. */
  PP_LIMIT = 5,
  /** No buffer of this size is idle. Returned by pp_try_get alone. */
  PP_NONE_IDLE = 6,
  /** The driver or the kernel refused memory or a thread. A later call may succeed. */
  PP_BACKEND = 7,
  /** The device failed, so the end of its work is unknown. */
  PP_DEVICE = 8,
  /** The pool belongs to the process that forked this one. Nothing was done. */
  PP_FORKED = 9,
  /** A defect of the library. The pool continues. Any function may return it. */
  PP_INTERNAL = 10,
  /** This machine has no such backend or no CUDA driver. The same call fails again. */
  PP_UNAVAILABLE = 11,
  /** The stream is capturing a graph, and each launch would use the buffer again. Its memory is never reused. */
  PP_CAPTURING = 12,
  /** The driver knows no such stream or event, or no context is current on this thread. */
  PP_UNKNOWN_STREAM = 13,
  /** 4096 pools are open. Close one. */
  PP_TOO_MANY_POOLS = 14,
  /** Another logger of Rust receives the log lines of this process. Only from pp_set_log. */
  PP_LOGGER_SET = 15,
} pp_status;

/** Levels of log lines. Each has those before it. */
typedef enum {
  /** No lines. */
  PP_LOG_OFF = 0,
  /** Something failed that the library cannot set right. */
  PP_LOG_ERROR = 1,
  /** What needs a change of settings or of the machine. */
  PP_LOG_WARN = 2,
  /** Starts and ends of pools, growth, TensorFlow's lines. */
  PP_LOG_INFO = 3,
  /** Each call of a driver. */
  PP_LOG_DEBUG = 4,
  /** Everything. */
  PP_LOG_TRACE = 5,
} pp_log_level;

/** What a CUevent of the CUDA driver and a cudaEvent_t of its runtime point to. */
typedef struct CUevent_st CUevent_st;

/** What a CUstream of the CUDA driver and a cudaStream_t of its runtime point to. */
typedef struct CUstream_st CUstream_st;

/** A pool. A handle is no address: never follow it. Any thread may use it at any time. */
typedef struct pp_pool pp_pool;

/**
 * Requests a line: its level (pp_log_level), its text in UTF-8 without a line break at its end, which is valid during the call,
 * and the pointer that was set with it.
 *
 * Called from any thread, several at once, while no lock of the library is held: it may call any function of the library.
 * It must not throw or longjmp.
 */
typedef void (*pp_log_fn)(int level, const char *text, void *user_data);

/**
 * Gives adopted memory back: the address and the pointer that pp_adopt was given.
 *
 * Called once, from any thread, while no lock of the library is held. It must not throw or longjmp, nor wait for the pool.
 */
typedef void (*pp_return_fn)(void *ptr, void *user_data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/** The version of the library: "0.1.0", as PP_VERSION of the header that belongs to it. Static. */
const char *pp_version(void);

/** The name of a status: "PP_LIMIT"; "unknown" for a number that is none. Static, never NULL. */
const char *pp_status_name(int status);

/**
 * The text of the last call of this thread that failed, in UTF-8, of one or more lines; empty if none failed yet. Calls that
 * succeed do not change it. If `status` is not NULL, the code of that call is stored there, PP_OK if none failed.
 *
 * Never NULL. Valid until the next failing call of this thread, or its end.
 */
const char *pp_last_error(pp_status *status);

/**
 * Has the log lines of all pools up to `level` (pp_log_level) passed to `callback`, in place of an earlier one; NULL ends
 * that. Without a callback the library writes nothing anywhere.
 *
 * When this returns, the earlier callback has returned in all threads and is not called again, so its `user_data` may be
 * freed. Therefore hold no lock that it takes. Called from inside a callback, it does not wait for those that run.
 *
 * - PP_INVALID_ARGUMENT: no such level.
 * - PP_LOGGER_SET: another logger of Rust receives the lines of this process.
 */
pp_status pp_set_log(pp_log_fn callback,
                     void *user_data,
                     int level);

/**
 * Opens a pool and stores its handle in `pool`. Close it with pp_pool_close.
 *
 * `config` is UTF-8: items separated by `;` or line breaks.
 *
 * - `VARIABLE=VALUE` sets a setting by the name of its variable, with or without PINPOOL_, in upper or lower case, and
 *   overrides the environment: "max_bytes=64GiB; wait=2s". docs/settings.md lists the variables.
 * - `background_thread=0` starts no background thread; `call_stacks=100` keeps the call stack of one request in 100.
 * - `name=loader` names the pool in its log lines.
 * - An item without `=` is a prefix, of A to Z, digits and `_`, which ends in `_`: variables that begin with it are read in
 *   place of those that begin with PINPOOL_. With "EVAL_PINPOOL_" the limit is EVAL_PINPOOL_MAX_BYTES.
 *
 * NULL and "" mean the PINPOOL_* variables of the environment alone. What nothing sets has its default.
 *
 * May pin memory (`reserve=`) and tries the backends, so it may take seconds. A pool has no own thread; all pools of
 * a process share one that returns idle memory, unless `background_thread=0`.
 *
 * - PP_INVALID_ARGUMENT: `pool` is NULL, or `config` is not UTF-8 or has an invalid item.
 * - PP_BAD_SETTING: a setting is unknown, invalid, set twice or contradicts another.
 * - PP_UNAVAILABLE: this machine does not have the backend that was set.
 * - PP_BACKEND: the driver or the kernel refused the reserve or a thread.
 * - PP_LIMIT: the reserve is over the limit.
 * - PP_TOO_MANY_POOLS: 4096 pools are open.
 */
pp_status pp_pool_open(const char *config,
                       pp_pool **pool);

/**
 * Opens a part of `pool` with its own limit, `max_bytes`, and its own wait queue, and stores its handle in `partition`:
 * for a second use that must not take the memory of the first. Close it with pp_pool_close. `name` is UTF-8, and the tag of its
 * buffers.
 *
 * - PP_BAD_SETTING: `pool` is a partition.
 * - PP_TOO_MANY_POOLS: 4096 pools are open.
 * - PP_INVALID_ARGUMENT: NULL, or a `name` that is not UTF-8.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process.
 */
pp_status pp_partition(pp_pool *pool,
                       const char *name,
                       uint64_t max_bytes,
                       pp_pool **partition);

/**
 * Closes a pool. Calls of other threads that run continue and succeed; later ones get PP_UNKNOWN_POOL.
 *
 * Buffers that are out stay valid and are put as before, with the same handle; after the last one the handle is unknown. When
 * calls, buffers and the copies behind which buffers were put are over, all memory returns to the system, in the thread
 * that comes last, which waits up to 30 s for these copies. So this call may take that long if nothing
 * is out. May be called from a log callback.
 *
 * A process that ends need not close: the system takes the memory back.
 *
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_pool_close(pp_pool *pool);

/**
 * Pins `bytes` now, in one call, and keeps them until the pool ends: requests that fit are then fast from the first on. Needs
 * the preset adaptive.
 *
 * - PP_LIMIT: over the limit.
 * - PP_BAD_SETTING: the preset is tensorflow, or the pool is a partition.
 * - PP_BACKEND: the driver or the kernel refused.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_reserve(pp_pool *pool,
                     uint64_t bytes);

/**
 * Changes the limit on all bytes held, in use and idle. Under a lower one idle memory returns to the system, and what is out
 * when it is returned; a higher one serves waiting requests. A partition has its own limit, within the limit of its pool.
 *
 * - PP_INVALID_ARGUMENT: NULL, or 0 bytes.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process.
 */
pp_status pp_set_max_bytes(pp_pool *pool,
                           uint64_t max_bytes);

/**
 * Gives idle memory back to the system, the oldest first, until at most `to_bytes` are held or nothing is idle. Buffers that
 * are out stay. A slow call.
 *
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_trim(pp_pool *pool,
                  uint64_t to_bytes);

/**
 * Gives all idle buffers back to the system and begins the statistics of the window again. A slow call.
 *
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_clear(pp_pool *pool);

/**
 * Completes finished copies and releases memory that was idle for long. Call it periodically with `background_thread=0`.
 *
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_maintain(pp_pool *pool);

/**
 * Stores the statistics of the pool in `json`, as one JSON object on one line: bytes under names that end in `_bytes`,
 * seconds under those that end in `_seconds`. The names stay; new ones may come. Release the text with pp_string_free.
 *
 * - PP_BACKEND: no memory for the text.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_stats_json(pp_pool *pool, char **json);

/** Releases a text of pp_stats_json; NULL is allowed. The same as free(). */
void pp_string_free(char *text);

/**
 * Requests a buffer of `bytes` bytes and stores its address in `ptr`: idle memory of this size class, or newly pinned memory.
 * Put it back with pp_put, pp_put_on_stream or pp_put_on_event.
 *
 * The address is a multiple of 4096. The bytes mean nothing yet; under PINPOOL_ZERO they are 0. Where the limit leaves no
 * room, waits at most PINPOOL_WAIT; then fails, or gives memory that is not pinned, by PINPOOL_ON_FULL: pp_is_pinned tells.
 * 0 bytes are NULL and PP_OK.
 *
 * - PP_LIMIT: over the limit after the wait.
 * - PP_BACKEND: the driver or the kernel refused.
 * - PP_UNAVAILABLE: this machine does not have the backend that was set.
 * - PP_INVALID_ARGUMENT: NULL, or more than half of the address space.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process.
 */
pp_status pp_get(pp_pool *pool,
                 size_t bytes,
                 void **ptr);

/**
 * Requests a buffer as pp_get does, at a multiple of `alignment`.
 *
 * - PP_INVALID_ARGUMENT: `alignment` is not a power of two of at most 1 GiB.
 * - The codes of pp_get.
 */
pp_status pp_get_aligned(pp_pool *pool, size_t bytes, size_t alignment, void **ptr);

/**
 * Requests a buffer as pp_get does, counted under `tag`, UTF-8: out-of-memory texts, the statistics and reports say how much each tag
 * holds, and since when. A few tags, such as the parts of a program; not a new one for each buffer.
 *
 * - PP_INVALID_ARGUMENT: `tag` is NULL or not UTF-8.
 * - The codes of pp_get.
 */
pp_status pp_get_tagged(pp_pool *pool,
                        size_t bytes,
                        const char *tag,
                        void **ptr);

/**
 * Requests a buffer as pp_get does, with a wait of at most `timeout_ms` milliseconds in place of PINPOOL_WAIT; 0 does not
 * wait.
 *
 * - PP_LIMIT: over the limit after that time.
 * - The other codes of pp_get.
 */
pp_status pp_get_timeout(pp_pool *pool,
                         size_t bytes,
                         uint64_t timeout_ms,
                         void **ptr);

/**
 * Requests a buffer as pp_get does, if one of this size class is idle: it never pins and never waits.
 *
 * - PP_NONE_IDLE: none is idle. Not an error: pp_last_error does not change.
 * - PP_INVALID_ARGUMENT: NULL, or more than half of the address space.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process.
 */
pp_status pp_try_get(pp_pool *pool, size_t bytes, void **ptr);

/**
 * Makes `bytes` bytes at `ptr`, memory that the program or another library has pinned, a buffer of the pool, so that
 * pp_put_on_stream and pp_put_on_event know when work of a device with it is over: then, or at a pp_put, `on_return` is called with
 * `ptr` and `user_data`. `is_pinned` says whether the memory is pinned, and is what pp_is_pinned says. The bytes count neither as held nor
 * under the limit.
 *
 * - PP_INVALID_ARGUMENT: `ptr` or `on_return` is NULL, 0 bytes, or a buffer at `ptr` is in use.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process.
 *
 * After each of them `on_return` is not called; nor is it if the end of the work stays unknown (see pp_put_on_stream).
 */
pp_status pp_adopt(pp_pool *pool,
                   void *ptr,
                   size_t bytes,
                   int is_pinned,
                   pp_return_fn on_return,
                   void *user_data);

/**
 * Puts back the buffer at `ptr`, an address that a request of this pool gave or that it adopted. NULL is allowed and does nothing. No work of a
 * device may use the buffer any more; while some may, use pp_put_on_stream or pp_put_on_event. Any thread may put.
 *
 * - PP_UNKNOWN_POINTER: put already, from elsewhere, or inside a buffer; the text says which.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_put(pp_pool *pool,
                 void *ptr);

/**
 * Puts back the buffer at `ptr` behind all work that `stream` has so far: it is reused when that is over. The stream is a
 * CUstream or a cudaStream_t; NULL is the default stream of the context that is current on this thread. It may be destroyed
 * afterwards, its context only after its work.
 *
 * - PP_DEVICE: the driver refused to mark the work. Call this function again for the same stream, which must not have been
 *   destroyed; if it succeeds, nothing is lost.
 * - PP_CAPTURING: the stream is capturing a graph. Another call does not help.
 * - PP_UNKNOWN_STREAM: the driver knows no such stream.
 * - PP_UNAVAILABLE: this machine has no CUDA driver, so no device uses the buffer.
 * - PP_UNKNOWN_POINTER: put already, from elsewhere, or inside a buffer; the text says which.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 *
 * After each of them the buffer is not put: the caller still has it, and pp_put puts it. After the first three the end of the work
 * is unknown, so after pp_put the memory is never reused.
 */
pp_status pp_put_on_stream(pp_pool *pool,
                           void *ptr,
                           CUstream_st *stream);

/**
 * Puts back the buffer at `ptr` behind the work that `event` represents now, all that was enqueued before its last record: it
 * is reused when that is over. The event is a CUevent or a cudaEvent_t; it may be recorded again or destroyed afterwards. One
 * never recorded represents nothing. A context must be current on this thread: the event's or another.
 *
 * - PP_INVALID_ARGUMENT: `event` is NULL.
 * - The codes of pp_put_on_stream, with the same consequences. Before another call after PP_DEVICE the event must not have been
 *   recorded again.
 */
pp_status pp_put_on_event(pp_pool *pool,
                          void *ptr,
                          CUevent_st *event);

/**
 * Stores in `is_pinned` whether the buffer at `ptr` is pinned, 1 or 0: 0 for the backend heap, and for what a
 * full pool gives in place of pinned memory.
 *
 * - PP_UNKNOWN_POINTER: no buffer of this pool begins at `ptr`.
 * - PP_UNKNOWN_POOL: the pool was closed. PP_FORKED: it belongs to the parent process. PP_INVALID_ARGUMENT: NULL.
 */
pp_status pp_is_pinned(pp_pool *pool, const void *ptr, int *is_pinned);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINPOOL_H */
