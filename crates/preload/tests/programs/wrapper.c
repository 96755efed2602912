/* A library with the driver's name that is found before the driver, as tools that share a GPU install: counts a call, and
   calls the real function, which it looks up through a handle. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int count;

static void *real(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    return dlsym(driver, name);
}

__attribute__((destructor)) static void report(void) { fprintf(stderr, "wrapped %d\n", count); }

int cuMemHostAlloc(void **place, size_t bytes, unsigned flags) {
    count++;
    return ((int (*)(void **, size_t, unsigned))real("cuMemHostAlloc"))(place, bytes, flags);
}

int cuMemFreeHost(void *memory) { return ((int (*)(void *))real("cuMemFreeHost"))(memory); }

/* The real function begins the capture, and no library before this one learns of it. */
int cuStreamBeginCapture_v2(void *stream, int mode) {
    return ((int (*)(void *, int))real("cuStreamBeginCapture_v2"))(stream, mode);
}

int cuStreamEndCapture(void *stream, void **graph) {
    return ((int (*)(void *, void **))real("cuStreamEndCapture"))(stream, graph);
}

int cuCtxSetCurrent(void *context) { return ((int (*)(void *))real("cuCtxSetCurrent"))(context); }

int set_current_unseen(void *context) { return ((int (*)(void *))real("cuCtxSetCurrent"))(context); }

int cuDevicePrimaryCtxReset_v2(int device) { return ((int (*)(int))real("cuDevicePrimaryCtxReset_v2"))(device); }

int reset_unseen(int device) { return ((int (*)(int))real("cuDevicePrimaryCtxReset_v2"))(device); }

int begin_unseen(void *stream, int mode) { return ((int (*)(void *, int))real("cuStreamBeginCapture_v2"))(stream, mode); }

int end_unseen(void *stream, void **graph) { return ((int (*)(void *, void **))real("cuStreamEndCapture"))(stream, graph); }
