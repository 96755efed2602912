/* A request that waits without a timeout fails when another thread closes the pool; buffers and the handle stay valid. */
#define _POSIX_C_SOURCE 200809L
#include <pinpool.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void expect(int line, int is_true)
{
    if (!is_true) {
        fprintf(stderr, "line %d: %s\n", line, pp_last_error(NULL));
        exit(1);
    }
}
#define EXPECT(condition) expect(__LINE__, (condition))

static void *wait_for_room(void *pool)
{
    void *ptr = &ptr;
    EXPECT(pp_get(pool, 3 << 20, &ptr) == PP_CLOSED && ptr == NULL);
    EXPECT(strcmp(pp_last_error(NULL), "the pool or partition was closed") == 0);
    return NULL;
}

/* Closes a full pool while another thread waits in it. */
static void close_pool(pp_pool *pool)
{
    pthread_t thread;
    void *ptr = &ptr;
    char *json;
    int is_waiting;
    EXPECT(pthread_create(&thread, NULL, wait_for_room, pool) == 0);
    do {
        const struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
        EXPECT(pp_stats_json(pool, &json) == PP_OK);
        is_waiting = strstr(json, "\"waiting\":1") != NULL;
        pp_string_free(json);
    } while (!is_waiting);
    EXPECT(pp_pool_close(pool) == PP_OK);
    EXPECT(pthread_join(thread, NULL) == 0);
    EXPECT(pp_get(pool, 1, &ptr) == PP_CLOSED && ptr == NULL);
    EXPECT(pp_try_get(pool, 1, &ptr) == PP_CLOSED && ptr == NULL);
}

static void release(void *ptr, void *user_data)
{
    (void)ptr;
    (void)user_data;
    abort();
}

int main(void)
{
    pp_pool *pool, *partition, *other;
    void *held, *in_partition;
    char own[8];

    EXPECT(pp_pool_open("backend=heap; max_bytes=8MiB; on_full=error; wait=none", &pool) == PP_OK);
    EXPECT(pp_partition_open(pool, "part", 4 << 20, &partition) == PP_OK);
    EXPECT(pp_get(partition, 3 << 20, &in_partition) == PP_OK);
    close_pool(partition);
    /* The pool still serves requests, until it is closed itself. */
    EXPECT(pp_get(pool, 4 << 20, &held) == PP_OK);
    close_pool(pool);
    EXPECT(pp_adopt(pool, own, sizeof own, 0, release, NULL) == PP_CLOSED);
    EXPECT(pp_reserve(pool, 1 << 20) == PP_CLOSED && pp_partition_open(pool, "b", 1, &other) == PP_CLOSED);
    EXPECT(pp_pool_close(pool) == PP_OK && pp_trim(pool, 0) == PP_OK);
    memset(held, 1, 4 << 20);
    EXPECT(pp_put(pool, held) == PP_OK && pp_put(partition, in_partition) == PP_OK && pp_pool_destroy(partition) == PP_OK);
    EXPECT(pp_pool_destroy(pool) == PP_OK && pp_pool_close(pool) == PP_UNKNOWN_POOL);
    return 0;
}
