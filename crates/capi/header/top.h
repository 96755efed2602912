/* Generated from crates/capi/src and crates/capi/header: WRITE_HEADER=1 cargo test -p pinpool-capi header */

/*
 * pinpool: a pool of pinned host memory for CUDA transfers.
 *
 *     pp_pool *pool;
 *     void *batch;
 *     if (pp_pool_open("max_bytes=4GiB; name=loader", &pool) != PP_OK ||
 *         pp_get(pool, 1 << 20, &batch) != PP_OK) {
 *         fprintf(stderr, "%s\n", pp_last_error(NULL));
 *         exit(1);
 *     }
 *     fread(batch, 1, 1 << 20, file);
 *     cudaMemcpyAsync(device, batch, 1 << 20, cudaMemcpyHostToDevice, stream);
 *     // The buffer is reused once that work has completed.
 *     pp_status status = pp_put_after_stream(pool, batch, stream);
 *     if (status != PP_OK)
 *         fprintf(stderr, "%s\n", pp_last_error(NULL));
 *     if (status != PP_OK && status != PP_INTERNAL)
 *         pp_put(pool, batch);   // reusable now without a driver, else never
 *     pp_pool_destroy(pool);
 *
 * Link with -lpinpool or `pkg-config --cflags --libs pinpool`. C99 and C++11; pinpool.hpp has classes for C++17. The CUDA driver
 * is loaded at run time: no toolkit is needed to build, and without a driver the memory is resident (mlock) or pageable,
 * unless the setting backend=gpu makes that an error.
 *
 * Every function may be called from any thread, concurrently, and from log callbacks, but not from signal handlers or CUDA host
 * functions (cudaLaunchHostFunc). Release callbacks (pp_release_fn) may call those that do not wait for the pool. None throws,
 * leaves an error in the CUDA runtime or changes the current context.
 *
 * Lengths are in bytes: of buffers in size_t, limits and totals of a pool in uint64_t. Results stored through pointer arguments
 * belong to the caller. Returned `const char *` strings are owned by the library; do not free them.
 *
 * A forked child does not inherit pools: each call on a pool of its parent returns PP_FORKED and does nothing. The child opens
 * its own pools. Buffers of `vmm` and `register` are not mapped in the child: reading one raises SIGSEGV.
 *
 * Within one major version, including 0, no function is removed and no number changes. The shared library of version 0 is
 * libpinpool.so.0.
 */
