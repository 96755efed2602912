/* Ends with a pool open, buffers out and threads in the middle of requests. */
#include <pinpool.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pp_pool *pool;

static void *churn(void *argument)
{
    (void)argument;
    for (;;) {
        void *ptr;
        if (pp_get(pool, 64 * 1024, &ptr) != PP_OK || pp_put(pool, ptr) != PP_OK)
            abort();
    }
    return NULL;
}

int main(void)
{
    pthread_t thread;
    void *held;

    if (pp_pool_open("backend=heap", &pool) != PP_OK || pp_get(pool, 1 << 20, &held) != PP_OK)
        return 1;
    for (int i = 0; i < 2; i++) {
        if (pthread_create(&thread, NULL, churn, NULL) != 0)
            return 1;
    }
    for (int i = 0; i < 1000; i++) {
        if (pp_get(pool, 4096, &held) != PP_OK || pp_put(pool, held) != PP_OK)
            return 1;
    }
    puts("ends");
    return 0;
}
