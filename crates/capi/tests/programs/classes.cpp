// The classes of pinpool.hpp without a GPU: each failure has an exit status.
#include <pinpool.hpp>

#include <cstring>
#include <iostream>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

// A buffer without a stream must be requested explicitly.
template <typename Pool, typename = void> struct gets_without_stream : std::false_type {};
template <typename Pool>
struct gets_without_stream<Pool, std::void_t<decltype(std::declval<Pool>().get(4096))>> : std::true_type {};
static_assert(!gets_without_stream<pinpool::pool>::value);
template <typename Pool, typename = void> struct gets_with_braces : std::false_type {};
template <typename Pool>
struct gets_with_braces<Pool, std::void_t<decltype(std::declval<Pool>().get(4096, {}))>> : std::true_type {};
static_assert(!gets_with_braces<pinpool::pool>::value);
struct stream_of_a_library {
    operator CUstream_st *() const { return nullptr; }
};
static_assert(!std::is_default_constructible_v<pinpool::release_stream>);
static_assert(std::is_convertible_v<stream_of_a_library, pinpool::release_stream>);
static_assert(!std::is_constructible_v<pinpool::pinned_memory_resource, pinpool::pool>);

static void count(void *, void *counter) { ++*static_cast<int *>(counter); }

int main()
{
    pinpool::buffer outlives;
    {
        pinpool::pool pool("max_bytes=64MiB; on_full=error; wait=0s; name=containers");

        pinpool::buffer batch = pool.get(1 << 20, pinpool::host_only);
        std::memset(batch.data(), 7, batch.size());
        void *address = batch.data();
        batch.put();
        batch.put(); // empty: nothing to put
        std::optional<pinpool::buffer> again = pool.try_get(1 << 20, pinpool::host_only);
        if (!again || again->data() != address)
            return 1;
        pinpool::buffer moved = std::move(*again);
        if (*again || !moved)
            return 2;

        pinpool::pinned_memory_resource pinned(pool, pinpool::host_only);
        std::pmr::vector<long> values(&pinned);
        for (long i = 0; i < 1000; i++)
            values.push_back(i);
        std::cout << "sum " << std::accumulate(values.begin(), values.end(), 0L) << '\n';
        std::pmr::vector<long> copy(values, &pinned);
        if (copy != values || !pinned.is_equal(pinpool::pinned_memory_resource(pool, pinpool::host_only)))
            return 3;
        // Without a driver, the stream is refused and the memory is returned at once.
        pinpool::pinned_memory_resource on_stream(pool, nullptr);
        if (std::pmr::vector<long>(values, &on_stream) != values || pinned.is_equal(on_stream))
            return 10;

        try {
            (void)pool.get(std::size_t{1} << 30, 0); // the legacy stream, as in CUDA
            return 4;
        } catch (const pinpool::error &error) {
            if (error.status() != PP_LIMIT)
                return 5;
            std::cout << error.what() << '\n';
        }
        try {
            std::pmr::vector<char> large(std::size_t{1} << 30, &pinned);
            return 6;
        } catch (const std::bad_alloc &) {
        }
        try {
            pinpool::pool bad("max_bytes=lots");
            return 7;
        } catch (const pinpool::error &error) {
            if (error.status() != PP_INVALID_SETTING)
                return 8;
        }
        pinpool::get_options options;
        options.alignment = 1 << 16;
        options.timeout = std::chrono::milliseconds(-1);
        options.tag = "decode";
        pinpool::buffer tagged = pool.get(32 << 20, pinpool::host_only, options);
        if (reinterpret_cast<std::uintptr_t>(tagged.data()) % options.alignment != 0)
            return 11;
        try {
            (void)pool.get(48 << 20, pinpool::host_only, options);
            return 12;
        } catch (const pinpool::error &error) {
            if (error.status() != PP_LIMIT || !std::strstr(error.what(), "decode"))
                return 13;
        }
        // Without a driver or a context there is no such stream, and the object keeps its buffer.
        pinpool::buffer kept = pool.get(4096, pinpool::host_only);
        address = kept.data();
        try {
            kept.put_after_stream(nullptr);
        } catch (const pinpool::error &error) {
            if (kept.data() != address || kept.size() != 4096)
                return 9;
            kept.put();
            std::cout << error.what() << '\n';
        }

        char own[100] = {};
        int released = 0;
        {
            // Put by the destructors, also if there is no such stream.
            pinpool::buffer on_default = pool.get(8 << 20, nullptr);
            pinpool::buffer adopted = pool.adopt(own, sizeof own, true, count, &released, pinpool::host_only);
            if (!adopted.is_pinned() || adopted.data() != reinterpret_cast<std::byte *>(own))
                return 14;
        }
        if (released != 1)
            return 15;

        std::cout << pool.stats_json() << '\n';
        outlives = pool.partition("eval", 1 << 20).get(4096, pinpool::host_only);
    }
    std::memset(outlives.data(), 1, outlives.size()); // the pool ends after its last buffer
    return 0;
}
