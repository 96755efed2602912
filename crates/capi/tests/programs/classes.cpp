// The classes of pinpool.hpp without a GPU.
#include <pinpool.hpp>

#include <cstring>
#include <iostream>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
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
template <typename From> constexpr bool is_stream = std::is_convertible_v<From, pinpool::stream_or_host>;
static_assert(!std::is_default_constructible_v<pinpool::stream_or_host>);
static_assert(is_stream<stream_of_a_library> && is_stream<CUstream_st *> && is_stream<pinpool::host_only_t>);
static_assert(!is_stream<std::nullptr_t> && !is_stream<int> && !is_stream<long>);
static_assert(!std::is_constructible_v<pinpool::memory_resource, pinpool::pool>);
template <typename From, typename = void> struct is_recorded : std::false_type {};
template <typename From>
struct is_recorded<From, std::void_t<decltype(std::declval<pinpool::buffer &>().record_stream(std::declval<From>()))>>
    : std::true_type {};
template <typename From, typename = void> struct is_put_after : std::false_type {};
template <typename From>
struct is_put_after<From, std::void_t<decltype(std::declval<pinpool::buffer &>().put_after_stream(std::declval<From>()))>>
    : std::true_type {};
static_assert(is_recorded<CUstream_st *>::value && is_recorded<stream_of_a_library>::value);
static_assert(is_put_after<CUstream_st *>::value && is_put_after<stream_of_a_library>::value);
static_assert(!is_recorded<std::nullptr_t>::value && !is_recorded<int>::value);
static_assert(!is_put_after<std::nullptr_t>::value && !is_put_after<int>::value);
template <typename From, typename = void> struct is_put_after_event : std::false_type {};
template <typename From>
struct is_put_after_event<From, std::void_t<decltype(std::declval<pinpool::buffer &>().put_after_event(std::declval<From>()))>>
    : std::true_type {};
static_assert(is_put_after_event<CUevent_st *>::value && !is_put_after_event<std::nullptr_t>::value);

// A partition has no calls that only a pool can make.
template <typename Pool, typename = void> struct trims : std::false_type {};
template <typename Pool> struct trims<Pool, std::void_t<decltype(std::declval<Pool>().trim(0))>> : std::true_type {};
static_assert(trims<pinpool::pool>::value && !trims<pinpool::partition>::value);
static_assert(!std::is_convertible_v<pinpool::partition, pinpool::pool>);

static void check(bool is_right, const std::string &what)
{
    if (!is_right)
        throw std::runtime_error(what);
}

// Whether the call fails with this status and a text that contains `words`.
template <typename Call> static bool fails_with(pp_status status, const char *words, Call call)
{
    try {
        call();
        return false;
    } catch (const pinpool::error &error) {
        std::cout << error.what() << '\n';
        return error.status() == status && std::strstr(error.what(), words) != nullptr;
    }
}

static void count(void *, void *counter) { ++*static_cast<int *>(counter); }

// A reserve is kept, and a trim releases the rest.
static void check_reserve()
{
    pinpool::pool pool("backend=heap; max_bytes=64MiB");
    const auto holds_8_mib = [&] { return pool.stats_json().find("\"held_bytes\":8388608,") != std::string::npos; };
    pool.reserve(8 << 20);
    check(holds_8_mib(), "the reserve");
    pool.get(16 << 20, pinpool::host_only).put();
    check(!holds_8_mib(), "a buffer next to the reserve");
    pool.trim(0);
    check(holds_8_mib(), "trim keeps the reserve");
    pool.clear();
    pool.maintain();
    check(fails_with(PP_OVER_LIMIT, "", [&] { pool.reserve(std::uint64_t{1} << 40); }), "a reserve above the limit");
}

