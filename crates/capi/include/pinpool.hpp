/*
 * pinpool for C++17: classes around pinpool.h, written by hand.
 *
 *     pinpool::pool pool("max_bytes=4GiB; name=loader");
 *     {
 *         pinpool::buffer batch = pool.get(1 << 20, stream);
 *         file.read(batch.data_as<char>(), batch.size());
 *         cudaMemcpyAsync(device, batch.data(), batch.size(), cudaMemcpyHostToDevice, stream);
 *     }   // its destructor returns the buffer, which is reused once the copy has completed
 *
 *     pinpool::pinned_resource memory(pool, stream);
 *     std::pmr::vector<float> values(1024, &memory);
 *
 * Each function that returns memory takes the stream of its copies, or `pinpool::host_only` if only host code uses it.
 *
 * Functions that fail throw pinpool::error, but allocations of a pinned_resource throw pinpool::bad_alloc, and reset(),
 * put_ignoring_stream() and destructors throw nothing. A pool, a partition and a pinned_resource may be used by several threads
 * concurrently; a buffer by one thread at a time. Needs exceptions and RTTI.
 *
 * A null stream is the default stream of the translation unit (in pinpool.h it is always the legacy stream):
 * cudaStreamPerThread if it is compiled with `--default-stream per-thread` (nvcc) or CUDA_API_PER_THREAD_DEFAULT_STREAM,
 * otherwise cudaStreamLegacy.
 *
 * Do not pass pools and buffers between translation units of the two kinds: their classes differ. Pass `pool.native_handle()`
 * and `buffer.data()` instead.
 */
#ifndef PINPOOL_HPP
#define PINPOOL_HPP

#if __cplusplus < 201703L
#error "pinpool.hpp needs C++17"
#endif

#include "pinpool.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define PINPOOL_DEFAULT_STREAM per_thread_default_stream
#else
#define PINPOOL_DEFAULT_STREAM legacy_default_stream
#endif

namespace pinpool {

/** The type of host_only. */
struct host_only_t {
    explicit constexpr host_only_t(int) noexcept {}
};

/**
 * In place of a stream, for memory that only host code uses. Such memory is reusable as soon as its buffer is destroyed: first
 * synchronize a copy, or return the buffer with put_after_stream or put_after_event.
 */
inline constexpr host_only_t host_only{0};

/** The legacy default stream (CU_STREAM_LEGACY, cudaStreamLegacy) of the current context. */
inline CUstream_st *const legacy_stream = reinterpret_cast<CUstream_st *>(1);

/** The per-thread default stream (CU_STREAM_PER_THREAD, cudaStreamPerThread) of the current context and the calling thread. */
inline CUstream_st *const per_thread_stream = reinterpret_cast<CUstream_st *>(2);

/** A failed call: its status and its text. */
class error : public std::runtime_error {
public:
    /** The last failed call of this thread, even if it was a direct call of a function of pinpool.h. */
    static error last()
    {
        pp_status status = PP_OK;
        const char *const text = pp_last_error(&status);
        return error(status, text);
    }

    /** A failure with this status and this text. */
    error(pp_status status, const char *text) : std::runtime_error(text), status_(status) {}

    pp_status status() const noexcept { return status_; }

private:
    pp_status status_;
};

/** A failed allocation of a pinned_resource: the last failed call of this thread. */
class bad_alloc : public std::bad_alloc {
public:
    const char *what() const noexcept override { return error_.what(); }
    pp_status status() const noexcept { return error_.status(); }

private:
    error error_ = error::last();
};

/** Options of a request; see pp_request_options. */
struct request_options {
    std::size_t alignment = 1;
    std::optional<std::chrono::milliseconds> timeout = {}; /**< PINPOOL_WAIT if empty; milliseconds::max() waits forever. */
    std::string tag = {};                                  /**< Empty: no tag. */
};

namespace detail {

inline void check(pp_status status)
{
    if (status != PP_OK)
        throw error(status, pp_last_error(nullptr));
}

/** Returns a buffer. If the end of the work is unknown, the memory is never reused; see pp_put_after_stream. */
inline void put(pp_pool *pool, void *data, std::optional<CUstream_st *> after) noexcept
{
    if (after) {
        const pp_status status = pp_put_after_stream(pool, data, *after);
        if (!pp_may_put_after(status))
            return; // Returned or, if that is not certain, leaked and never reused.
    }
    pp_put(pool, data);
}

/** A pool or a partition, destroyed with its last object. Buffers do not share it: they can be returned afterwards. */
struct owned_pool {
    pp_pool *handle = nullptr;

