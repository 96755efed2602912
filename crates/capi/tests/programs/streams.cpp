// The classes of pinpool.hpp with streams and events.
#include <pinpool.hpp>

#include "cuda_driver.hpp"

#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

constexpr int batches = 200;
constexpr std::size_t batch_bytes = 64 * 1024, ahead_bytes = 1 << 20;

static void check(bool is_right, const std::string &what)
{
    if (!is_right)
        throw std::runtime_error(what);
}

static bool has(const pinpool::pool &pool, const std::string &text)
{
    return pool.stats_json().find(text) != std::string::npos;
}

// Copies a batch on both streams and returns it in one of five ways, each of which must wait for both copies.
static void send(const pinpool::pool &pool, const pinpool::buffer &ahead, int number, const CUdeviceptr (&targets)[2],
                 const CUstream (&streams)[2], CUevent event)
{
    pinpool::buffer batch = pool.get(batch_bytes, pinpool::host_only);
    std::memset(batch.data(), number, batch.size());
    for (int at = 0; at < 2; at++) {
        // A longer copy comes first, so that an early reuse of the batch is detected.
        check(cuMemcpyHtoDAsync_v2(targets[at], ahead.data(), ahead_bytes, streams[at]) == 0, "cuMemcpyHtoDAsync");
        check(cuMemcpyHtoDAsync_v2(targets[at], batch.data(), batch.size(), streams[at]) == 0, "cuMemcpyHtoDAsync");
    }
    if (number % 8 < 4) {
        batch.record_stream(streams[0]);
    } else {
        check(cuEventRecord(event, streams[0]) == 0, "cuEventRecord");
        batch.record_event(event);
    }
    check(static_cast<bool>(batch), "a record keeps the buffer");
    switch (number % 4) {
    case 0:
        batch.set_stream(streams[1]); // The destructor or reset() returns the buffer.
        if (number % 8 == 0)
            return;
        batch.reset();
        break;
    case 1:
        check(cuEventRecord(event, streams[1]) == 0, "cuEventRecord");
        batch.put_after_event(event);
        break;
    case 2:
        batch.put_after_stream(streams[1]);
        break;
    default:
        batch.record_stream(streams[1]);
        batch.put_ignoring_stream();
    }
    check(!batch && batch.data() == nullptr && batch.size() == 0, "empty after its return");
}

// Whether a call with a null stream is refused.
template <typename Call> static bool is_refused(Call call, pp_status status = PP_REFUSED_BY_CAPTURE)
{
    try {
        call(static_cast<CUstream>(nullptr));
        return false;
    } catch (const pinpool::error &error) {
        check(error.status() == status, error.what());
        return true;
    }
}

// A null stream is the default stream of this program. While a blocking stream captures, the driver refuses to examine the legacy
// stream, but not the per-thread stream.
static void null_is_the_default_stream(const pinpool::pool &pool, CUcontext context)
{
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    const bool is_legacy = false;
    check(pinpool::default_stream == pinpool::per_thread_stream, "the per-thread stream");
#else
    const bool is_legacy = true;
    check(pinpool::default_stream == pinpool::legacy_stream, "the legacy stream");
#endif
    CUstream capturing;
    CUgraph_st *graph;
    pinpool::buffer first = pool.get(batch_bytes, static_cast<CUstream>(nullptr));
    pinpool::buffer second = pool.get(batch_bytes, pinpool::host_only);
    check(first.stream().get() == pinpool::default_stream, "the stream of a request");
    const auto record = [&](CUstream stream) { first.record_stream(stream); };
    const auto put_after = [&](CUstream stream) { second.put_after_stream(stream); };
    check(cuStreamCreate(&capturing, 0) == 0 && cuStreamBeginCapture_v2(capturing, 0) == 0, "cuStreamBeginCapture");
    check(is_refused(record) == is_legacy && is_refused(put_after) == is_legacy, "null is another stream");
    check(cuStreamEndCapture(capturing, &graph) == 0 && cuGraphDestroy(graph) == 0, "cuStreamEndCapture");
    // After a refusal, a second call for the same stream makes the memory reusable.
    check(!is_refused(record) && !is_refused(put_after), "no stream captures");
    // On a thread without a current context, it is refused until the context is current.
    std::thread([&] {
        check(is_refused(record, PP_INVALID_HANDLE) && cuCtxSetCurrent(context) == 0, "no context is current");
        const pinpool::buffer put_by_destructor(std::move(first));
    }).join();
    pool.maintain();
    check(has(pool, "\"quarantined\":0"), "the destructor repeats the call");
    check(cuStreamDestroy_v2(capturing) == 0, "cuStreamDestroy");
}

