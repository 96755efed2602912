// Copies batches to the device. Each batch is destroyed right after its copy is enqueued, and its memory is reused once that
// copy has completed.
//
//     c++ -std=c++17 copy_batches.cpp $(pkg-config --cflags --libs pinpool) -lcuda -o copy_batches
//
// Without a CUDA toolkit, the functions of the driver are declared here as in cuda.h.
#include <pinpool.hpp>

#include <cstring>
#include <exception>
#include <iostream>
#include <memory_resource>
#include <stdexcept>
#include <string>
#include <vector>

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUstream = CUstream_st *;

extern "C" {
int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxSetCurrent(CUcontext context);
int cuMemAlloc_v2(CUdeviceptr *ptr, std::size_t bytes);
int cuMemFree_v2(CUdeviceptr ptr);
int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, std::size_t bytes, CUstream stream);
int cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, std::size_t bytes, CUstream stream);
int cuStreamCreate(CUstream *stream, unsigned flags);
int cuStreamSynchronize(CUstream stream);
int cuStreamDestroy_v2(CUstream stream);
}
#endif

constexpr unsigned non_blocking = 1; // CU_STREAM_NON_BLOCKING
constexpr int batches = 200, slots = 4;
constexpr std::size_t batch_bytes = 256 * 1024;

static void check(int result, const char *call)
{
    if (result != 0)
        throw std::runtime_error(std::string(call) + ": error " + std::to_string(result));
}

static void copy_batches(pinpool::pool &pool, CUstream stream)
{
    pinpool::pinned_resource pinned(pool, stream);
    CUdeviceptr target[slots];
    for (CUdeviceptr &slot : target)
        check(cuMemAlloc_v2(&slot, batch_bytes), "cuMemAlloc");

    for (int first = 0; first < batches; first += slots) {
        for (int slot = 0; slot < slots; slot++) {
            const int mark = (first + slot) % 251;
            if (slot % 2 == 0) {
                pinpool::buffer batch = pool.get(batch_bytes, stream);
                std::memset(batch.data(), mark, batch.size());
                check(cuMemcpyHtoDAsync_v2(target[slot], batch.data(), batch.size(), stream), "cuMemcpyHtoDAsync");
            } else {
                std::pmr::vector<unsigned char> batch(batch_bytes, static_cast<unsigned char>(mark), &pinned);
                check(cuMemcpyHtoDAsync_v2(target[slot], batch.data(), batch.size(), stream), "cuMemcpyHtoDAsync");
            }
        } // each batch is destroyed right after its copy was enqueued
        // Copy the batches back into a vector in pinned memory, and compare them.
        std::pmr::vector<unsigned char> arrived(slots * batch_bytes, &pinned);
        for (int slot = 0; slot < slots; slot++)
            check(cuMemcpyDtoHAsync_v2(&arrived[slot * batch_bytes], target[slot], batch_bytes, stream), "cuMemcpyDtoHAsync");
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
        for (std::size_t at = 0; at < arrived.size(); at++)
            if (arrived[at] != (first + static_cast<int>(at / batch_bytes)) % 251)
                throw std::runtime_error("wrong byte " + std::to_string(at) + " after batch " + std::to_string(first));
    }
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    for (CUdeviceptr slot : target)
        check(cuMemFree_v2(slot), "cuMemFree");
}

int main()
{
    try {
        int device;
        CUcontext context;
        CUstream stream;
        check(cuInit(0), "cuInit");
        check(cuDeviceGet(&device, 0), "cuDeviceGet");
        check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
        check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
        check(cuStreamCreate(&stream, non_blocking), "cuStreamCreate");
        pinpool::pool pool("max_bytes=64MiB; name=copy_batches");
        copy_batches(pool, stream);
        std::cout << batches << " batches arrived whole\n" << pool.stats_json() << '\n';
        check(cuStreamDestroy_v2(stream), "cuStreamDestroy");
        return 0;
    } catch (const std::exception &error) { // pinpool::error, too
        std::cerr << error.what() << '\n';
        return 1;
    }
}
