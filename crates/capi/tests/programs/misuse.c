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

static void expect_null(int line, pp_status found, const char *name)
{
    char text[100];
    snprintf(text, sizeof text, "the argument `%s` is NULL", name);
    expect(line, found, PP_INVALID_ARGUMENT, text);
    if (strcmp(pp_last_error(NULL), text) != 0)
        exit(8);
}
#define EXPECT_NULL(call, name) expect_null(__LINE__, (call), name)

static void count(void *ptr, void *counter)
{
    (void)ptr;
    ++*(int *)counter;
}

/* Adopted memory is returned like a buffer, and released once. */
static void adopt(pp_pool *pool)
{
    char memory[100], *json;
    int released = 0, is_pinned = 0;
    EXPECT(pp_adopt(pool, memory, SIZE_MAX, 1, count, &released), PP_INVALID_ARGUMENT, NULL); /* leaves the address free */
    EXPECT(pp_adopt(pool, memory, 100, 1, count, &released), PP_OK, NULL);
    EXPECT(pp_adopt(pool, memory, 100, 1, count, &released), PP_INVALID_ARGUMENT, "is in use");
    EXPECT(pp_adopt(pool, NULL, 100, 1, count, &released), PP_INVALID_ARGUMENT, "`ptr` is NULL");
    EXPECT(pp_adopt(pool, memory, 0, 1, count, &released), PP_INVALID_ARGUMENT, "`bytes` is 0");
    EXPECT(pp_adopt(pool, memory, 100, 1, NULL, &released), PP_INVALID_ARGUMENT, "`on_release` is NULL");
    EXPECT(pp_stats_json(pool, &json), PP_OK, NULL);
    if (strstr(json, "\"adopted\":1,") == NULL || strstr(json, "\"held_bytes\":0,") == NULL)
        exit(4);
    pp_string_free(json);
    EXPECT(pp_is_pinned(pool, memory, &is_pinned), PP_OK, NULL);
    EXPECT(pp_put(pool, memory), PP_OK, NULL);
    EXPECT(pp_put(pool, memory), PP_UNKNOWN_POINTER, NULL);
    if (is_pinned != 1 || released != 1)
        exit(5);
}

/* Names each argument that is NULL, and does nothing. */
static void null_arguments(pp_pool *pool)
{
    const pp_request_options options = PP_REQUEST_OPTIONS_INIT;
    void *ptr = NULL;
    char *json = NULL;
    int is_pinned = 0;
    EXPECT_NULL(pp_pool_open(NULL, NULL), "pool");
    EXPECT_NULL(pp_get(NULL, 1, &ptr), "pool");
    EXPECT_NULL(pp_get(pool, 1, NULL), "ptr");
    EXPECT_NULL(pp_get_with(pool, 1, &options, NULL), "ptr");
    EXPECT_NULL(pp_get_with(pool, 1, NULL, &ptr), "options");
    EXPECT_NULL(pp_try_get(pool, 1, NULL), "ptr");
    EXPECT_NULL(pp_try_get_with(pool, 1, NULL, &ptr), "options");
    EXPECT_NULL(pp_put_after_stream(NULL, NULL, NULL), "pool");
    EXPECT_NULL(pp_put_after_event(NULL, NULL, NULL), "pool");
    EXPECT_NULL(pp_record_stream(NULL, NULL, NULL), "pool");
    EXPECT_NULL(pp_record_event(NULL, NULL, NULL), "pool");
    EXPECT_NULL(pp_stats_json(pool, NULL), "json");
    EXPECT_NULL(pp_is_pinned(pool, ptr, NULL), "is_pinned");
    EXPECT_NULL(pp_is_pinned(NULL, ptr, &is_pinned), "pool");
    EXPECT_NULL(pp_is_pinned(pool, NULL, &is_pinned), "ptr");
    if (pp_pool_destroy(NULL) != PP_OK || strstr(pp_last_error(NULL), "`ptr`") == NULL)
        exit(10);
    EXPECT_NULL(pp_pool_close(NULL), "pool");
    EXPECT_NULL(pp_put(NULL, NULL), "pool");
    EXPECT_NULL(pp_reserve(NULL, 1), "pool");
    EXPECT_NULL(pp_trim(NULL, 1), "pool");
    EXPECT_NULL(pp_maintain(NULL), "pool");
    pp_string_free(NULL);
    EXPECT(pp_stats_json(pool, &json), PP_OK, NULL);
    if (ptr != NULL || strstr(json, "\"in_use\":0,") == NULL)
        exit(9);
    pp_string_free(json);
}

