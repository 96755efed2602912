// The classes of pinpool.hpp without a GPU.
#include <pinpool.h>

// While this has a place for an address, a return fails with this code after the return, and another thread gets the memory.
static void **gets_memory = nullptr;
static pp_status after_return = PP_OK;
static pp_status before_return = PP_OK; // Unless it is PP_OK, a return does nothing and fails with this code.
static pp_status fake_put_after_stream(pp_pool *pool, void *data, CUstream_st *stream)
{
    if (before_return != PP_OK)
        return before_return;
    if (gets_memory == nullptr)
        return pp_put_after_stream(pool, data, stream);
    const bool is_other = pp_put(pool, data) == PP_OK && pp_get(pool, 4096, gets_memory) == PP_OK;
    return is_other && *gets_memory == data ? after_return : PP_OK;
}
#define pp_put_after_stream fake_put_after_stream
#include <pinpool.hpp>
#undef pp_put_after_stream

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// Whether the expression compiles for a type T.
#define ACCEPTS(name, expression)                                                                                           \
    template <typename T, typename = void> struct name##_t : std::false_type {};                                            \
    template <typename T> struct name##_t<T, std::void_t<decltype(expression)>> : std::true_type {};                        \
    template <typename T> constexpr bool name = name##_t<T>::value
ACCEPTS(gets_without_stream, std::declval<T>().get(4096));
ACCEPTS(gets_with_braces, std::declval<T>().get(4096, {}));
ACCEPTS(gets_on_stream, std::declval<T>().get(4096, pinpool::legacy_stream));
ACCEPTS(trims, std::declval<T>().trim(0));
ACCEPTS(is_recorded, std::declval<pinpool::buffer &>().record_stream(std::declval<T>()));
ACCEPTS(is_put_after, std::declval<pinpool::buffer &>().put_after_stream(std::declval<T>()));
ACCEPTS(is_put_after_event, std::declval<pinpool::buffer &>().put_after_event(std::declval<T>()));

struct stream_of_a_library {
    operator CUstream_st *() const { return nullptr; }
};
struct stream_with_get { // as cuda::stream_ref
    CUstream_st *get() const { return pinpool::per_thread_stream; }
};
struct get_of_another {
    int *get() const { return nullptr; }
};
struct destroys_stream {
    void operator()(CUstream_st *) const {}
};
template <typename From> constexpr bool is_stream = std::is_convertible_v<From, pinpool::stream_or_host>;

// A buffer without a stream must be requested explicitly.
static_assert(gets_on_stream<pinpool::pool> && !gets_without_stream<pinpool::pool> && !gets_with_braces<pinpool::pool>);
static_assert(!std::is_default_constructible_v<pinpool::stream_or_host>);
static_assert(is_stream<stream_of_a_library> && is_stream<CUstream_st *> && is_stream<pinpool::host_only_t>);
static_assert(is_stream<stream_with_get> && is_stream<pinpool::stream_handle> && !is_stream<get_of_another>);
static_assert(!is_stream<std::nullptr_t> && !is_stream<int> && !is_stream<long>);
// An empty smart pointer would be the default stream.
static_assert(!is_stream<std::unique_ptr<CUstream_st, destroys_stream>> && !is_stream<std::shared_ptr<CUstream_st>>);
static_assert(!std::is_constructible_v<pinpool::pinned_resource, pinpool::pool>);
// Assigning another pool or stream while containers use memory could let a copy's memory be reused early.
static_assert(!std::is_copy_assignable_v<pinpool::pinned_resource> && !std::is_move_assignable_v<pinpool::pinned_resource>);
static_assert(is_recorded<CUstream_st *> && is_recorded<stream_of_a_library> && is_recorded<stream_with_get>);
static_assert(is_put_after<CUstream_st *> && is_put_after<stream_of_a_library> && is_put_after<stream_with_get>);
static_assert(!is_recorded<std::nullptr_t> && !is_recorded<int> && !is_recorded<std::shared_ptr<CUstream_st>>);
static_assert(!is_put_after<std::nullptr_t> && !is_put_after<int> && !is_put_after<std::shared_ptr<CUstream_st>>);
static_assert(is_put_after_event<CUevent_st *> && !is_put_after_event<std::nullptr_t>);
static_assert(std::is_same_v<decltype(std::declval<pinpool::buffer &>().data()), std::byte *>);
static_assert(std::is_same_v<decltype(std::declval<const pinpool::buffer &>().data()), const std::byte *>);
static_assert(std::is_same_v<decltype(std::declval<pinpool::buffer &>().data_as<float>()), float *>);
static_assert(std::is_same_v<decltype(std::declval<const pinpool::buffer &>().data_as<float>()), const float *>);
// A partition has no calls that only a pool can make.
static_assert(trims<pinpool::pool> && !trims<pinpool::partition>);
static_assert(!std::is_convertible_v<pinpool::partition, pinpool::pool>);
// Their common class is no third kind of handle.
static_assert(std::is_copy_constructible_v<pinpool::pool> && std::is_copy_assignable_v<pinpool::partition>);
static_assert(!std::is_constructible_v<pinpool::detail::pool_functions, const pinpool::pool &>);
static_assert(!std::is_assignable_v<pinpool::detail::pool_functions &, const pinpool::pool &>);

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

