/* A CUDA program that does not know pinpool. The first argument selects how it finds the driver's functions,
   the second selects the steps. Built with LINKED it is linked to libcuda, with RUNTIME to libcudart. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t device_ptr;
typedef void *handle;

#define FUNCTIONS(F) \
    F(cuInit, (unsigned)) \
    F(cuGetExportTable, (const void *const **, const void *)) \
    F(cuDevicePrimaryCtxRetain, (handle *, int)) \
    F(cuDevicePrimaryCtxReset_v2, (int)) \
    F(cuDevicePrimaryCtxRelease_v2, (int)) \
    F(cuCtxSetCurrent, (handle)) \
    F(cuCtxSynchronize, (void)) \
    F(cuMemAlloc_v2, (device_ptr *, size_t)) \
    F(cuMemFree_v2, (device_ptr)) \
    F(cuMemHostAlloc, (void **, size_t, unsigned)) \
    F(cuMemAllocHost_v2, (void **, size_t)) \
    F(cuMemFreeHost, (void *)) \
    F(cuMemHostGetFlags, (unsigned *, void *)) \
    F(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    F(cuMemHostUnregister, (void *)) \
    F(cuMemHostGetDevicePointer_v2, (device_ptr *, void *, unsigned)) \
    F(cuPointerGetAttribute, (void *, int, device_ptr)) \
    F(cuMemcpyHtoDAsync_v2, (device_ptr, const void *, size_t, handle)) \
    F(cuMemcpyDtoH_v2, (void *, device_ptr, size_t)) \
    F(cuStreamCreate, (handle *, unsigned)) \
    F(cuStreamDestroy_v2, (handle)) \
    F(cuStreamSynchronize, (handle)) \
    F(cuStreamBeginCapture_v2, (handle, int)) \
    F(cuStreamEndCapture, (handle, handle *)) \
    F(cuGraphInstantiateWithFlags, (handle *, handle, unsigned long long)) \
    F(cuGraphLaunch, (handle, handle))

#define DECLARE(name, arguments) static int (*p_##name) arguments;
FUNCTIONS(DECLARE)

#ifdef LINKED
#define EXTERN(name, arguments) extern int name arguments;
FUNCTIONS(EXTERN)
#endif

/* Pinned memory, from the runtime if the program is linked to it. */
static int (*host_alloc)(void **, size_t, unsigned);
static int (*host_free)(void *);

#ifdef RUNTIME
extern int cudaHostAlloc(void **, size_t, unsigned);
extern int cudaMallocHost(void **, size_t);
extern int cudaFreeHost(void *);
extern int cudaGetLastError(void);
#endif

#define MUST(call) must(call, #call, __LINE__)
static void must(int code, const char *call, int line) {
    if (code != 0) {
        printf("line %d: %s: %d\n", line, call, code);
        exit(1);
    }
}

