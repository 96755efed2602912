/*
 * Measures how many nanoseconds pp_get and pp_put of an idle buffer take, on 1, 2 and 4 threads:
 *
 *     cc -std=c99 -O2 cost.c $(pkg-config --cflags --libs pinpool) -pthread -o cost
 *
 * An argument replaces the number of pairs. `pinpool-bench hit` measures the same through the Rust library.
 */
#define _POSIX_C_SOURCE 200809L
#include <pinpool.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 5, BYTES = 64 * 1024 };

static pp_pool *pool;
static int pairs_per_thread = 200000;
static pthread_barrier_t start;

static void check(pp_status status)
{
    if (status != PP_OK) {
        fprintf(stderr, "%s\n", pp_last_error(NULL));
        exit(1);
    }
}

static void pairs(int count)
{
    void *ptr;
    for (int i = 0; i < count; i++) {
        check(pp_get(pool, BYTES, &ptr));
        check(pp_put(pool, ptr));
    }
}

/* Stores the nanoseconds for each pair. */
static void *measure(void *result)
{
    struct timespec begun, ended;
    pairs(1000);
    pthread_barrier_wait(&start);
    clock_gettime(CLOCK_MONOTONIC, &begun);
    pairs(pairs_per_thread);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    *(double *)result =
        ((double)(ended.tv_sec - begun.tv_sec) * 1e9 + (double)(ended.tv_nsec - begun.tv_nsec)) / pairs_per_thread;
    return NULL;
}

/* The slowest thread of a round. */
static double round_of(int count)
{
    pthread_t threads[4];
    double results[4], slowest = 0;
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, measure, &results[i]) != 0)
            exit(1);
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        slowest = results[i] > slowest ? results[i] : slowest;
    }
    pthread_barrier_destroy(&start);
    return slowest;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        pairs_per_thread = atoi(argv[1]);
    check(pp_pool_open("backend=heap", &pool));
    for (int threads = 1; threads <= 4; threads *= 2) {
        double fastest = round_of(threads);
        for (int i = 1; i < ROUNDS; i++) {
            const double round = round_of(threads);
            fastest = round < fastest ? round : fastest;
        }
        printf("%d threads: %.1f ns for pp_get and pp_put\n", threads, fastest);
    }
    check(pp_pool_destroy(pool));
    return 0;
}