// A reserve is kept, and a trim releases the rest.
static void check_reserve()
{
    pinpool::pool pool("backend=heap; max_bytes=64MiB");
    const auto holds_8_mib = [&] { return pool.stats_json().find("\"held_bytes\":8388608,") != std::string::npos; };
    pool.reserve(8 << 20);
    check(holds_8_mib(), "the reserve");
    pool.get(16 << 20, pinpool::host_only).reset();
    check(!holds_8_mib(), "a buffer next to the reserve");
    pool.trim(0);
    check(holds_8_mib(), "trim keeps the reserve");
    pool.maintain();
    check(fails_with(PP_OVER_LIMIT, "", [&] { pool.reserve(std::uint64_t{1} << 40); }), "a reserve above the limit");
}

// The options of a resource apply to each of its allocations.
static void check_resource_options()
{
    pinpool::pool pool("backend=heap; max_bytes=8MiB; on_full=error; wait=none");
    pinpool::request_options options;
    options.alignment = 1 << 16;
    options.timeout = std::chrono::milliseconds(0);
    options.tag = "vectors";
    pinpool::pinned_resource memory(pool, pinpool::host_only, options);
    check(memory.is_equal(pinpool::pinned_resource(pool, pinpool::host_only)), "options do not matter when memory is freed");
    void *const held = memory.allocate(6 << 20, 8);
    check(reinterpret_cast<std::uintptr_t>(held) % options.alignment == 0, "the alignment");
    try {
        (void)memory.allocate(6 << 20, 8);
        check(false, "an allocation in a full pool");
    } catch (const pinpool::bad_alloc &error) {
        check(std::strstr(error.what(), "vectors") != nullptr, "the tag in the error");
    }
    const pinpool::pinned_resource moved(std::move(memory));
    check(moved.is_equal(memory), "a moved-from resource still has its pool");
    memory.deallocate(held, 6 << 20, 8);
    const pinpool::partition part = pool.open_partition("part", 1 << 20);
    const auto with_tag = [&] { pinpool::pinned_resource(part, pinpool::host_only, options); };
    check(fails_with(PP_INVALID_ARGUMENT, "without a tag", with_tag), "a tag for a partition");
}

// A text is not cut at a NUL.
static void check_nul()
{
    using namespace std::string_literals;
    const auto opens = [] { pinpool::pool("backend=heap\0; max_bytes=1MiB"s); };
    pinpool::pool pool("backend=heap");
    pinpool::request_options options;
    options.tag = "a\0b"s;
    const auto names = [&] { (void)pool.open_partition("a\0b"s, 1 << 20); };
    const auto gets = [&] { (void)pool.get(4096, pinpool::host_only, options); };
    const auto makes = [&] { pinpool::pinned_resource(pool, pinpool::host_only, options); };
    check(fails_with(PP_INVALID_ARGUMENT, "NUL", opens) && fails_with(PP_INVALID_ARGUMENT, "NUL", names), "a setting or name");
    check(fails_with(PP_INVALID_ARGUMENT, "NUL", gets) && fails_with(PP_INVALID_ARGUMENT, "NUL", makes), "a tag");
}