// The memory of a buffer whose event was recorded in a capture is never reused, even if a second call succeeds.
static void an_event_of_a_capture_is_refused()
{
    pinpool::pool pool("max_bytes=64MiB; maintenance_thread=0");
    CUstream capturing;
    CUevent event;
    CUgraph_st *graph;
    pinpool::buffer first = pool.get(batch_bytes, pinpool::host_only), second = pool.get(batch_bytes, pinpool::host_only);
    const auto record = [&](CUstream) { first.record_event(event); };
    const auto put_after = [&](CUstream) { second.put_after_event(event); };
    check(cuStreamCreate(&capturing, 1) == 0 && cuStreamBeginCapture_v2(capturing, 0) == 0, "cuStreamBeginCapture");
    check(cuEventCreate(&event, 2) == 0 && cuEventRecord(event, capturing) == 0, "cuEventRecord");
    check(is_refused(record, PP_STREAM_CAPTURING) && is_refused(put_after, PP_STREAM_CAPTURING), "an event of a capture");
    check(cuStreamEndCapture(capturing, &graph) == 0 && cuGraphDestroy(graph) == 0, "cuStreamEndCapture");
    check(cuEventRecord(event, capturing) == 0 && !is_refused(record) && !is_refused(put_after), "no stream captures");
    first.reset();
    pool.maintain();
    check(has(pool, "\"quarantined\":2"), "launches of the graph may use the memory");
    check(cuEventDestroy_v2(event) == 0 && cuStreamDestroy_v2(capturing) == 0, "cuStreamDestroy");
}

// A buffer of a destroyed pool still waits for the work of both streams.
static void a_buffer_outlives_its_pool(const CUdeviceptr (&targets)[2], const CUstream (&streams)[2])
{
    pinpool::buffer batch = pinpool::pool("max_bytes=64MiB; maintenance_thread=0").get(batch_bytes, streams[0]);
    std::memset(batch.data(), 5, batch.size());
    for (int at = 0; at < 2; at++)
        check(cuMemcpyHtoDAsync_v2(targets[at], batch.data(), batch.size(), streams[at]) == 0, "cuMemcpyHtoDAsync");
    batch.record_stream(streams[1]);
}

int main()
{
    int device;
    CUcontext context;
    CUdeviceptr targets[2];
    CUstream streams[2];
    CUevent event;
    bool is_right = cuInit(0) == 0 && cuDeviceGet(&device, 0) == 0 && cuDevicePrimaryCtxRetain(&context, device) == 0;
    is_right = is_right && cuCtxSetCurrent(context) == 0 && cuEventCreate(&event, 2 /* CU_EVENT_DISABLE_TIMING */) == 0;
    for (int at = 0; at < 2; at++)
        is_right = is_right && cuMemAlloc_v2(&targets[at], ahead_bytes) == 0 && cuStreamCreate(&streams[at], 1) == 0;
    check(is_right, "no device");

    pinpool::pool pool("max_bytes=64MiB; maintenance_thread=0");
    std::byte arrived[batch_bytes];
    pinpool::buffer ahead = pool.get(ahead_bytes, pinpool::host_only);
    std::memset(ahead.data(), 0xfe, ahead.size());
    for (int number = 0; number < batches; number++) {
        send(pool, ahead, number, targets, streams, event);
        // This request may get the same memory, which no copy may be using then.
        pinpool::buffer other = pool.get(batch_bytes, pinpool::host_only);
        std::memset(other.data(), 0xff, other.size());
        for (int at = 0; at < 2; at++) {
            check(cuMemcpyDtoHAsync_v2(arrived, targets[at], batch_bytes, streams[at]) == 0, "cuMemcpyDtoHAsync");
            check(cuStreamSynchronize(streams[at]) == 0, "cuStreamSynchronize");
            for (std::byte byte : arrived)
                check(byte == std::byte(number), "a wrong byte in batch " + std::to_string(number));
        }
    }
    std::cout << batches << " batches arrived whole\n";

    ahead.reset();
    a_buffer_outlives_its_pool(targets, streams);
    null_is_the_default_stream(pool, context);
    an_event_of_a_capture_is_refused();
    check(cuCtxSynchronize() == 0, "cuCtxSynchronize");
    pool.maintain();
    check(has(pool, "\"in_flight\":0"), "maintain detects completed copies");
    check(!has(pool, "\"held_bytes\":0,"), "idle memory is kept");
    pool.trim(0);
    check(has(pool, "\"held_bytes\":0,"), "trim releases idle memory");
    pool.set_max_bytes(32 << 20);
    check(has(pool, "\"max_bytes\":33554432"), "the limit changes");
    pool.reserve(8 << 20);
    pool.trim(0);
    check(has(pool, "\"held_bytes\":8388608,"), "trim keeps the reserve");
    try {
        pool.reserve(64 << 20);
        check(false, "a reserve above the limit");
    } catch (const pinpool::error &error) {
        check(error.status() == PP_OVER_LIMIT, error.what());
    }
    is_right = cuEventDestroy_v2(event) == 0;
    for (int at = 0; at < 2; at++)
        is_right = is_right && cuMemFree_v2(targets[at]) == 0 && cuStreamDestroy_v2(streams[at]) == 0;
    return is_right ? 0 : 1;
}
