/* Each misuse returns its status and text, and valid calls still work afterwards. */
#include <pinpool.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(int line, pp_status found, pp_status wanted, const char *word)
{
    pp_status last;
    const char *text = pp_last_error(&last);
    if (found != wanted || (word != NULL && (last != wanted || strstr(text, word) == NULL))) {
        fprintf(stderr, "line %d: %s, not %s: %s\n", line, pp_status_name(found), pp_status_name(wanted), text);
        exit(1);
    }
}
#define EXPECT(call, wanted, word) expect(__LINE__, (call), (wanted), (word))

int main(void)
{
    pp_pool *pool = NULL, *other = NULL;
    void *ptr = NULL, *again = NULL;
    pp_get_options options = PP_GET_OPTIONS_INIT;
    int local = 0;

    if (strcmp(pp_last_error(NULL), "") != 0 || strcmp(pp_version(), PP_VERSION) != 0)
        return 1;
    EXPECT(pp_pool_open("max_byte=1GiB", &pool), PP_INVALID_SETTING, "PINPOOL_MAX_BYTE:");
    EXPECT(pp_pool_open("zero=ture", &pool), PP_INVALID_SETTING, "PINPOOL_ZERO=ture: neither 0 ");
    EXPECT(pp_pool_open("max_bytes=0", &pool), PP_INVALID_SETTING, "PINPOOL_MAX_BYTES=0: not a limit");
    EXPECT(pp_pool_open("log_every=0", &pool), PP_INVALID_SETTING, "PINPOOL_LOG_EVERY=0: not a whole number");
    EXPECT(pp_pool_open("max_bytes=1GiB; MAX_BYTES=2GiB", &pool), PP_INVALID_SETTING,
           "PINPOOL_MAX_BYTES=2GiB: already set to 1GiB; leave one of the two out");
    EXPECT(pp_pool_open("backend=heap", NULL), PP_INVALID_ARGUMENT, "`pool` is NULL");
    EXPECT(pp_get(NULL, 1, &ptr), PP_INVALID_ARGUMENT, "`pool` is NULL");
    EXPECT(pp_get((pp_pool *)(void *)&local, 1, &ptr), PP_UNKNOWN_POOL, "not a handle");

    EXPECT(pp_pool_open("backend=heap; max_bytes=8MiB; on_full=error", &pool), PP_OK, NULL);
    EXPECT(pp_pool_open("backend=heap; max_bytes=8MiB", &other), PP_OK, NULL);
    EXPECT(pp_get(pool, 100, NULL), PP_INVALID_ARGUMENT, "`ptr` is NULL");
    EXPECT(pp_get(pool, SIZE_MAX, &ptr), PP_INVALID_ARGUMENT, "a buffer holds at most");
    options.timeout_ms = 0;
    EXPECT(pp_get_with(pool, 16 << 20, &options, &ptr), PP_LIMIT, "PINPOOL_MAX_BYTES");
    EXPECT(pp_get_with(pool, 100, &options, &ptr), PP_OK, NULL);
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);
    EXPECT(pp_get(pool, 0, &ptr), PP_OK, NULL);
    if (ptr != NULL)
        return 2;
    EXPECT(pp_put(pool, NULL), PP_OK, NULL);

    EXPECT(pp_get(pool, 100000, &ptr), PP_OK, NULL);
    memset(ptr, 1, 100000);
    EXPECT(pp_put(pool, (char *)ptr + 1), PP_UNKNOWN_POINTER, "inside the buffer");
    EXPECT(pp_put(pool, &local), PP_UNKNOWN_POINTER, "not from this pool, or already returned");
    EXPECT(pp_put(other, ptr), PP_UNKNOWN_POINTER, "another pool's buffer");
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);
    EXPECT(pp_put(pool, ptr), PP_UNKNOWN_POINTER, "not from this pool, or already returned");
    EXPECT(pp_get(pool, 100000, &again), PP_OK, NULL);
    if (again != ptr)
        return 3;

    EXPECT(pp_pool_close(pool), PP_OK, NULL);
    memset(again, 2, 100000);
    EXPECT(pp_get(pool, 1, &ptr), PP_UNKNOWN_POOL, "closed already");
    EXPECT(pp_put(pool, again), PP_OK, NULL);
    EXPECT(pp_put(pool, again), PP_UNKNOWN_POOL, "closed already");
    EXPECT(pp_pool_close(pool), PP_UNKNOWN_POOL, "closed already");
    EXPECT(pp_pool_close(other), PP_OK, NULL);
    return 0;
}