// A release function is called once, with the memory, and may make calls that do not wait for the pool.
static void check_release()
{
    pinpool::pool pool("backend=heap; max_bytes=64MiB");
    char own[100] = {};
    const auto released = std::make_shared<int>(0); // The release functions share it.
    const auto use_pool = [&, released](void *data) {
        const std::optional<pinpool::buffer> idle = pool.try_get(4096, pinpool::host_only);
        *released += idle.has_value() && data == own;
    };
    pool.get(4096, pinpool::host_only).reset();
    pool.adopt(own, sizeof own, pinpool::host_only, false, use_pool).reset();
    check(*released == 1 && released.use_count() == 2, "the release function has run, and is gone");
    const auto adopts_nothing = [&] { (void)pool.adopt(own, 0, pinpool::host_only, false, use_pool); };
    check(fails_with(PP_INVALID_ARGUMENT, "`bytes` is 0", adopts_nothing), "no bytes");
    check(*released == 1 && released.use_count() == 2, "a function that was not needed is destroyed without a call");
    auto owned = std::make_unique<std::shared_ptr<int>>(released);
    pool.adopt(own, sizeof own, pinpool::host_only, true, [owned = std::move(owned)](void *) { ++**owned; }).reset();
    check(*released == 2 && released.use_count() == 2, "a release function that can only be moved");
    void *const allocated = std::malloc(64);
    check(pool.adopt(allocated, 64, pinpool::host_only, false, std::free).data() == allocated, "a C function");
}

// A buffer that was lost or returned is not returned again: its memory may be another thread's. Nor is a buffer returned after a
// code that does not say whether the library knows the work: it would be reused during a copy. PP_INTERNAL is such a code.
static void check_lost_buffers()
{
    pinpool::pool pool("backend=heap");
    const auto is_in_use = [&](void *data) {
        int is_pinned = 1;
        return pp_is_pinned(pool.native_handle(), data, &is_pinned) == PP_OK && pp_put(pool.native_handle(), data) == PP_OK;
    };
    void *of_another = nullptr;
    pinpool::buffer batch;
    gets_memory = &of_another;
    for (pp_status status : {PP_BUFFER_LOST, PP_UNKNOWN_POINTER, PP_UNKNOWN_POOL, PP_FORKED}) {
        after_return = status;
        pool.get(4096, pinpool::legacy_stream).reset();
        check(is_in_use(of_another), "a return by the destructor");
        batch = pool.get(4096, pinpool::host_only); // The destructor would call pp_put.
        try {
            batch.put_after_stream(pinpool::legacy_stream);
            check(false, "a buffer that is not the caller's");
        } catch (const pinpool::error &error) {
            check(error.status() == status, "the status of the failed call, although it stored no last error");
            check(!batch && batch.size() == 0, "the object is empty");
        }
        batch = {};
        check(is_in_use(of_another), "a return that throws");
    }
    gets_memory = nullptr;
    for (int code = 1; code < 32; code++) { // Later versions of the library may add codes.
        const auto status = static_cast<pp_status>(code);
        const bool is_kept = status == PP_UNAVAILABLE || status == PP_STREAM_CAPTURING || status == PP_INVALID_HANDLE ||
                             status == PP_DEVICE_FAILED || status == PP_REFUSED_BY_CAPTURE;
        before_return = status;
        batch = pool.get(4096, pinpool::host_only);
        void *const data = batch.data();
        try {
            batch.put_after_stream(pinpool::legacy_stream);
            check(false, "a failed return");
        } catch (const pinpool::error &) {
            check(static_cast<bool>(batch) == is_kept, "whether the object keeps its buffer");
        }
        batch = {};
        // A copy may still use the memory, unless pp_put is documented to be safe after the code.
        check(is_in_use(data) != is_kept, "a return after a failure of code " + std::to_string(code));
        batch = pool.get(4096, pinpool::legacy_stream);
        void *const on_stream = batch.data();
        batch = {};
        check(is_in_use(on_stream) != is_kept, "a destructor after a failure of code " + std::to_string(code));
    }
    before_return = PP_OK;
    check(pool.stats_json().find("\"in_use_bytes\":0,") != std::string::npos, "no buffer is left");
}

// The buffers of a destroyed pool stay valid, and the last return releases them.
static void check_buffers_outlive_pool()
{
    char own[100] = {};
    int released = 0;
    pinpool::buffer adopted, batch;
    pp_pool *handle;
    {
        const pinpool::pool pool("backend=heap");
        handle = pool.native_handle();
        adopted = pool.adopt(own, sizeof own, pinpool::host_only, true, [&](void *) { ++released; });
        batch = pool.get(4096, pinpool::host_only);
    }
    check(pp_set_max_bytes(handle, 1 << 20) == PP_UNKNOWN_POOL, "the pool is destroyed");
    pinpool::buffer moved = std::move(adopted);
    check(moved.is_pinned() && !batch.is_pinned() && released == 0, "the buffers are in use");
    std::memset(batch.data(), 1, batch.size());
    batch.reset();
    check(moved.is_pinned(), "the other buffer is in use");
    moved = {};
    check(released == 1 && pp_put(handle, own) == PP_UNKNOWN_POOL, "the handle ends with the last return");
}

