// Buffers that return themselves, and a std::pmr::vector in pinned memory.
//
//     c++ -std=c++17 containers.cpp $(pkg-config --cflags --libs pinpool) -o containers
#include <pinpool.hpp>

#include <cstring>
#include <iostream>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

int main()
{
    pinpool::buffer outlives;
    {
        pinpool::pool pool("max_bytes=64MiB; on_full=error; wait=0s; name=containers");

        pinpool::buffer batch = pool.get(1 << 20);
        std::memset(batch.data(), 7, batch.size());
        void *address = batch.data();
        batch.put();
        batch.put(); // empty: nothing to put
        std::optional<pinpool::buffer> again = pool.try_get(1 << 20);
        if (!again || again->data() != address)
            return 1;
        pinpool::buffer moved = std::move(*again);
        if (*again || !moved)
            return 2;

        pinpool::pinned_memory_resource pinned(pool);
        std::pmr::vector<long> values(&pinned);
        for (long i = 0; i < 1000; i++)
            values.push_back(i);
        std::cout << "sum " << std::accumulate(values.begin(), values.end(), 0L) << '\n';
        std::pmr::vector<long> copy(values, &pinned);
        if (copy != values || !pinned.is_equal(pinpool::pinned_memory_resource(pool)))
            return 3;
        // Without a driver, the stream is refused and the memory is returned at once.
        pinpool::pinned_memory_resource on_stream(pool, nullptr);
        if (std::pmr::vector<long>(values, &on_stream) != values || pinned.is_equal(on_stream))
            return 10;

        try {
            (void)pool.get(std::size_t{1} << 30);
            return 4;
        } catch (const pinpool::error &error) {
            if (error.status() != PP_LIMIT)
                return 5;
            std::cout << error.what() << '\n';
        }
        try {
            std::pmr::vector<char> large(std::size_t{1} << 30, &pinned);
            return 6;
        } catch (const std::bad_alloc &) {
        }
        try {
            pinpool::pool bad("max_bytes=lots");
            return 7;
        } catch (const pinpool::error &error) {
            if (error.status() != PP_INVALID_SETTING)
                return 8;
        }
        // Without a driver or a context there is no such stream, and the object keeps its buffer.
        pinpool::buffer kept = pool.get(4096);
        address = kept.data();
        try {
            kept.put_after_stream(nullptr);
        } catch (const pinpool::error &error) {
            if (kept.data() != address || kept.size() != 4096)
                return 9;
            kept.put();
            std::cout << error.what() << '\n';
        }

        {
            pinpool::buffer recorded = pool.get(8 << 20);
            recorded.set_stream(nullptr); // put by the destructor, also if there is no such stream
        }

        std::cout << pool.stats_json() << '\n';
        outlives = pool.get(4096);
    }
    std::memset(outlives.data(), 1, outlives.size()); // the pool ends after its last buffer
    return 0;
}