static void find(const char *way) {
#ifdef LINKED
    (void)way;
#define LINK(name, arguments) p_##name = name;
    FUNCTIONS(LINK)
#else
    handle driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        puts(dlerror());
        exit(1);
    }
    if (strcmp(way, "dlsym") == 0) {
#define LOOK(name, arguments) *(void **)&p_##name = dlsym(driver, #name);
        FUNCTIONS(LOOK)
    } else {
        int (*query)(const char *, void **, int, uint64_t, int *);
        *(void **)&query = dlsym(driver, "cuGetProcAddress_v2");
        char name[64];
#define QUERY(full, arguments) \
    strcpy(name, #full); \
    if (strstr(name, "_v2")) *strstr(name, "_v2") = 0; \
    MUST(query(name, (void **)&p_##full, 12050, 0, NULL));
        FUNCTIONS(QUERY)
    }
#endif
    host_alloc = p_cuMemHostAlloc;
    host_free = p_cuMemFreeHost;
#ifdef RUNTIME
    host_alloc = cudaHostAlloc;
    host_free = cudaFreeHost;
#endif
}

static handle context;

static void start(void) {
    MUST(p_cuInit(0));
    MUST(p_cuDevicePrimaryCtxRetain(&context, 0));
    MUST(p_cuCtxSetCurrent(context));
}

/* Holds the mock driver's copies on this stream, or lets them continue. */
static void hold(handle stream, int held) {
    ((size_t(*)(handle, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "mock_driver_hold_stream"))(stream, held);
}

/* With HOLD in its environment, a program frees memory while copies are certainly still using it. The driver's own free would
   wait for them forever. */
static void hold_if_asked(handle stream) {
    if (getenv("HOLD")) hold(stream, 1);
}

#define STEPS 24
#define BYTES(step) (((size_t)((step) % 4) + 1) * 96 * 1024)
#define SLOT ((size_t)512 * 1024)

static uint64_t sum_of(const unsigned char *bytes, size_t count) {
    uint64_t sum = 1469598103934665603u;
    for (size_t i = 0; i < count; i++) sum = (sum ^ bytes[i]) * 1099511628211u;
    return sum;
}

/* Allocates, fills, copies without waiting and frees, step by step; then checks what arrived. */
static uint64_t steps(unsigned seed) {
    handle stream;
    device_ptr device;
    MUST(p_cuStreamCreate(&stream, 1));
    MUST(p_cuMemAlloc_v2(&device, STEPS * SLOT));
    hold_if_asked(stream);
    for (unsigned step = 0; step < STEPS; step++) {
        unsigned char *buffer;
        MUST(host_alloc((void **)&buffer, BYTES(step), step % 4));
        for (size_t i = 0; i < BYTES(step); i++) buffer[i] = (unsigned char)(i * 31 + step * 7 + seed);
        MUST(p_cuMemcpyHtoDAsync_v2(device + step * SLOT, buffer, BYTES(step), stream));
        MUST(host_free(buffer));
    }
    if (getenv("HOLD")) hold(stream, 0);
    MUST(p_cuStreamSynchronize(stream));
    unsigned char *arrived = malloc(SLOT);
    uint64_t sum = 0;
    for (unsigned step = 0; step < STEPS; step++) {
        MUST(p_cuMemcpyDtoH_v2(arrived, device + step * SLOT, BYTES(step)));
        for (size_t i = 0; i < BYTES(step); i++) {
            if (arrived[i] != (unsigned char)(i * 31 + step * 7 + seed)) {
                printf("step %u: byte %zu is wrong\n", step, i);
                exit(1);
            }
        }
        sum = sum * 31 + sum_of(arrived, BYTES(step));
    }
    free(arrived);
    MUST(p_cuMemFree_v2(device));
    MUST(p_cuStreamDestroy_v2(stream));
    return sum;
}

static void *one_of_threads(void *seed) {
    MUST(p_cuCtxSetCurrent(context));
    uint64_t *place = seed;
    *place = steps((unsigned)*place);
    return NULL;
}

static void threads(void) {
    pthread_t threads[4];
    uint64_t sums[4];
    for (int i = 0; i < 4; i++) {
        sums[i] = 11 * (i + 1);
        pthread_create(&threads[i], NULL, one_of_threads, &sums[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        printf("thread %d: %016lx\n", i, (unsigned long)sums[i]);
    }
}

/* What the driver reports about the memory. */
static void facts(void) {
    for (unsigned i = 0; i < 5; i++) {
        char *buffer;
        size_t bytes = 5000 + i;
        if (i == 4) MUST(p_cuMemAllocHost_v2((void **)&buffer, bytes));
        else MUST(host_alloc((void **)&buffer, bytes, i));
        device_ptr device = 0, inside = 0, again = 0;
        MUST(p_cuMemHostGetDevicePointer_v2(&device, buffer, 0));
        MUST(p_cuMemHostGetDevicePointer_v2(&inside, buffer + 100, 0));
        MUST(p_cuPointerGetAttribute(&again, 3, (device_ptr)(buffer + 8)));
        printf("%u: device %d %d %d, refused %d\n", i, device == (device_ptr)buffer, inside == device + 100,
               again == (device_ptr)buffer + 8, p_cuPointerGetAttribute(&again, 9999, (device_ptr)buffer));
        buffer[bytes - 1] = 1;
        MUST(host_free(buffer));
        printf("freed: %d %d\n", p_cuMemFreeHost(buffer) != 0, p_cuMemFreeHost(buffer + 64));
    }
}

/* What the driver refuses. */
static void misuse(void) {
    char *buffer = NULL, local = 0;
    MUST(host_alloc((void **)&buffer, 1 << 20, 0));
    printf("inside %d\n", host_free(buffer + 4096));
    MUST(host_free(buffer));
    printf("twice %d\n", host_free(buffer));
    printf("local %d\n", host_free(&local));
    void *heap = malloc(4096);
    printf("heap %d\n", host_free(heap));
    free(heap);
    printf("null %d\n", host_free(NULL));
    printf("no bytes %d\n", host_alloc((void **)&buffer, 0, 0));
    printf("no place %d\n", host_alloc(NULL, 4096, 0));
    printf("flags %d\n", host_alloc((void **)&buffer, 4096, 0xF0));
    printf("too much %d\n", host_alloc((void **)&buffer, (size_t)1 << 60, 0));
#ifdef RUNTIME
    const int last = cudaGetLastError();
    printf("last error %d, then %d\n", last, cudaGetLastError());
#endif
    unsigned flags = 9;
    MUST(host_alloc((void **)&buffer, 1 << 16, 4));
    MUST(p_cuMemHostGetFlags(&flags, buffer));
    printf("write-combined %u\n", flags);
    MUST(host_free(buffer));
    MUST(p_cuCtxSetCurrent(NULL));
#ifndef RUNTIME
    printf("no context %d\n", host_alloc((void **)&buffer, 4096, 0));
#endif
    MUST(p_cuCtxSetCurrent(context));
}

static handle captured, running;

static void *free_and_allocate(void *buffer) {
    MUST(p_cuCtxSetCurrent(context));
    printf("free during a capture %d\n", host_free(buffer));
    for (int i = 0; i < 8; i++) {
        unsigned char *other;
        int code = host_alloc((void **)&other, 1 << 20, 0);
        if (code != 0 || other == buffer) {
            printf("allocation during a capture %d, the memory of a running copy: %d\n", code, other == buffer);
            return NULL;
        }
        memset(other, 0xEE, 1 << 20);
        host_free(other);
    }
    return NULL;
}

/* Frees memory of a running copy, and allocates, while a stream captures. */
static void capture(void) {
    unsigned char *slow, *kept, *arrived = malloc(1 << 20);
    device_ptr device;
    handle graph, runnable;
    pthread_t thread;
    MUST(p_cuStreamCreate(&captured, 1));
    MUST(p_cuStreamCreate(&running, 1));
    MUST(p_cuMemAlloc_v2(&device, 2 << 20));
    MUST(host_alloc((void **)&slow, 1 << 20, 0));
    MUST(host_alloc((void **)&kept, 1 << 20, 0));
    memset(slow, 0x11, 1 << 20);
    memset(kept, 0x22, 1 << 20);
    MUST(p_cuMemcpyHtoDAsync_v2(device, slow, 1 << 20, running));
    MUST(p_cuStreamBeginCapture_v2(captured, 0));
    MUST(p_cuMemcpyHtoDAsync_v2(device + (1 << 20), kept, 1 << 20, captured));
    pthread_create(&thread, NULL, free_and_allocate, slow);
    pthread_join(thread, NULL);
    int ended = p_cuStreamEndCapture(captured, &graph);
    printf("end of the capture %d\n", ended);
    if (ended != 0) return;
    MUST(p_cuGraphInstantiateWithFlags(&runnable, graph, 0));
    MUST(p_cuGraphLaunch(runnable, captured));
    MUST(p_cuCtxSynchronize());
    MUST(p_cuMemcpyDtoH_v2(arrived, device, 1 << 20));
    printf("copied %02x %02x\n", arrived[0], arrived[(1 << 20) - 1]);
    MUST(p_cuMemcpyDtoH_v2(arrived, device + (1 << 20), 1 << 20));
    printf("replayed %02x %02x\n", arrived[0], arrived[(1 << 20) - 1]);
    free(arrived);
}

static void child_of_fork(void) {
    void *before;
    MUST(host_alloc(&before, 1 << 16, 0));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        void *own = NULL;
        int code = host_alloc(&own, 1 << 16, 0);
        /* A child has no driver: 3. */
        _exit(code == 3 && !own && host_free(before) != 0 ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    const unsigned long sum = steps(5);
    printf("child %d, then %016lx, free %d\n", status, sum, host_free(before));
}

/* A reset frees all memory of the context; later allocations are served again. */
static void reset(void) {
    printf("before %016lx\n", (unsigned long)steps(1));
    MUST(p_cuDevicePrimaryCtxReset_v2(0));
    start();
    printf("after %016lx\n", (unsigned long)steps(2));
}

/* The pool ticks once a second. */
static void zero_reset(void) {
    unsigned char *b;
    MUST(host_alloc((void **)&b, 1 << 20, 0));
    memset(b, 1, 1 << 20);
    MUST(host_free(b));
    MUST(p_cuDevicePrimaryCtxReset_v2(0));
    usleep(2200000);
    puts("alive");
}

/* Resets the device while another thread is zeroing a freed buffer. */
static void reset_while_zeroing(void) {
    const size_t bytes = 256 << 20;
    unsigned char *b;
    MUST(host_alloc((void **)&b, bytes, 0));
    memset(b, 1, bytes);
    MUST(host_free(b));
    while (*(volatile unsigned char *)b != 0) {
    }
    MUST(p_cuDevicePrimaryCtxReset_v2(0));
    usleep(200000);
    puts("alive");
}

/* Retains the primary context through a private table, as the runtime does; no public function sees this. */
static void retain_by_table(handle *retained, int device) {
    static const unsigned char id[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
    const void *const *table;
    int (*retain)(handle *, int);
    MUST(p_cuGetExportTable(&table, id));
    *(const void **)&retain = table[2];
    MUST(retain(retained, device));
}

/* If unseen, a private function also resets the device. */
static void reset_by_table(int unseen) {
    int (*reset)(int) = p_cuDevicePrimaryCtxReset_v2;
    handle retained[2];
    if (unseen) *(void **)&reset = dlsym(dlopen("libwrapper.so", RTLD_NOW), "reset_unseen");
    MUST(reset(0)); /* the context that start() retained */
    for (int round = 0; round < 2; round++) {
        unsigned char *buffers[4];
        retain_by_table(&retained[round], 0);
        MUST(p_cuCtxSetCurrent(retained[round]));
        for (int i = 0; i < 4; i++) MUST(host_alloc((void **)&buffers[i], 1 << 20, 0));
        for (int i = 0; i < 4; i++) memset(buffers[i], i, 1 << 20);
        for (int i = 0; i < 4; i++) MUST(host_free(buffers[i]));
        if (round == 0) MUST(reset(0));
    }
    printf("%s handle\n", retained[0] == retained[1] ? "the same" : "another");
}

/* A context ends while one of its streams captures: the current one, then one that is not current when the capture begins. */
static void ends_capturing(void) {
    handle stream, other;
    MUST(p_cuStreamCreate(&stream, 1));
    MUST(p_cuStreamBeginCapture_v2(stream, 2));
    MUST(p_cuDevicePrimaryCtxReset_v2(0));
    start();
    printf("after the first %016lx\n", (unsigned long)steps(1));
    ((void (*)(size_t))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "mock_driver_set_device_count"))(2);
    MUST(p_cuDevicePrimaryCtxRetain(&other, 1));
    MUST(p_cuCtxSetCurrent(other));
    MUST(p_cuStreamCreate(&stream, 1));
    MUST(p_cuCtxSetCurrent(context));
    MUST(p_cuStreamBeginCapture_v2(stream, 2));
    MUST(p_cuDevicePrimaryCtxRelease_v2(1));
    printf("after the second %016lx\n", (unsigned long)steps(2));
}

/* Allocates and frees more than the limit while freed memory cannot be reused, because a stream captures or a copy is held. */
static void over_the_limit(int captures) {
    unsigned char *buffer;
    handle stream;
    device_ptr device;
    MUST(p_cuStreamCreate(&stream, 1));
    if (captures) {
        MUST(host_alloc((void **)&buffer, 1 << 20, 0));
        MUST(host_free(buffer));
        MUST(p_cuStreamBeginCapture_v2(stream, 2));
    } else {
        hold(stream, 1);
        MUST(p_cuMemAlloc_v2(&device, 1 << 20));
        MUST(host_alloc((void **)&buffer, 1 << 20, 0));
        MUST(p_cuMemcpyHtoDAsync_v2(device, buffer, 1 << 20, stream));
        MUST(host_free(buffer));
    }
    void *last[40];
    for (int i = 0; i < 40; i++) {
        MUST(host_alloc(&last[i], 1 << 20, 0));
        /* The driver's own free waits for the copy that is held. */
        if (captures) MUST(host_free(last[i]));
    }
    puts("over");
    fflush(stdout);
    if (captures) return;
    hold(stream, 0);
    MUST(p_cuCtxSynchronize());
}

/* Begins a capture through a function that no preloaded library can replace, then frees memory in use. */
static void unseen(unsigned stream_flags) {
    int (*begin)(handle, int);
    void *buffer;
    handle graph;
    *(void **)&begin = dlsym(dlopen("libwrapper.so", RTLD_NOW), "begin_unseen");
    MUST(p_cuStreamCreate(&captured, stream_flags));
    MUST(host_alloc(&buffer, 1 << 20, 0));
    MUST(begin(captured, 2));
    MUST(host_free(buffer));
    printf("end of the capture %d\n", p_cuStreamEndCapture(captured, &graph));
    printf("%016lx\n", (unsigned long)steps(4));
}

static void *end_by_another_thread(void *unused) {
    handle graph;
    (void)unused;
    MUST(p_cuCtxSetCurrent(context));
    printf("end by another thread %d\n", p_cuStreamEndCapture(captured, &graph));
    return NULL;
}

/* Ends a capture by calls that the driver refuses: the capture continues after the first, and is over before the second. */
static void refused_ends(void) {
    int (*end)(handle, handle *);
    void *buffer;
    handle graph;
    pthread_t thread;
    *(void **)&end = dlsym(dlopen("libwrapper.so", RTLD_NOW), "end_unseen");
    MUST(p_cuStreamCreate(&captured, 1));
    MUST(host_alloc(&buffer, 1 << 20, 0));
    MUST(p_cuStreamBeginCapture_v2(captured, 0));
    pthread_create(&thread, NULL, end_by_another_thread, NULL);
    pthread_join(thread, NULL);
    MUST(host_free(buffer));
    printf("unseen end %d\n", end(captured, &graph));
    printf("second end %d\n", p_cuStreamEndCapture(captured, &graph));
    steps(4);
}

/* Frees memory after a green context, which is known only by its handle, was created. */
static void green(void) {
    int (*create)(handle *, handle, int, unsigned);
    void *held, *last[8];
    handle context_of_some;
    int reused = 0;
    *(void **)&create = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGreenCtxCreate");
    MUST(host_alloc(&held, 1 << 20, 0));
    MUST(host_alloc(&last[0], 1 << 20, 0));
    MUST(host_free(last[0]));
    MUST(create(&context_of_some, NULL, 0, 1));
    MUST(host_free(held));
    for (int i = 0; i < 8; i++) {
        MUST(host_alloc(&last[i], 1 << 20, 0));
        reused += last[i] == held;
    }
    for (int i = 0; i < 8; i++) MUST(host_free(last[i]));
    printf("reused %d\n", reused);
}

/* Frees memory of one device's context while a copy of another device's context reads it. If unseen, the other context is
   retained and made current by private functions, and used only through its default stream. */
static void devices(int unseen) {
    handle other, stream = NULL;
    int (*set_current)(handle) = p_cuCtxSetCurrent;
    device_ptr device;
    unsigned char *buffer, *next, *arrived = malloc(1 << 20);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    ((void (*)(size_t))dlsym(driver, "mock_driver_set_device_count"))(2);
    MUST(host_alloc((void **)&buffer, 1 << 20, 1));
    memset(buffer, 0x44, 1 << 20);
    if (unseen) {
        *(void **)&set_current = dlsym(dlopen("libwrapper.so", RTLD_NOW), "set_current_unseen");
        retain_by_table(&other, 1);
        MUST(set_current(other));
    } else {
        MUST(p_cuDevicePrimaryCtxRetain(&other, 1));
        MUST(set_current(other));
        MUST(p_cuStreamCreate(&stream, 1));
    }
    hold_if_asked(stream);
    MUST(p_cuMemAlloc_v2(&device, 1 << 20));
    MUST(p_cuMemcpyHtoDAsync_v2(device, buffer, 1 << 20, stream));
    MUST(p_cuCtxSetCurrent(context));
    MUST(host_free(buffer));
    for (int i = 0; i < 4; i++) {
        MUST(host_alloc((void **)&next, 1 << 20, 1));
        memset(next, 0x55, 1 << 20);
    }
    MUST(set_current(other));
    hold(stream, 0);
    MUST(p_cuStreamSynchronize(stream));
    MUST(p_cuMemcpyDtoH_v2(arrived, device, 1 << 20));
    printf("arrived %02x %02x\n", arrived[0], arrived[(1 << 20) - 1]);
    free(arrived);
    if (unseen) {
        int (*reset)(int) = p_cuDevicePrimaryCtxReset_v2;
        usleep(300000); /* The events are queried before the reset, which no hook may see. */
        if (unseen == 2) *(void **)&reset = dlsym(dlopen("libwrapper.so", RTLD_NOW), "reset_unseen");
        MUST(reset(1));
        retain_by_table(&other, 1);
        MUST(p_cuCtxSetCurrent(context));
        MUST(host_free(next));
    }
}

/* Makes two contexts current in turn, as libraries do around each of their calls. */
static void switches(void) {
    handle other;
    ((void (*)(size_t))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "mock_driver_set_device_count"))(2);
    MUST(p_cuDevicePrimaryCtxRetain(&other, 1));
    for (int i = 0; i < 1000; i++) MUST(p_cuCtxSetCurrent(i % 2 == 0 ? other : context));
}

/* Frees memory while a copy uses it, and checks whether the copy is still running. */
static void barrier(void) {
    handle stream;
    device_ptr device;
    void *buffer;
    MUST(p_cuStreamCreate(&stream, 1));
    MUST(p_cuMemAlloc_v2(&device, 1 << 20));
    MUST(host_alloc(&buffer, 1 << 20, 0));
    memset(buffer, 0x33, 1 << 20);
    hold_if_asked(stream);
    MUST(p_cuMemcpyHtoDAsync_v2(device, buffer, 1 << 20, stream));
    MUST(host_free(buffer));
    int (*query)(handle) = NULL;
    *(void **)&query = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamQuery");
    printf("after the free %d\n", query(stream));
    if (getenv("HOLD")) hold(stream, 0);
    MUST(p_cuCtxSynchronize());
}

/* Pins its own memory piece by piece, as frameworks with their own allocators do. */
static void registers(void) {
    unsigned char *pieces;
    if (posix_memalign((void **)&pieces, 4096, 3 * 8192) != 0) exit(1);
    memset(pieces, 1, 3 * 8192);
    for (int i = 0; i < 3; i++) printf("register %d\n", p_cuMemHostRegister_v2(pieces + i * 8192, 8192, 0));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) exit(0);
    MUST(waitpid(child, NULL, 0) == child ? 0 : 1);
    for (int i = 0; i < 3; i++) printf("unregister %d\n", p_cuMemHostUnregister(pieces + i * 8192));
    free(pieces);
}

int main(int count, char **arguments) {
    const char *what = count > 2 ? arguments[2] : "steps";
    find(count > 1 ? arguments[1] : "dlsym");
    start();
    if (strcmp(what, "steps") == 0) printf("%016lx\n", (unsigned long)steps(3));
    else if (strcmp(what, "threads") == 0) threads();
    else if (strcmp(what, "facts") == 0) facts();
    else if (strcmp(what, "misuse") == 0) misuse();
    else if (strcmp(what, "capture") == 0) capture();
    else if (strcmp(what, "fork") == 0) child_of_fork();
    else if (strcmp(what, "reset") == 0) reset();
    else if (strcmp(what, "zero-reset") == 0) zero_reset();
    else if (strcmp(what, "reset-while-zeroing") == 0) reset_while_zeroing();
    else if (strcmp(what, "reset-by-table") == 0) reset_by_table(0);
    else if (strcmp(what, "reset-unseen") == 0) reset_by_table(1);
    else if (strcmp(what, "ends-capturing") == 0) ends_capturing();
    else if (strcmp(what, "over-captured") == 0) over_the_limit(1);
    else if (strcmp(what, "over-held") == 0) over_the_limit(0);
    else if (strcmp(what, "barrier") == 0) barrier();
    else if (strcmp(what, "unseen") == 0) unseen(1);
    else if (strcmp(what, "unseen-blocking") == 0) unseen(0);
    else if (strcmp(what, "refused-ends") == 0) refused_ends();
    else if (strcmp(what, "green") == 0) green();
    else if (strcmp(what, "devices") == 0) devices(0);
    else if (strcmp(what, "devices-unseen") == 0) devices(1);
    else if (strcmp(what, "devices-reset-unseen") == 0) devices(2);
    else if (strcmp(what, "switches") == 0) switches();
    else if (strcmp(what, "registers") == 0) registers();
    else return 2;
    return 0;
}
