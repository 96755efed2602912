/*
 * Copies batches to the device and returns each buffer right after its copy is enqueued. The next request does not wait for a copy,
 * and does not get memory that a copy still reads.
 *
 *     cc -std=c99 copy_batches.c $(pkg-config --cflags --libs pinpool) -lcuda -o copy_batches
 *
 * Without a CUDA toolkit, the functions of the driver are declared here as in cuda.h.
 */
#include <pinpool.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef CUstream_st *CUstream;

CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr ptr);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamDestroy_v2(CUstream stream);
#endif

enum { NON_BLOCKING = 1 /* CU_STREAM_NON_BLOCKING */ };
enum { BATCHES = 200, SLOTS = 4, BATCH_BYTES = 256 * 1024 };

static void check(pp_status status, const char *call)
{
    if (status != PP_OK) {
        fprintf(stderr, "%s: %s: %s\n", call, pp_status_name(status), pp_last_error(NULL));
        exit(1);
    }
}

static void check_cuda(CUresult result, const char *call)
{
    if (result != 0) {
        fprintf(stderr, "%s: error %d\n", call, result);
        exit(1);
    }
}

int main(void)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr target[SLOTS];
    CUstream stream;
    pp_pool *pool;
    pp_status status;
    void *batch;
    char *json;

    check_cuda(cuInit(0), "cuInit");
    check_cuda(cuDeviceGet(&device, 0), "cuDeviceGet");
    check_cuda(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check_cuda(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check_cuda(cuStreamCreate(&stream, NON_BLOCKING), "cuStreamCreate");
    for (int i = 0; i < SLOTS; i++)
        check_cuda(cuMemAlloc_v2(&target[i], BATCH_BYTES), "cuMemAlloc");
    check(pp_pool_open("max_bytes=64MiB; name=copy_batches", &pool), "pp_pool_open");

    for (int i = 0; i < BATCHES; i++) {
        unsigned char *bytes;
        check(pp_get(pool, BATCH_BYTES, &batch), "pp_get");
        memset(batch, i % 251, BATCH_BYTES);
        check_cuda(cuMemcpyHtoDAsync_v2(target[i % SLOTS], batch, BATCH_BYTES, stream), "cuMemcpyHtoDAsync");
        /* The buffer is reused once the copy has completed. */
        status = pp_put_after_stream(pool, batch, stream);
        if (status != PP_OK)
            fprintf(stderr, "pp_put_after_stream: %s\n", pp_last_error(NULL));
        if (pp_may_put_after(status))
            check(pp_put(pool, batch), "pp_put"); /* the driver refused: never reused */
        if (i % SLOTS != SLOTS - 1)
            continue;
        /* Copy the batches that have arrived back into another buffer of the pool, and compare them. */
        for (int slot = 0; slot < SLOTS; slot++) {
            check(pp_get(pool, BATCH_BYTES, &batch), "pp_get");
            check_cuda(cuMemcpyDtoHAsync_v2(batch, target[slot], BATCH_BYTES, stream), "cuMemcpyDtoHAsync");
            check_cuda(cuStreamSynchronize(stream), "cuStreamSynchronize");
            bytes = batch;
            for (int at = 0; at < BATCH_BYTES; at++) {
                if (bytes[at] != (i - SLOTS + 1 + slot) % 251) {
                    fprintf(stderr, "batch %d, byte %d: %d\n", i - SLOTS + 1 + slot, at, bytes[at]);
                    return 1;
                }
            }
            check(pp_put(pool, batch), "pp_put");
        }
    }
    check(pp_stats_json(pool, &json), "pp_stats_json");
    printf("%d batches arrived whole\n%s\n", BATCHES, json);
    pp_string_free(json);
    check(pp_pool_destroy(pool), "pp_pool_destroy");

    check_cuda(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    for (int i = 0; i < SLOTS; i++)
        check_cuda(cuMemFree_v2(target[i]), "cuMemFree");
    return 0;
}
