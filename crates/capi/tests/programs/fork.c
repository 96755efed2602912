/* Calls on the parent's pool return PP_FORKED in a child, which can open its own pool, even if threads of the parent use the
 * pool, wait in it, or search the tables of all pools during the fork. */
#define _POSIX_C_SOURCE 200809L
#include <pinpool.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int in_child(pp_pool *pool, void *held)
{
    pp_pool *own;
    void *ptr;
    char *json;
    int is_pinned;

    if (pp_get(pool, 4096, &ptr) != PP_FORKED || strstr(pp_last_error(NULL), "after the fork") == NULL)
        return 1;
    if (pp_put(pool, held) != PP_FORKED || pp_put_after_stream(pool, held, NULL) != PP_FORKED ||
        pp_put_after_event(pool, held, NULL) != PP_FORKED || pp_is_pinned(pool, held, &is_pinned) != PP_FORKED)
        return 2;
    if (pp_trim(pool, 0) != PP_FORKED || pp_stats_json(pool, &json) != PP_FORKED || pp_pool_destroy(pool) != PP_FORKED)
        return 3;
    if (pp_pool_open("backend=heap", &own) != PP_OK || pp_get(own, 4096, &ptr) != PP_OK)
        return 4;
    memset(ptr, 3, 4096);
    if (pp_put(own, held) != PP_UNKNOWN_POINTER || pp_put(own, ptr) != PP_OK || pp_pool_destroy(own) != PP_OK)
        return 5;
    return 0;
}

static atomic_int is_over;

/* Requests; the limit has room for two at a time. */
static void *use(void *pool)
{
    void *ptr;

    while (!is_over)
        if (pp_get(pool, 3 << 20, &ptr) == PP_OK && pp_put(pool, ptr) != PP_OK)
            return pool;
    return NULL;
}

/* Returns an unknown buffer, which locks the tables of all pools, including a destroyed pool. */
static void *search(void *pool)
{
    while (!is_over)
        if (pp_put(pool, &is_over) != PP_UNKNOWN_POINTER)
            return pool;
    return NULL;
}

int main(void)
{
    pp_pool *pool, *destroyed;
    void *held, *failed = NULL, *result;
    pthread_t threads[5];
    int status, i;

    if (pp_pool_open("backend=heap", &destroyed) != PP_OK)
        return 1;
    if (pp_pool_open("backend=heap; max_bytes=8MiB; wait=200ms", &pool) != PP_OK || pp_get(pool, 1 << 20, &held) != PP_OK)
        return 1;
    memset(held, 1, 1 << 20);
    if (pp_pool_destroy(destroyed) != PP_OK)
        return 1;
    for (i = 0; i < 5; i++)
        if (pthread_create(&threads[i], NULL, i < 4 ? use : search, pool) != 0)
            return 1;
    for (i = 0; i < 20; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            _exit(in_child(pool, held));
        }
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "child %d ended with %d\n", i, status);
            return 2;
        }
    }
    is_over = 1;
    for (i = 0; i < 5; i++) {
        pthread_join(threads[i], &result);
        failed = failed ? failed : result;
    }
    if (failed)
        return 4;
    if (((char *)held)[4095] != 1 || pp_put(pool, held) != PP_OK || pp_pool_destroy(pool) != PP_OK)
        return 3;
    return 0;
}
