// Faults that a sanitizer has to find, for a library that only tests build (tests/sanitizers.py).
#include "library.h"

using namespace fly;

namespace {

struct Racing : Call {
    int64_t sum;
};

void add(Call* call, int) {
    for (int i = 0; i < 1000; i++) ((Racing*)call)->sum++;  // each thread, with nothing between them
}

}  // namespace

// A value after the end of a piece of an arena, which is not the last one.
EXPORT void fly_fault_overflow(int n) {
    Arena arena;
    Span<int32_t> counted, other;
    lay_out(&arena, "counted short", false, [&](Dealer& from) { counted = from.take<int32_t>(n), other = from.take<int32_t>(n); });
    for (int i = 0; i <= n; i++) counted[i] = i;
}

// A value after the end of what Python handed over.
EXPORT void fly_fault_handed(int32_t* values, int n) { values[n] = 1; }

// A value of an arena that was freed with its call.
EXPORT int fly_fault_freed(int n) {
    Span<int32_t> counted;
    {
        Arena arena;
        lay_out(&arena, "freed", true, [&](Dealer& from) { counted = from.take<int32_t>(n); });
    }
    return counted[n - 1];
}

// Two tiles of 16 rows of inputs, of which there are ``rows``.
EXPORT void fly_fault_tile(int rows) {
    Arena weights, sums;
    Span<char> w;
    Span<float> to;
    lay_out(&weights, "weights", true, [&](Dealer& from) { w = from.take<char>(2048); });
    lay_out(&sums, "sums", true, [&](Dealer& from) { to = from.take<float>(32, PANEL); });
    char* a = (char*)malloc(rows * 64L);
    begin_tiles(rows);
    multiply_tiles({W8A8, 1, a, 64, 16 * 64, w, 2048, 0, 0, false, nullptr, 0, to});
    end_tiles();
    free(a);
}

// A product on tiles without a shape.
EXPORT void fly_fault_shape() {
    alignas(64) char memory[2048] = {};
    multiply_tiles({W8A8, 1, memory, 64, 0, memory, 2048, 0, 0, false, nullptr, 0, memory});
}

// A sum beyond its numbers.
EXPORT int fly_fault_undefined(int n) { return n + (INT32_MAX - 1); }

// Work of the pool's threads that two of them write to.
EXPORT int64_t fly_fault_race(int threads) {
    Racing racing = {};
    run(&racing, add, threads, 1000000000);
    return racing.sum;
}

// An arena whose second pass takes more than the first counted, which is an error and no memory.
EXPORT int fly_fault_layout(int n) {
    Arena arena;
    int pass = 0;
    Span<int32_t> counted;
    const int error = lay_out(&arena, "counted short", false, [&](Dealer& from) { counted = from.take<int32_t>(++pass * n); });
    return counted.there() ? OK : error;
}
