// The classes of pinpool.hpp with streams and events. The functions of the CUDA driver are declared here as in cuda.h.
#include <pinpool.hpp>

#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>

using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUstream = CUstream_st *;
using CUevent = CUevent_st *;

extern "C" {
int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxSetCurrent(CUcontext context);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(CUdeviceptr *ptr, std::size_t bytes);
int cuMemFree_v2(CUdeviceptr ptr);
int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, std::size_t bytes, CUstream stream);
int cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, std::size_t bytes, CUstream stream);
int cuStreamCreate(CUstream *stream, unsigned flags);
int cuStreamSynchronize(CUstream stream);
int cuStreamDestroy_v2(CUstream stream);
int cuStreamBeginCapture_v2(CUstream stream, int mode);
int cuStreamEndCapture(CUstream stream, struct CUgraph_st **graph);
int cuGraphDestroy(struct CUgraph_st *graph);
int cuEventCreate(CUevent *event, unsigned flags);
int cuEventRecord(CUevent event, CUstream stream);
int cuEventDestroy_v2(CUevent event);
}

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

// Copies a batch on both streams and returns it in one of four ways, each of which must wait for both copies.
static void send(const pinpool::pool &pool, const pinpool::buffer &ahead, int number, const CUdeviceptr (&targets)[2],
                 const CUstream (&streams)[2], CUevent event)
{
    pinpool::buffer batch = pool.get(batch_bytes, pinpool::host_only);
    std::memset(batch.data(), number, batch.size());
    for (int at = 0; at < 2; at++) {
        // A longer copy before it, so that an early reuse of the batch is noticed.
        check(cuMemcpyHtoDAsync_v2(targets[at], ahead.data(), ahead_bytes, streams[at]) == 0, "cuMemcpyHtoDAsync");
        check(cuMemcpyHtoDAsync_v2(targets[at], batch.data(), batch.size(), streams[at]) == 0, "cuMemcpyHtoDAsync");
    }
    batch.record_stream(streams[0]);
    check(static_cast<bool>(batch), "record_stream keeps the buffer");
    switch (number % 4) {
    case 0:
        batch.set_stream(streams[1]); // and the destructor
        return;
    case 1:
        check(cuEventRecord(event, streams[1]) == 0, "cuEventRecord");
        batch.put_after_event(event);
        break;
    case 2:
        batch.put_after_stream(streams[1]);
        break;
    default:
        batch.record_stream(streams[1]);
        batch.put();
    }
    check(!batch && batch.data() == nullptr && batch.size() == 0, "empty after its return");
}

// Whether a call with a null stream is refused.
template <typename Call> static bool is_refused(Call call)
{
    try {
        call(static_cast<CUstream>(nullptr));
        return false;
    } catch (const pinpool::error &error) {
        check(error.status() == PP_DEVICE, error.what());
        return true;
    }
}

// A null stream is the default stream of this program. While a blocking stream captures, the driver refuses to examine the legacy
// stream, but not the per-thread stream.
static void null_is_the_default_stream(const pinpool::pool &pool)
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
    check(first.stream().handle() == pinpool::default_stream, "the stream of a request");
    const auto record = [&](CUstream stream) { first.record_stream(stream); };
    const auto put_after = [&](CUstream stream) { second.put_after_stream(stream); };
    check(cuStreamCreate(&capturing, 0) == 0 && cuStreamBeginCapture_v2(capturing, 0) == 0, "cuStreamBeginCapture");
    check(is_refused(record) == is_legacy && is_refused(put_after) == is_legacy, "null is another stream");
    check(cuStreamEndCapture(capturing, &graph) == 0 && cuGraphDestroy(graph) == 0, "cuStreamEndCapture");
    // After a refusal, a second call for the same stream makes the memory reusable.
    check(!is_refused(record) && !is_refused(put_after), "no stream captures");
    check(cuStreamDestroy_v2(capturing) == 0, "cuStreamDestroy");
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
        // May get the same memory, which then must not be in use by a copy.
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

    ahead.put();
    null_is_the_default_stream(pool);
    check(cuCtxSynchronize() == 0, "cuCtxSynchronize");
    pool.maintain();
    check(has(pool, "\"in_flight\":0"), "maintain detects completed copies");
    check(!has(pool, "\"held_bytes\":0,"), "idle memory is kept");
    pool.trim(0);
    check(has(pool, "\"held_bytes\":0,"), "trim releases idle memory");
    pool.set_max_bytes(32 << 20);
    check(has(pool, "\"max_bytes\":33554432"), "the limit changes");
    pool.reserve(8 << 20);
    pool.clear();
    check(has(pool, "\"held_bytes\":8388608,"), "clear keeps the reserve");
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
