/* Run under AddressSanitizer: makes valid accesses, and one invalid access that the first argument selects. */
#define _GNU_SOURCE
#include <pinpool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        if ((call) != PP_OK) {                                                                                         \
            printf("%s: %s\n", #call, pp_last_error(NULL));                                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void freed(void *memory, void *count)
{
    free(memory);
    ++*(int *)count;
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "";
    pp_pool *pool;
    void *data;
    volatile char *bytes;
    OK(pp_pool_open(strcmp(mode, "zeroed") == 0 ? "backend=heap; zero=1" : "backend=heap", &pool));
    for (size_t length = 1; length < 3 << 20; length = length * 3 + 1) {
        OK(pp_get(pool, length, &data));
        memset(data, 1, length);
        OK(pp_put(pool, data));
    }
    OK(pp_get(pool, 5000, &data));
    bytes = data;
    bytes[4999] = 1;
    if (strcmp(mode, "past the length") == 0)
        bytes[5000] = 1;
    OK(pp_put(pool, data));
    if (strcmp(mode, "after put") == 0)
        bytes[0] = 1;
    OK(pp_get(pool, 4990, &data));
    bytes = data;
    if (strcmp(mode, "past a shorter length") == 0)
        bytes[4999] = 1;
    OK(pp_put(pool, data));
    if (strcmp(mode, "adopted") == 0) {
        int released = 0;
        char *own = malloc(100);
        memset(own, 7, 100);
        OK(pp_adopt(pool, own, 100, 0, freed, &released));
        if (pp_adopt(pool, own, 100, 0, freed, &released) != PP_INVALID_ARGUMENT || released != 0)
            return 2;
        own[99] = 8;
        OK(pp_put(pool, own));
        if (released != 1 || pp_put(pool, own) != PP_UNKNOWN_POINTER)
            return 3;
    }
    if (strcmp(mode, "trimmed") == 0) {
        /* Memory that was released to the system may have a new user, even at the same address. */
        size_t length = (size_t)4 << 20;
        char *blocks[16], *same;
        OK(pp_trim(pool, 0));
        same = mmap(data, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (same == MAP_FAILED)
            return 4;
        memset(same, 1, 4096);
        printf("%s address\n", same == data ? "the same" : "another");
        for (int at = 0; at < 16; ++at)
            memset(blocks[at] = malloc(length), 1, length);
        for (int at = 0; at < 16; ++at)
            free(blocks[at]);
    }
    OK(pp_pool_destroy(pool));
    puts("right");
    return 0;
}
