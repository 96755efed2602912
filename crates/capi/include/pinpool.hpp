/*
 * pinpool for C++17: classes around pinpool.h.
 *
 *     pinpool::pool pool("max_bytes=4GiB; name=loader");
 *     {
 *         pinpool::buffer batch = pool.get(1 << 20);
 *         batch.set_stream(stream);
 *         file.read(reinterpret_cast<char *>(batch.data()), batch.size());
 *         cudaMemcpyAsync(device, batch.data(), batch.size(), cudaMemcpyHostToDevice, stream);
 *     }   // its destructor returns the buffer, which is reused once the copy has completed
 *
 *     pinpool::pinned_memory_resource pinned(pool);
 *     std::pmr::vector<float> values(1024, &pinned);
 *
 * Functions that fail throw pinpool::error, but pinned_memory_resource throws std::bad_alloc, and put() and destructors throw
 * nothing. A pool may be used by several threads concurrently; a buffer by one thread at a time.
 */
#ifndef PINPOOL_HPP
#define PINPOOL_HPP

#include "pinpool.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace pinpool {

/** A call that failed. */
class error : public std::runtime_error {
public:
    explicit error(pp_status status) : std::runtime_error(pp_last_error(nullptr)), status_(status) {}

    pp_status status() const noexcept { return status_; }

private:
    pp_status status_;
};

namespace detail {

inline void check(pp_status status)
{
    if (status != PP_OK)
        throw error(status);
}

/** A handle, closed when its last user is destroyed. */
struct handle {
    pp_pool *pool = nullptr;

    explicit handle(const char *config) { check(pp_pool_open(config, &pool)); }
    explicit handle(pp_pool *open) noexcept : pool(open) {}
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;
    ~handle()
    {
        if (pool != nullptr)
            pp_pool_close(pool);
    }
};

} // namespace detail

/**
 * A buffer of a pool, which its destructor returns. Call set_stream before the first copy: the memory is then reused once the
 * work on that stream has completed; without it immediately, even while a copy uses it. If the driver refuses the stream in the
 * destructor, the memory is never reused: put_after_stream reports this, and can be repeated. Empty after a move or a successful put.
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
        if (data_ == nullptr)
            return;
        if (stream_) {
            if (pp_put_after_stream(pool_->pool, data_, *stream_) == PP_OK)
                return;
        }
        put(); // Never reused if the end of the work is unknown; see pp_put_after_stream.
    }

    std::byte *data() const noexcept { return static_cast<std::byte *>(data_); }
    std::size_t size() const noexcept { return size_; }
    explicit operator bool() const noexcept { return data_ != nullptr; }

    /** Whether the driver pinned the memory; see pp_is_pinned. */
    bool is_pinned() const
    {
        int is_pinned = 0;
        if (data_ != nullptr)
            detail::check(pp_is_pinned(pool_->pool, data_, &is_pinned));
        return is_pinned != 0;
    }

    /**
     * Sets the stream (CUstream or cudaStream_t) on which the destructor returns the buffer, also during stack unwinding; replaces
     * an earlier one. First record work that is enqueued on the earlier stream (record_stream). The stream must not be destroyed
     * before the destructor has run. For a default stream, destroy the buffer on the thread that enqueued the work, with the same
     * device current.
     */
    void set_stream(CUstream_st *stream) noexcept { stream_ = stream; }

    /** Records that the work enqueued so far on `stream` uses the buffer, which is kept; see pp_record_stream. */
    void record_stream(CUstream_st *stream)
    {
        if (data_ != nullptr)
            detail::check(pp_record_stream(pool_->pool, data_, stream));
    }

    /** Returns the buffer to its pool immediately, and ignores the stream of set_stream. Only recorded device work may still use it. */
    void put() noexcept
    {
        if (data_ != nullptr)
            pp_put(pool_->pool, data_);
        forget();
    }

    /**
     * Returns the buffer to its pool, which reuses it once all work enqueued on `stream` (CUstream or cudaStream_t) so far has
     * completed. If this throws, the object keeps the buffer, which may be gone after PP_INTERNAL: pp_put_after_stream says when
     * to call it again, and that the memory is not reused otherwise.
     */
    void put_after_stream(CUstream_st *stream)
    {
        put_with([&](pp_pool *pool, void *data) { return pp_put_after_stream(pool, data, stream); });
    }

    /** As put_after_stream, for the work before the last record of `event` (CUevent or cudaEvent_t). */
    void put_after_event(CUevent_st *event)
    {
        put_with([&](pp_pool *pool, void *data) { return pp_put_after_event(pool, data, event); });
    }

    void swap(buffer &other) noexcept
    {
        std::swap(pool_, other.pool_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(stream_, other.stream_);
    }

private:
    friend class pool;
    buffer(std::shared_ptr<detail::handle> pool, void *data, std::size_t size) noexcept
        : pool_(std::move(pool)), data_(data), size_(size)
    {
    }

    template <typename Put> void put_with(Put put)
    {
        if (data_ == nullptr)
            return;
        detail::check(put(pool_->pool, data_));
        forget();
    }

    void forget() noexcept
    {
        pool_.reset();
        data_ = nullptr;
        size_ = 0;
        stream_.reset();
    }

    std::shared_ptr<detail::handle> pool_;
    void *data_ = nullptr;
    std::size_t size_ = 0;
    std::optional<CUstream_st *> stream_;
};

/**
 * A pool, shared by its copies. Destroying the last copy, buffer or pinned_memory_resource closes it and may wait: pp_pool_close. A
 * moved-from pool or pinned_memory_resource may only be destroyed or assigned to.
 */