int main()
{
    check_reserve();
    check_lost_buffers();
    check_resource_options();
    check_nul();
    check_buffers_outlive_pool();
    check_release();
    pinpool::buffer outlives;
    {
        pinpool::pool pool("max_bytes=64MiB; on_full=error; wait=0s; name=containers");

        pinpool::buffer batch = pool.get(1 << 20, pinpool::host_only);
        std::memset(batch.data(), 7, batch.size());
        void *address = batch.data();
        check(batch.data_as<char>()[batch.size() - 1] == 7, "the memory as another type");
        batch.reset();
        batch.reset(); // empty: nothing to return
        std::optional<pinpool::buffer> again = pool.try_get(1 << 20, pinpool::host_only);
        check(again && again->data() == address, "reuse");
        pinpool::buffer moved = std::move(*again);
        check(!*again && moved, "empty after a move");
        pinpool::pool shared = pool;
        const pinpool::pool other = std::move(shared);
        check(shared.native_handle() == other.native_handle(), "a moved-from pool still has its handle");

        pinpool::pinned_resource memory(pool, pinpool::host_only);
        std::pmr::vector<long> values(&memory);
        for (long i = 0; i < 1000; i++)
            values.push_back(i);
        std::cout << "sum " << std::accumulate(values.begin(), values.end(), 0L) << '\n';
        std::pmr::vector<long> copy(values, &memory);
        check(copy == values && memory.is_equal(pinpool::pinned_resource(pool, pinpool::host_only)), "a container");
        void *const aligned = memory.allocate(1, std::size_t{1} << 21);
        check(reinterpret_cast<std::uintptr_t>(aligned) % (1 << 21) == 0, "an allocation with a large alignment");
        memory.deallocate(aligned, 1, std::size_t{1} << 21);
        // Without a driver, the stream is refused and the memory is returned immediately.
        pinpool::pinned_resource on_stream(pool, stream_of_a_library{});
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
        // A failed pinpool.h function also counts as the last failed call.
        check(pp_trim(nullptr, 0) == PP_INVALID_ARGUMENT, "a NULL pool");
        check(fails_with(PP_INVALID_ARGUMENT, "`pool` is NULL", [] { throw pinpool::error::last(); }), "the last failed call");
        pinpool::request_options options;
        options.alignment = 1 << 16;
        options.timeout = std::chrono::milliseconds(-1);
        options.tag = "decode";
        pool.get(32 << 20, pinpool::host_only, options).reset();
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
            kept.reset();
            std::cout << error.what() << '\n';
        }

        char own[100] = {};
        int released = 0;
        {
            // Returned by the destructors, even if there is no such stream.
            pinpool::buffer on_default = pool.get(8 << 20, pinpool::host_only);
            check(!on_default.stream().get(), "host_only has no stream");
            on_default.set_stream(stream_with_get{});
            check(on_default.stream().get() == pinpool::per_thread_stream, "the stream of get()");
            on_default.set_stream(static_cast<CUstream_st *>(nullptr));
            check(on_default.stream().get() == pinpool::default_stream, "null is the default stream");
            pinpool::buffer adopted = pool.adopt(own, sizeof own, pinpool::host_only, true, [&](void *) { ++released; });
            check(adopted.is_pinned() && adopted.data() == reinterpret_cast<std::byte *>(own), "adopted memory");
        }
        check(released == 1, "adopted memory is released once");

        std::cout << pool.stats_json() << '\n';
        pinpool::partition eval = pool.open_partition("eval", 1 << 20);
        outlives = eval.get(4096, pinpool::host_only);
        pinpool::pinned_resource of_eval(eval, pinpool::host_only);
        check(std::pmr::vector<char>(4096, &of_eval).size() == 4096 && !of_eval.is_equal(memory), "a container of a partition");
        try {
            std::pmr::vector<char> large(2 << 20, &of_eval);
            check(false, "a container above the limit of its partition");
        } catch (const pinpool::bad_alloc &) {
        }
        pool.close();
        check(fails_with(PP_CLOSED, "", [&] { (void)eval.get(4096, pinpool::host_only); }), "a request after a close");
    }
    std::memset(outlives.data(), 1, outlives.size()); // the pool ends after its last buffer
    return 0;
}
