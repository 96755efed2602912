/*
 * Eight threads request buffers, fill them and return them; then the program prints the pool's statistics.
 *
 *     cc -std=c99 threads.c $(pkg-config --cflags --libs pinpool) -pthread -o threads
 *
 * Nothing is copied to a GPU here. After cudaMemcpyAsync, return the batch with pp_put_after_stream instead of pp_put: see copy_batches.c.
 */
#include <pinpool.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 8, BATCHES = 1000, BATCH_BYTES = 64 * 1024 };

static pp_pool *pool;

static void check(pp_status status, const char *call)
{
    if (status != PP_OK) {
        fprintf(stderr, "%s: %s: %s\n", call, pp_status_name(status), pp_last_error(NULL));
        exit(1);
    }
}

static void print_line(int level, const char *text, void *user_data)
{
    (void)user_data;
    fprintf(stderr, "%s: %s\n", level == PP_LOG_ERROR ? "error" : level == PP_LOG_WARN ? "warning" : "info", text);
}

static void *load(void *argument)
{
    const unsigned char mark = *(unsigned char *)argument;
    for (int i = 0; i < BATCHES; i++) {
        void *batch;
        check(pp_get(pool, BATCH_BYTES, &batch), "pp_get");
        memset(batch, mark, BATCH_BYTES);
        check(pp_put(pool, batch), "pp_put");
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    unsigned char marks[THREADS];
    char *json;

    check(pp_set_log(print_line, NULL, PP_LOG_INFO), "pp_set_log");
    check(pp_pool_open("max_bytes=256MiB; name=threads", &pool), "pp_pool_open");
    for (int i = 0; i < THREADS; i++) {
        marks[i] = (unsigned char)i;
        if (pthread_create(&threads[i], NULL, load, &marks[i]) != 0)
            return 1;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    check(pp_stats_json(pool, &json), "pp_stats_json");
    printf("%d threads, %d batches\n%s\n", THREADS, THREADS * BATCHES, json);
    pp_string_free(json);
    check(pp_pool_destroy(pool), "pp_pool_destroy");
    return 0;
}