class pool {
public:
    /** Opens a pool with the settings of the environment. */
    pool() : handle_(std::make_shared<detail::handle>(static_cast<const char *>(nullptr))) {}

    /** Opens a pool with these settings; see pp_pool_open. */
    explicit pool(const std::string &config) : handle_(std::make_shared<detail::handle>(config.c_str())) {}

    /** Returns a buffer without a stream, for host code: set_stream before a copy. */
    buffer get(std::size_t bytes) const
    {
        return make(bytes, [&](void **data) { return pp_get(handle(), bytes, data); });
    }

    /** Returns a buffer for copies on `stream`, as if set_stream were called. */
    buffer get(std::size_t bytes, CUstream_st *stream) const
    {
        buffer result = get(bytes);
        result.set_stream(stream);
        return result;
    }

    buffer get_aligned(std::size_t bytes, std::size_t alignment) const
    {
        return make(bytes, [&](void **data) { return pp_get_aligned(handle(), bytes, alignment, data); });
    }

    /** Waits up to `timeout` for memory under the limit. */
    buffer get_within(std::size_t bytes, std::chrono::milliseconds timeout) const
    {
        const auto wait = static_cast<std::uint64_t>(timeout.count() < 0 ? 0 : timeout.count());
        return make(bytes, [&](void **data) { return pp_get_within(handle(), bytes, wait, data); });
    }

    /** An idle buffer, if there is one. */
    std::optional<buffer> try_get(std::size_t bytes) const
    {
        void *data = nullptr;
        const pp_status status = pp_try_get(handle(), bytes, &data);
        if (status == PP_NONE_IDLE)
            return std::nullopt;
        detail::check(status);
        return buffer(handle_, data, bytes);
    }

    /** Allocates a buffer counted under `tag`; see pp_get_tagged. */
    buffer get_tagged(std::size_t bytes, const std::string &tag) const
    {
        return make(bytes, [&](void **data) { return pp_get_tagged(handle(), bytes, tag.c_str(), data); });
    }

    /** Makes memory that is already pinned a buffer; `on_release` releases it. See pp_adopt. */
    buffer adopt(void *data, std::size_t bytes, bool is_pinned, pp_release_fn on_release, void *user_data) const
    {
        detail::check(pp_adopt(handle(), data, bytes, is_pinned, on_release, user_data));
        return buffer(handle_, data, bytes);
    }

    /** Opens a part of the pool with its own limit and wait queue; see pp_partition_open. */
    pool partition(const std::string &name, std::uint64_t max_bytes) const
    {
        auto partition = std::make_shared<detail::handle>(static_cast<pp_pool *>(nullptr));
        detail::check(pp_partition_open(handle(), name.c_str(), max_bytes, &partition->pool));
        return pool(std::move(partition));
    }

    void set_max_bytes(std::uint64_t max_bytes) const { detail::check(pp_set_max_bytes(handle(), max_bytes)); }
    void reserve(std::uint64_t bytes) const { detail::check(pp_reserve(handle(), bytes)); }
    void trim(std::uint64_t to_bytes) const { detail::check(pp_trim(handle(), to_bytes)); }
    void clear() const { detail::check(pp_clear(handle())); }
    void maintain() const { detail::check(pp_maintain(handle())); }

    /** The statistics as a JSON object. */
    std::string stats_json() const
    {
        char *json = nullptr;
        detail::check(pp_stats_json(handle(), &json));
        const std::unique_ptr<char, void (*)(char *)> owner(json, pp_string_free);
        return std::string(json);
    }

    /** The handle, for the functions of pinpool.h. Valid for the lifetime of this object; do not close it. */
    pp_pool *handle() const noexcept { return handle_->pool; }

private:
    explicit pool(std::shared_ptr<detail::handle> handle) : handle_(std::move(handle)) {}

    template <typename Get> buffer make(std::size_t bytes, Get get) const
    {
        void *data = nullptr;
        detail::check(get(&data));
        return buffer(handle_, data, bytes);
    }

    std::shared_ptr<detail::handle> handle_;
};

/**
 * Pinned memory for std::pmr containers. Throws std::bad_alloc on failure (see pp_last_error). With a
 * stream, a deallocation is pp_put_after_stream, and if the driver refuses the stream, the memory is never reused. Without one it
 * is pp_put: synchronize every copy from or to the memory before its container frees it, grows or is destroyed.
 *
 * Each allocation is a separate buffer of at least 4 KiB: suitable for vectors and arenas, not for lists of small nodes (put a
 * std::pmr::unsynchronized_pool_resource in between). Two resources are equal if they use the same pool and stream.
 */
class pinned_memory_resource : public std::pmr::memory_resource {
public:
    explicit pinned_memory_resource(const pool &pool) : pool_(pool) {}
    pinned_memory_resource(const pool &pool, CUstream_st *stream) : pool_(pool), stream_(stream) {}

private:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        void *data = nullptr;
        // An allocation of no bytes has an address too.
        if (pp_get_aligned(pool_.handle(), bytes == 0 ? 1 : bytes, alignment, &data) != PP_OK)
            throw std::bad_alloc();
        return data;
    }

    void do_deallocate(void *data, std::size_t, std::size_t) override
    {
        if (!stream_ || pp_put_after_stream(pool_.handle(), data, *stream_) != PP_OK)
            pp_put(pool_.handle(), data);
    }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
    {
        const auto *same = dynamic_cast<const pinned_memory_resource *>(&other);
        return same != nullptr && same->pool_.handle() == pool_.handle() && same->stream_ == stream_;
    }

    pool pool_;
    std::optional<CUstream_st *> stream_;
};

} // namespace pinpool

#endif // PINPOOL_HPP