    owned_pool() = default;
    owned_pool(const owned_pool &) = delete;
    owned_pool &operator=(const owned_pool &) = delete;
    ~owned_pool() { pp_pool_destroy(handle); }
};

/** Returns `text.c_str()`, and refuses a NUL in the text, since the C library would ignore what follows it. */
inline const char *checked_c_str(const std::string &text)
{
    if (text.find('\0') != std::string::npos)
        throw error(PP_INVALID_ARGUMENT, "a setting, name or tag contains a NUL");
    return text.c_str();
}

/** The tag of the result is a pointer into `options`. */
inline pp_request_options to_c_options(const request_options &options)
{
    pp_request_options c_options = PP_REQUEST_OPTIONS_INIT;
    c_options.alignment = options.alignment;
    if (options.timeout)
        c_options.timeout_ms = options.timeout->count() < 0 ? 0 : static_cast<std::uint64_t>(options.timeout->count());
    if (!options.tag.empty())
        c_options.tag = checked_c_str(options.tag);
    return c_options;
}

/** Whether an object of this class converts to a stream, as c10::cuda::CUDAStream does. */
template <typename Stream>
inline constexpr bool is_stream_convertible = std::is_class_v<Stream> && std::is_convertible_v<const Stream &, CUstream_st *>;

/** Whether this class has operator*, as smart pointers have. An empty smart pointer must not become a default stream. */
template <typename Pointer, typename = void> struct is_dereferenceable : std::false_type {};
template <typename Pointer>
struct is_dereferenceable<Pointer, std::void_t<decltype(*std::declval<const Pointer &>())>> : std::true_type {};

/** Whether get() of an object of this class returns a stream, as in cuda::stream_ref of CCCL. Smart pointers are excluded. */
template <typename Stream, typename = void> struct has_stream_getter : std::false_type {};
template <typename Stream>
struct has_stream_getter<Stream, std::void_t<decltype(std::declval<const Stream &>().get())>>
    : std::bool_constant<std::is_convertible_v<decltype(std::declval<const Stream &>().get()), CUstream_st *> &&
                         !is_stream_convertible<Stream> && !is_dereferenceable<Stream>::value> {};

inline namespace PINPOOL_DEFAULT_STREAM {
class pool_functions;
} // namespace PINPOOL_DEFAULT_STREAM
} // namespace detail

inline namespace PINPOOL_DEFAULT_STREAM {

class pool;
class pinned_resource;

/** The stream that a null CUstream or cudaStream_t is in this translation unit. */
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
inline CUstream_st *const default_stream = per_thread_stream;
#else
inline CUstream_st *const default_stream = legacy_stream;
#endif

/**
 * A stream (CUstream or cudaStream_t). A null CUstream is default_stream. Not constructible from {}, nullptr or 0, so that no
 * default stream is used by mistake.
 */
class stream_handle {
public:
    stream_handle(CUstream_st *stream) noexcept : stream_(stream == nullptr ? default_stream : stream) {}
    stream_handle(std::nullptr_t) = delete; /**< Pass default_stream. */
    stream_handle(int) = delete;            /**< Pass default_stream. */

    /** A stream class of a library that converts to CUstream_st *. Tested with a class of the form of c10::cuda::CUDAStream. */
    template <typename Stream, std::enable_if_t<detail::is_stream_convertible<Stream>, int> = 0>
    stream_handle(const Stream &stream) : stream_handle(static_cast<CUstream_st *>(stream))
    {
    }

    /**
     * A stream class of a library with a member get(). Tested with a class of the form of cuda::stream_ref of CCCL. For a smart
     * pointer, pass its get().
     */
    template <typename Stream, std::enable_if_t<detail::has_stream_getter<Stream>::value, int> = 0>
    stream_handle(const Stream &stream) : stream_handle(static_cast<CUstream_st *>(stream.get()))
    {
    }

    CUstream_st *get() const noexcept { return stream_; }

private:
    CUstream_st *stream_;
};

/**
 * When the memory of a destroyed buffer is reused: after the work enqueued so far on a stream, or with host_only immediately.
 * Constructible from what stream_handle is constructible from. Not default-constructible, so that a forgotten stream is an
 * error of the compiler.
 */
class stream_or_host {
public:
    template <typename Stream, typename = std::enable_if_t<std::is_convertible_v<const Stream &, stream_handle>>>
    stream_or_host(const Stream &stream) : stream_(stream_handle(stream).get())
    {
    }
    constexpr stream_or_host(host_only_t) noexcept {}
    stream_or_host(std::nullptr_t) = delete; /**< Pass default_stream. */
    stream_or_host(int) = delete;            /**< Pass default_stream. */

    /** The stream; empty for host_only. */
    constexpr std::optional<CUstream_st *> get() const noexcept { return stream_; }

private:
    std::optional<CUstream_st *> stream_;
};

/**
 * A buffer of a pool. Its destructor returns the memory, which is reused once the work enqueued on the buffer's stream has
 * completed, or immediately with host_only. If the driver refuses the stream in the destructor, the memory is never reused;
 * `memory.quarantined` in stats_json() counts it. To learn of a refusal and to try again, call put_after_stream before the
 * destructor runs. With a default stream, destroy the buffer on the thread that enqueued the work, with the same device current.
 * A buffer may outlive its pool: the last return then releases its memory and may wait, see pp_pool_destroy. The object
 * is empty after a move, reset() and put_ignoring_stream(), after a put_after_stream or put_after_event that did not throw, and
 * after an error with a code that pp_may_put_after refuses: the memory is then another thread's, or is leaked. Calls on an
 * empty buffer do nothing.
 */
class [[nodiscard]] buffer {
public:
    buffer() noexcept = default;
    buffer(buffer &&other) noexcept { swap(other); }
    buffer &operator=(buffer &&other) noexcept
    {
        buffer(std::move(other)).swap(*this);
        return *this;
    }
    ~buffer()
    {
        if (data_ != nullptr)
            detail::put(pool_, data_, after_.get());
    }

    std::byte *data() noexcept { return static_cast<std::byte *>(data_); }
    const std::byte *data() const noexcept { return static_cast<const std::byte *>(data_); }
    std::size_t size() const noexcept { return size_; }

    /** The start of the memory as a pointer to T, for example to char for std::istream::read. */
    template <typename T> T *data_as() noexcept { return static_cast<T *>(data_); }
    template <typename T> const T *data_as() const noexcept { return static_cast<const T *>(data_); }

    explicit operator bool() const noexcept { return data_ != nullptr; }

    /** Whether the driver pinned the memory; see pp_is_pinned. */
    bool is_pinned() const
    {
        int result = 0;
        if (data_ != nullptr)
            detail::check(pp_is_pinned(pool_, data_, &result));
        return result != 0;
    }

    /** The memory is reused after the work of this stream, or immediately with host_only. */
    stream_or_host stream() const noexcept { return after_; }

    /**
     * Sets the stream on which the work must complete before the memory is reused after the destructor. First record work that is
     * enqueued on the earlier stream (record_stream). The stream must not be destroyed before the destructor has run.
     */
    void set_stream(stream_or_host after) noexcept { after_ = after; }

    /** Records that the work enqueued so far on `stream` uses the buffer, which is kept; see pp_record_stream. */
    void record_stream(stream_handle stream)
    {
        call_with_buffer([&](pp_pool *pool, void *data) { return pp_record_stream(pool, data, stream.get()); });
    }

    /** As record_stream, for the work before the last cudaEventRecord of `event`; see pp_record_event. */
    void record_event(CUevent_st *event)
    {
        call_with_buffer([&](pp_pool *pool, void *data) { return pp_record_event(pool, data, event); });
    }
    void record_event(std::nullptr_t) = delete;

    /** Returns the buffer to its pool as the destructor does: the memory is reused after the work of the buffer's stream. */
    void reset() noexcept { const buffer returned(std::move(*this)); }

    /** Returns the buffer to its pool immediately, and ignores its stream. Only recorded device work may still use it. */
    void put_ignoring_stream() noexcept
    {
        if (data_ != nullptr)
            pp_put(pool_, data_);
        forget();
    }

    /**
     * Returns the buffer to its pool, which reuses it once all work enqueued on `stream` so far has completed. If this throws
     * a code that pp_may_put_after accepts, the object still has the buffer, and unless a second call succeeds, the memory is never
     * reused. After PP_STREAM_CAPTURING it is never reused, and after PP_UNAVAILABLE it is reused immediately.
     */
    void put_after_stream(stream_handle stream)
    {
        call_with_buffer([&](pp_pool *pool, void *data) { return pp_put_after_stream(pool, data, stream.get()); });
        forget();
    }

    /** As put_after_stream, for the work before the last cudaEventRecord of `event`; see pp_put_after_event. */
    void put_after_event(CUevent_st *event)
    {
        call_with_buffer([&](pp_pool *pool, void *data) { return pp_put_after_event(pool, data, event); });
        forget();
    }
    void put_after_event(std::nullptr_t) = delete;

    void swap(buffer &other) noexcept
    {
        std::swap(pool_, other.pool_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(after_, other.after_);
    }

private:
    friend class pool;
    friend class detail::pool_functions;
    buffer(pp_pool *pool, void *data, std::size_t size, stream_or_host after) noexcept
        : pool_(pool), data_(data), size_(size), after_(after)
    {
    }

    /** Calls a function of pinpool.h with the buffer, if any. Forgets a buffer that the object no longer has. */
    template <typename Function> void call_with_buffer(Function function)
    {
        if (data_ == nullptr)
            return;
        const pp_status status = function(pool_, data_);
        if (status == PP_OK)
            return;
        if (!pp_may_put_after(status))
            forget();
        throw error(status, pp_last_error(nullptr));
    }

    void forget() noexcept
    {
        pool_ = nullptr;
        data_ = nullptr;
        size_ = 0;
        after_ = host_only;
    }

    pp_pool *pool_ = nullptr;
    void *data_ = nullptr;
    std::size_t size_ = 0;
    stream_or_host after_ = host_only;
};

} // namespace PINPOOL_DEFAULT_STREAM

namespace detail {
inline namespace PINPOOL_DEFAULT_STREAM {

/** The functions of `pool` and `partition`, which are handles: const members may change the pool. */
class pool_functions {
public:
    /**
     * Returns a buffer for copies on the stream `after`, which must not be destroyed before the buffer; see pp_get. With a default
     * stream, destroy the buffer on the thread that enqueued the work, with the same device current.
     */
    buffer get(std::size_t bytes, stream_or_host after) const
    {
        void *data = nullptr;
        check(pp_get(native_handle(), bytes, &data));
        return buffer(native_handle(), data, bytes, after);
    }

    /** As above, with options, but slower. C++20: pool.get(bytes, stream, {.alignment = 1 << 16, .tag = "decode"}) */
    buffer get(std::size_t bytes, stream_or_host after, const request_options &options) const
    {
        const pp_request_options c_options = to_c_options(options);
        void *data = nullptr;
        check(pp_get_with(native_handle(), bytes, &c_options, &data));
        return buffer(native_handle(), data, bytes, after);
    }

    /**
     * Returns an idle buffer, or std::nullopt if none is idle; see pp_try_get_with, which ignores the timeout. A buffer of 0 bytes
     * is empty, but not std::nullopt.
     */
    [[nodiscard]] std::optional<buffer> try_get(std::size_t bytes, stream_or_host after, const request_options &options = {}) const
    {
        const pp_request_options c_options = to_c_options(options);
        void *data = nullptr;
        const pp_status status = pp_try_get_with(native_handle(), bytes, &c_options, &data);
        if (status == PP_NONE_IDLE)
            return std::nullopt;
        check(status);
        return buffer(native_handle(), data, bytes, after);
    }

    /** Makes waiting and later requests fail with PP_CLOSED; see pp_pool_close. */
    void close() const { check(pp_pool_close(native_handle())); }

    /** Changes the limit; see pp_set_max_bytes. */
    void set_max_bytes(std::uint64_t max_bytes) const { check(pp_set_max_bytes(native_handle(), max_bytes)); }

    /** The statistics as a JSON object. */
    [[nodiscard]] std::string stats_json() const
    {
        char *json = nullptr;
        check(pp_stats_json(native_handle(), &json));
        const std::unique_ptr<char, void (*)(char *)> freed_at_end(json, pp_string_free);
        return std::string(json);
    }

    /** The handle, for the functions of pinpool.h. Valid for the lifetime of this object; do not destroy it. */
    pp_pool *native_handle() const noexcept { return pool_->handle; }

protected:
    pool_functions() : pool_(std::make_shared<owned_pool>()) {}
    pool_functions(const pool_functions &) = default; // No move, so that every object has a pool.
    pool_functions &operator=(const pool_functions &) = default;
    ~pool_functions() = default;

    friend class pinpool::pinned_resource;
    std::shared_ptr<owned_pool> pool_;
};

} // namespace PINPOOL_DEFAULT_STREAM
} // namespace detail

inline namespace PINPOOL_DEFAULT_STREAM {

/**
 * A part of a pool with its own limit and wait queue, shared by its copies; see pp_partition_open. Destroying the last copy or
 * pinned_resource destroys it, but not its buffers. A request with a tag fails, since its name is the tag of its buffers.
 */
class partition : public detail::pool_functions {
private:
    friend class pool;
    partition(pp_pool *pool, const std::string &name, std::uint64_t max_bytes)
    {
        detail::check(pp_partition_open(pool, detail::checked_c_str(name), max_bytes, &pool_->handle));
    }
};

/**
 * A pool, shared by its copies. Destroying the last copy or pinned_resource destroys it, but not its buffers, and may wait: see
 * pp_pool_destroy. Do not make a pool static: its destructor would run while the CUDA driver shuts down. Allocate such a pool with new,
 * and never delete it. A move of a pool or a partition copies it.
 */
class pool : public detail::pool_functions {
public:
    /** Opens a pool with the settings of the environment. */
    explicit pool() : pool(std::string()) {}

    /** Opens a pool with these settings and those of the environment; see pp_pool_open. */
    explicit pool(const std::string &config) { detail::check(pp_pool_open(detail::checked_c_str(config), &pool_->handle)); }

    /**
     * Makes memory of the program, pinned or not (`is_pinned`), a buffer of the pool. Once the buffer is returned and the work on `after` has
     * completed, `on_release(data)` is called on an arbitrary thread: cudaFreeHost or a lambda, which must not throw; see pp_release_fn and
     * pp_adopt. If adopt throws, `on_release` is destroyed without a call. A lambda must not own a pool, a partition or a buffer:
     * its destruction in the callback could wait, which pp_release_fn forbids.
     */
    template <typename Release>
    buffer adopt(void *data, std::size_t bytes, stream_or_host after, bool is_pinned, Release on_release) const
    {
        auto kept = std::make_unique<Release>(std::move(on_release));
        const auto release = [](void *released, void *user_data) noexcept {
            const std::unique_ptr<Release> owned(static_cast<Release *>(user_data));
            (void)(*owned)(released);
        };
        detail::check(pp_adopt(native_handle(), data, bytes, is_pinned, release, kept.get()));
        (void)kept.release(); // `release` deletes it.
        return buffer(native_handle(), data, bytes, after);
    }

    /** Opens a part of the pool with its own limit and wait queue; see pp_partition_open. */
    [[nodiscard]] partition open_partition(const std::string &name, std::uint64_t max_bytes) const
    {
        return partition(native_handle(), name, max_bytes);
    }

    /** Pins `bytes` more, in addition to earlier reserves; see pp_reserve. */
    void reserve(std::uint64_t bytes) const { detail::check(pp_reserve(native_handle(), bytes)); }
    /** Releases idle memory until at most to_bytes are pinned; see pp_trim. */
    void trim(std::uint64_t to_bytes) const { detail::check(pp_trim(native_handle(), to_bytes)); }
    /** Does the work of the maintenance thread; see pp_maintain. */
    void maintain() const { detail::check(pp_maintain(native_handle())); }
};

/**
 * Memory of a pool or a partition for std::pmr containers, pinned unless the pool has fallen back to pageable memory (see
 * pp_is_pinned). Throws pinpool::bad_alloc, which is a std::bad_alloc, on failure. Deallocated memory is reused once the work
 * enqueued on the stream `after` has completed, and never if the driver refuses the stream. With host_only it is reused
 * immediately: before a container frees memory, grows or is destroyed, synchronize every copy that uses its memory. The stream
 * must not be destroyed before the last memory of the resource is deallocated. With a default stream, deallocate on the thread
 * that enqueued the work, with the same device current.
 *
 * Each allocation is a separate buffer of at least 4 KiB: suitable for vectors and arenas, not for lists of small nodes (put a
 * std::pmr::unsynchronized_pool_resource in between). The options apply to each allocation: a timeout bounds its wait. Two
 * resources are equal if they use the same pool and stream. The constructor throws pinpool::error for a partition and a tag.
 * It is not a cuda::mr resource: RMM and CCCL cannot use it.
 */
class pinned_resource : public std::pmr::memory_resource {
public:
    pinned_resource(const pool &pool, stream_or_host after, request_options options = {})
        : pinned_resource(pool.pool_, after, std::move(options))
    {
    }
    pinned_resource(const partition &partition, stream_or_host after, request_options options = {})
        : pinned_resource(partition.pool_, after, std::move(options))
    {
        if (!options_.tag.empty())
            throw error(PP_INVALID_ARGUMENT, "the name of a partition is its tag: pass options without a tag");
    }
    pinned_resource(const pinned_resource &) = default; // No move, so that every object has a pool.
    /** Memory in use must return to its own pool, after the work of its own stream. */
    pinned_resource &operator=(const pinned_resource &) = delete;

private:
    pinned_resource(std::shared_ptr<detail::owned_pool> pool, stream_or_host after, request_options options)
        : pool_(std::move(pool)), after_(after), options_(std::move(options))
    {
        (void)detail::to_c_options(options_); // Throws now, not in an allocation.
    }

    void *do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        pp_request_options options = detail::to_c_options(options_);
        options.alignment = std::max(options.alignment, alignment);
        const std::size_t size = bytes == 0 ? 1 : bytes; // An allocation of no bytes has an address too.
        void *data = nullptr;
        // Every address of pp_get, which is faster, is a multiple of 4096.
        const bool is_plain = options.alignment <= 4096 && options.timeout_ms == PP_WAIT_DEFAULT && options.tag == nullptr;
        const pp_status status = is_plain ? pp_get(pool_->handle, size, &data)
                                          : pp_get_with(pool_->handle, size, &options, &data);
        if (status != PP_OK)
            throw bad_alloc();
        return data;
    }

    void do_deallocate(void *data, std::size_t, std::size_t) override
    {
        detail::put(pool_->handle, data, after_.get());
    }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
    {
        const auto *resource = dynamic_cast<const pinned_resource *>(&other);
        return resource != nullptr && resource->pool_ == pool_ && resource->after_.get() == after_.get();
    }

    std::shared_ptr<detail::owned_pool> pool_;
    stream_or_host after_;
    request_options options_;
};

} // namespace PINPOOL_DEFAULT_STREAM
} // namespace pinpool

#undef PINPOOL_DEFAULT_STREAM

#endif // PINPOOL_HPP