int main()
{
    check_reserve();
    pinpool::buffer outlives;
    {
        pinpool::pool pool("max_bytes=64MiB; on_full=error; wait=0s; name=containers");

        pinpool::buffer batch = pool.get(1 << 20, pinpool::host_only);
        std::memset(batch.data(), 7, batch.size());
        void *address = batch.data();
        batch.put();
        batch.put(); // empty: nothing to put
        std::optional<pinpool::buffer> again = pool.try_get(1 << 20, pinpool::host_only);
        check(again && again->data() == address, "reuse");
        pinpool::buffer moved = std::move(*again);
        check(!*again && moved, "empty after a move");

        pinpool::memory_resource memory(pool, pinpool::host_only);
        std::pmr::vector<long> values(&memory);
        for (long i = 0; i < 1000; i++)
            values.push_back(i);
        std::cout << "sum " << std::accumulate(values.begin(), values.end(), 0L) << '\n';
        std::pmr::vector<long> copy(values, &memory);
        check(copy == values && memory.is_equal(pinpool::memory_resource(pool, pinpool::host_only)), "a container");
        void *const aligned = memory.allocate(1, std::size_t{1} << 21);
        check(reinterpret_cast<std::uintptr_t>(aligned) % (1 << 21) == 0, "an allocation with a large alignment");
        memory.deallocate(aligned, 1, std::size_t{1} << 21);
        // Without a driver, the stream is refused and the memory is returned immediately.
        pinpool::memory_resource on_stream(pool, stream_of_a_library{});
        check(std::pmr::vector<long>(values, &on_stream) == values && !memory.is_equal(on_stream), "a container on a stream");

        const auto too_large = [&] { (void)pool.get(std::size_t{1} << 30, pinpool::legacy_stream); };
        check(fails_with(PP_OVER_LIMIT, "", too_large), "a request above the limit");
        try {
            std::pmr::vector<char> large(std::size_t{1} << 30, &memory);
            check(false, "a container above the limit");
        } catch (const std::bad_alloc &error) {
            const auto *failure = dynamic_cast<const pinpool::bad_alloc *>(&error);
            check(failure != nullptr && failure->status() == PP_OVER_LIMIT, "the status of a failed allocation");
            check(std::strstr(failure->what(), "PINPOOL_MAX_BYTES") != nullptr, "the text of a failed allocation");
        }
        check(fails_with(PP_INVALID_SETTING, "", [] { pinpool::pool bad("max_bytes=lots"); }), "an invalid setting");
        // A function of pinpool.h is the last failed call, too.
        check(pp_trim(nullptr, 0) == PP_INVALID_ARGUMENT, "a NULL pool");
        check(fails_with(PP_INVALID_ARGUMENT, "`pool` is NULL", [] { throw pinpool::error::last(); }), "the last failed call");
        pinpool::get_options options;
        options.alignment = 1 << 16;
        options.timeout = std::chrono::milliseconds(-1);
        options.tag = "decode";
        pool.get(32 << 20, pinpool::host_only, options).put();
        std::optional<pinpool::buffer> tagged = pool.try_get(32 << 20, pinpool::host_only, options);
        check(tagged && reinterpret_cast<std::uintptr_t>(tagged->data()) % options.alignment == 0, "an alignment");
        const auto too_many = [&] { (void)pool.get(48 << 20, pinpool::host_only, options); };
        check(fails_with(PP_OVER_LIMIT, "decode", too_many), "the tag in an error");
        // Without a driver or a context there is no such stream, and the object keeps its buffer.
        pinpool::buffer kept = pool.get(4096, pinpool::host_only);
        address = kept.data();
        try {
            kept.put_after_stream(pinpool::legacy_stream);
        } catch (const pinpool::error &error) {
            check(kept.data() == address && kept.size() == 4096, "the buffer after a refused return");
            kept.put();
            std::cout << error.what() << '\n';
        }

        char own[100] = {};
        int released = 0;
        {
            // Put by the destructors, also if there is no such stream.
            pinpool::buffer on_default = pool.get(8 << 20, pinpool::host_only);
            check(!on_default.stream().handle(), "host_only has no stream");
            on_default.set_stream(static_cast<CUstream_st *>(nullptr));
            check(on_default.stream().handle() == pinpool::default_stream, "null is the default stream");
            pinpool::buffer adopted = pool.adopt(own, sizeof own, true, count, &released, pinpool::host_only);
            check(adopted.is_pinned() && adopted.data() == reinterpret_cast<std::byte *>(own), "adopted memory");
        }
        check(released == 1, "adopted memory is released once");

        std::cout << pool.stats_json() << '\n';
        pinpool::partition eval = pool.open_partition("eval", 1 << 20);
        outlives = eval.get(4096, pinpool::host_only);
        pinpool::memory_resource of_eval(eval, pinpool::host_only);
        check(std::pmr::vector<char>(4096, &of_eval).size() == 4096 && !of_eval.is_equal(memory), "a container of a partition");
        try {
            std::pmr::vector<char> large(2 << 20, &of_eval);
            check(false, "a container above the limit of its partition");
        } catch (const pinpool::bad_alloc &) {
        }
        pool.shutdown();
        check(fails_with(PP_SHUT_DOWN, "", [&] { (void)eval.get(4096, pinpool::host_only); }), "a request after shutdown");
    }
    std::memset(outlives.data(), 1, outlives.size()); // the pool ends after its last buffer
    return 0;
}