/* After any other code, even of a later version, pp_put is not safe. */
static void codes_for_put(void)
{
    for (int code = 0; code < 32; code++) {
        const pp_status status = (pp_status)code;
        const int is_safe = status == PP_UNAVAILABLE || status == PP_STREAM_CAPTURING || status == PP_INVALID_HANDLE ||
                            status == PP_DEVICE_FAILED || status == PP_REFUSED_BY_CAPTURE;
        if (pp_may_put_after(status) != is_safe)
            exit(11);
    }
}

int main(void)
{
    pp_pool *pool = NULL, *other = NULL;
    void *ptr = NULL, *again = NULL, *inside;
    char name[100];
    pp_request_options options = PP_REQUEST_OPTIONS_INIT;
    pp_status status;
    int local = 0;

    if (strcmp(pp_last_error(NULL), "") != 0 || strcmp(pp_version(), PP_VERSION) != 0)
        return 1;
    EXPECT(pp_pool_open("max_byte=1GiB", &pool), PP_INVALID_SETTING,
           "unknown setting PINPOOL_MAX_BYTE; did you mean PINPOOL_MAX_BYTES?");
    EXPECT(pp_pool_open("zero=ture", &pool), PP_INVALID_SETTING, "PINPOOL_ZERO=ture: neither 0 ");
    EXPECT(pp_pool_open("max_bytes=0", &pool), PP_INVALID_SETTING, "PINPOOL_MAX_BYTES=0: not a limit");
    EXPECT(pp_pool_open("log_every=0", &pool), PP_INVALID_SETTING, "PINPOOL_LOG_EVERY=0: not a whole number");
    EXPECT(pp_pool_open("max_bytes=1GiB; MAX_BYTES=2GiB", &pool), PP_INVALID_SETTING,
           "PINPOOL_MAX_BYTES=2GiB: already set to 1GiB; leave one of the two out");
    EXPECT(pp_pool_open("backend=heap", NULL), PP_INVALID_ARGUMENT, "`pool` is NULL");
    pool = (pp_pool *)(void *)&local;
    EXPECT(pp_pool_open("name=\xff\xfe", &pool), PP_INVALID_ARGUMENT, "`config` is not UTF-8");
    if (pool != NULL)
        return 7;
    for (int at = 0; at < 5; at++) {
        const uintptr_t values[] = {1, 4096, 0xdeadbeef, UINTPTR_MAX, (uintptr_t)&local};
        pp_pool *no_pool = (pp_pool *)values[at]; /* never dereferenced */
        EXPECT(pp_get(no_pool, 1, &ptr), PP_UNKNOWN_POOL, "not a handle");
        EXPECT(pp_put(no_pool, ptr), PP_UNKNOWN_POOL, "not a handle");
        EXPECT(pp_pool_close(no_pool), PP_UNKNOWN_POOL, "not a handle");
        EXPECT(pp_pool_destroy(no_pool), PP_UNKNOWN_POOL, "not a handle");
    }

    EXPECT(pp_pool_open("backend=heap; max_bytes=8MiB; on_full=error", &pool), PP_OK, NULL);
    EXPECT(pp_pool_open("backend=heap; max_bytes=8MiB", &other), PP_OK, NULL);
    codes_for_put();
    adopt(pool);
    null_arguments(pool);
    EXPECT(pp_get(pool, SIZE_MAX, &ptr), PP_INVALID_ARGUMENT, "a buffer holds at most");
    options.timeout_ms = 0;
    EXPECT(pp_get_with(pool, 16 << 20, &options, &ptr), PP_OVER_LIMIT, "PINPOOL_MAX_BYTES");
    EXPECT(pp_get_with(pool, 100, &options, &ptr), PP_OK, NULL);
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);
    EXPECT(pp_get(pool, 0, &ptr), PP_OK, NULL);
    if (ptr != NULL)
        return 2;
    EXPECT(pp_put(pool, NULL), PP_OK, NULL);
    EXPECT(pp_put_after_stream(pool, NULL, NULL), PP_OK, NULL);
    EXPECT(pp_put_after_event(pool, NULL, NULL), PP_OK, NULL);
    EXPECT(pp_record_stream(pool, NULL, NULL), PP_OK, NULL);
    EXPECT(pp_record_event(pool, NULL, NULL), PP_OK, NULL);
    options.tag = "decode";
    options.alignment = 1 << 16;
    EXPECT(pp_try_get_with(pool, 3 << 20, &options, &ptr), PP_NONE_IDLE, NULL);
    EXPECT(pp_get_with(pool, 3 << 20, &options, &ptr), PP_OK, NULL);
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);
    EXPECT(pp_try_get_with(pool, 3 << 20, &options, &ptr), PP_OK, NULL);
    if ((uintptr_t)ptr % options.alignment != 0)
        return 6;
    options.tag = NULL;
    EXPECT(pp_get_with(pool, 7 << 20, &options, &again), PP_OVER_LIMIT, "decode"); /* without a wait */
    options.timeout_ms = 1;
    EXPECT(pp_get_with(pool, 7 << 20, &options, &again), PP_TIMED_OUT, "decode");
    EXPECT(pp_get_with(pool, 16 << 20, &options, &again), PP_OVER_LIMIT, NULL); /* no wait helps */
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);

    EXPECT(pp_get(pool, 100000, &ptr), PP_OK, NULL);
    memset(ptr, 1, 100000);
    inside = (char *)ptr + 64;
    snprintf(name, sizeof name, "%p: inside the 100000B buffer at %p; pass %p", inside, ptr, ptr);
    EXPECT(pp_put(pool, inside), PP_UNKNOWN_POINTER, name);
    EXPECT(pp_put_after_stream(pool, inside, NULL), PP_UNKNOWN_POINTER, name);
    EXPECT(pp_put_after_event(pool, inside, NULL), PP_UNKNOWN_POINTER, name);
    EXPECT(pp_record_stream(pool, inside, NULL), PP_UNKNOWN_POINTER, name);
    EXPECT(pp_record_event(pool, inside, NULL), PP_UNKNOWN_POINTER, name);
    EXPECT(pp_put(pool, &local), PP_UNKNOWN_POINTER, "no buffer of this pool begins here, or it was already returned");
    EXPECT(pp_put(other, ptr), PP_UNKNOWN_POINTER, "another pool's buffer");
    /* Without a driver, the buffer stays in use and reusable. With a driver, no context is current. */
    status = pp_put_after_stream(pool, ptr, NULL);
    if (status == PP_INVALID_HANDLE) {
        EXPECT(pp_put(pool, ptr), PP_OK, NULL);
        EXPECT(pp_get(pool, 100000, &ptr), PP_OK, NULL);
    } else {
        EXPECT(status, PP_UNAVAILABLE, "the CUDA driver is unavailable: no libcuda.so.1");
        EXPECT(pp_put_after_event(pool, ptr, NULL), PP_UNAVAILABLE, NULL);
        EXPECT(pp_record_event(pool, ptr, NULL), PP_UNAVAILABLE, NULL);
    }
    EXPECT(pp_put_after_event(other, ptr, NULL), PP_UNKNOWN_POINTER, "another pool's buffer");
    EXPECT(pp_put(pool, ptr), PP_OK, NULL);
    EXPECT(pp_put(pool, ptr), PP_UNKNOWN_POINTER, "no buffer of this pool begins here, or it was already returned");
    EXPECT(pp_get(pool, 100000, &again), PP_OK, NULL);
    if (again != ptr)
        return 3;

    EXPECT(pp_pool_destroy(pool), PP_OK, NULL);
    memset(again, 2, 100000);
    EXPECT(pp_get(pool, 1, &ptr), PP_UNKNOWN_POOL, "already destroyed");
    EXPECT(pp_put(pool, again), PP_OK, NULL);
    EXPECT(pp_put(pool, again), PP_UNKNOWN_POOL, "already destroyed");
    EXPECT(pp_pool_destroy(pool), PP_UNKNOWN_POOL, "already destroyed");
    EXPECT(pp_pool_destroy(other), PP_OK, NULL);
    return 0;
}
