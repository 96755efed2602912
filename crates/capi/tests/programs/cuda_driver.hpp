/* The functions of the CUDA driver that streams.cpp calls, declared as in cuda.h, so that no toolkit is needed. The example
   copy_batches.cpp has its own declarations. */
#ifndef CUDA_DRIVER_HPP
#define CUDA_DRIVER_HPP

#include <pinpool.h>

#include <cstddef>

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

#endif
