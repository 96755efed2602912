/* A substitute for libcudart: finds the driver as the real one does, by dlopen, then dlsym for cuGetProcAddress_v2, then
   cuGetProcAddress_v2 for everything else. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

static int (*init)(unsigned), (*retain)(void **, int), (*get_current)(void **), (*set_current)(void *);
static int (*alloc)(void **, size_t, unsigned), (*free_host)(void *);
static __thread int last;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*query)(const char *, void **, int, uint64_t, int *);
    if (!driver) abort();
    *(void **)&query = dlsym(driver, "cuGetProcAddress_v2");
    const char *names[] = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemHostAlloc",
                           "cuMemFreeHost"};
    void **places[] = {(void **)&init, (void **)&retain, (void **)&get_current, (void **)&set_current, (void **)&alloc,
                       (void **)&free_host};
    for (int i = 0; i < 6; i++)
        if (query(names[i], places[i], 13000, 0, NULL) != 0) abort();
    init(0);
}

/* The runtime makes the primary context current if none is. */
static void enter(void) {
    void *context = NULL;
    pthread_once(&once, find);
    if (get_current(&context) == 0 && !context && retain(&context, 0) == 0) set_current(context);
}

static int recorded(int code) {
    if (code != 0) last = code;
    return code;
}

int cudaHostAlloc(void **place, size_t bytes, unsigned flags) {
    enter();
    return recorded(alloc(place, bytes, flags));
}

int cudaMallocHost(void **place, size_t bytes) { return cudaHostAlloc(place, bytes, 0); }

int cudaFreeHost(void *memory) {
    enter();
    return memory ? recorded(free_host(memory)) : 0;
}

int cudaGetLastError(void) {
    int code = last;
    last = 0;
    return code;
}
