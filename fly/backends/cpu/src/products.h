// Products of activations with packed matrices, divided among the threads of a call, and the barrier at which these
// meet. Knows nothing of layers: the caller decides what happens with the sums.

constexpr long LONG_BYTES = 1 << 20;     // from so many bytes on, a matrix does not stay in the caches, and threads take turns
constexpr int TURNS = 12;         // turns for each thread, about
constexpr int AHEAD = 8192;        // how many bytes ahead weights are fetched, over all panels that are multiplied at once
constexpr int64_t STALL = 500000;  // nanoseconds: a longer wait at a barrier means that some thread lost its processor

// The barrier: a thread goes on when all threads have come, and then sees everything that they wrote. ``counts``: a
// long wait is noted (threads.cpp: run). The turns of the next product begin again at 0.
inline void wait(Call* call, bool counts = true) {
    if (call->threads == 1) return void(call->taken = 0);
    Barrier* barrier = &call->barrier;
    int32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == call->threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&call->taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; spins < 1000; spins++) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
        fly::pause();
    }
    // The thread that we wait for may have lost its processor, or need this one.
    const int64_t since = nanoseconds();
    while (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) == phase) sched_yield();
    const int64_t waited = nanoseconds() - since;
    if (counts && waited > STALL) __atomic_add_fetch(&call->stalled, waited, __ATOMIC_RELAXED);
}

struct Range {
    int from, to;
};

inline Range part(int count, int thread, int threads) {
    return {(int)((long)count * thread / threads), (int)((long)count * (thread + 1) / threads)};
}

template <class Wt, int M = Wt::MAX_BLOCK.rows, Asked ASKED>
inline void run(int rows, int panels, const typename Wt::In* a, long lda, const char* w, long panel, int steps,
                Ahead<ASKED> ahead, typename Wt::Sum* out) {
    if (rows == M) {
        if constexpr (Wt::MAX_BLOCK.panels(M) >= 4)
            if (panels == 4) return multiply<Wt, M, 4>(a, lda, w, panel, steps, ahead, out);
        if constexpr (Wt::MAX_BLOCK.panels(M) >= 2)
            if (panels == 2) return multiply<Wt, M, 2>(a, lda, w, panel, steps, ahead, out);
        return multiply<Wt, M, 1>(a, lda, w, panel, steps, ahead, out);
    }
    constexpr bool SEVERAL = ASKED == Asked::HALF || ASKED == Asked::NONE;  // blocks, of about the same size
    if constexpr (M > (SEVERAL ? (Wt::MAX_BLOCK.rows + 1) / 2 : 1))
        return run<Wt, M - 1>(rows, panels, a, lda, w, panel, steps, ahead, out);
    __builtin_unreachable();
}

#include "beside.h"

// Rows of activations as products take them. ``steps``: for W8A8, the value of a step in each row; for GROUPED, see
// GroupedRow.
template <class Wt>
struct Inputs {
    typename Wt::In* a;
    long lda;
    int rows;
    float* steps;
    long lds;
    Beside beside = {nullptr, nullptr};
};

// Rows are multiplied in blocks of about the same size, and each block with some panels at once.
inline int blocks_of(Room room, int rows) { return (rows + room.rows - 1) / room.rows; }
inline int panels_at_once(Room room, int rows) {
    return room.panels((rows + blocks_of(room, rows) - 1) / blocks_of(room, rows));
}

template <class Wt>
constexpr bool WHOLE = sizeof(typename Wt::In) == 1;

#include "groups.h"

// Products on tiles take two tiles of rows at once, or one with two panels.
constexpr int TILE = 16;
constexpr Room TILES = {2 * TILE, 0, TILE};
constexpr Room ALL_BESIDE = {BESIDE * BLOCKS_BESIDE, 0, 0};  // of rows side by side: blocks within a panel are beside.h's

// Whether a product goes by tiles. In 8 bits, vectors give the same sums, and keep up with memory for up to FEW rows
// (measured by vectors on a processor with tiles: 4 tokens take 1.08 times as long as one, 8 take 1.51 times). In
// bfloat16 tiles add in another order, so all products take them, whatever the number of rows.
template <class Wt>
inline bool by_tiles(const Call* call, int rows) {
    constexpr int FEW = 4;
    constexpr bool WHOLE8 = Wt::TYPE == W8A8, BFLOATS = Wt::TYPE == BFLOAT16 && sizeof(typename Wt::In) == 2;
    if constexpr ((WHOLE8 || BFLOATS) && Wt::MAX_BLOCK.rows * 4 >= TILES.rows)  // room for their sums
        return call->model->variant->tiles && (BFLOATS || rows > FEW);
    return false;
}

// Computes x·Wᵀ for rows of activations and the panels of ``range``. ``finish(row, panel, sums)`` gets 32 sums at a time.
// ``then`` are the weights that the thread will probably need next.
template <class Wt, class Finish>
inline void product_of(const Call* call, const Inputs<Wt>& x, const Matrix& matrix, Range range, Place then, Finish finish) {
    alignas(64) typename Wt::Sum sums[Wt::MAX_BLOCK.rows * PANEL * 4];
    const bool tiles = by_tiles<Wt>(call, x.rows);
    const bool beside = x.beside.a;
    const Room room = beside ? ALL_BESIDE : tiles ? TILES : Wt::MAX_BLOCK;
    const int blocks = blocks_of(room, x.rows), step = layout_of(Wt::TYPE).step, steps = (matrix.k + step - 1) / step;
    const long bytes = matrix.panel_bytes, row_bytes = x.lda * sizeof(typename Wt::In);
    if (tiles) begin_tiles(min_of(x.rows, TILE));
    for (int p = range.from, panels; p < range.to; p += panels) {
        panels = panels_at_once(room, x.rows);
        while (panels > range.to - p) panels /= 2;
        const char* w = matrix.data + p * bytes;
        const Place next = p + panels < range.to ? Place{w + panels * bytes, bytes} : then;
        const long ahead_bytes = AHEAD / panels < bytes ? AHEAD / panels : bytes;
        for (int block = 0; block < blocks; block++) {
            // On tiles all blocks but the last are full. If there is more than one tile, each has 16 rows, so the last one may
            // begin (``first``) among rows that are done.
            const int from = block * room.rows;
            const Range slice = tiles ? Range{from, min_of(from + room.rows, x.rows)} : part(x.rows, block, blocks);
            const int count = slice.to - slice.from, first = tiles ? min_of(from, max_of(x.rows - TILE, 0)) : slice.from;
            const auto multiply = [&](auto ahead) {
                if (tiles)
                    return multiply_tiles({Wt::TYPE, panels, (const char*)(x.a + first * x.lda), row_bytes,
                                           max_of(count - TILE, 0) * row_bytes, w, bytes, ahead.from,
                                           ahead.share(TILE * step * PANEL * (int)sizeof(typename Wt::Weight)),
                                           ahead.CLOSE, ahead.then.at, ahead.then.panel, sums});
                run<Wt>(count, panels, x.a + slice.from * x.lda, x.lda, w, bytes, steps, ahead, sums);
            };
            // The next panels are fetched meanwhile, to keep memory busy: by the only block, or half each by the last
            // two.
            if (beside) {
                if constexpr (MAY_LIE_BESIDE<Wt>)
                    product_beside<Wt>(x.beside, count, w, bytes, matrix.offset + p * PANEL, next.at, sums);
            } else if (block < blocks - 2)
                multiply(Ahead<Asked::NONE>{});
            else if (blocks > 1)
                multiply(Ahead<Asked::HALF>{block == blocks - 1 ? bytes + bytes / 2 : bytes, next});
            else
                multiply(Ahead<Asked::ALL>{ahead_bytes, next});
            for (int row = 0; row < count; row++)
                for (int j = 0; j < panels; j++) {
                    float* mine = (float*)(sums + ((slice.from - first + row) * panels + j) * PANEL);
                    const int at = (p + j) * PANEL;
                    if constexpr (WHOLE<Wt>) {
                        const Vec unit = set1(x.steps[slice.from + row]);
                        for (int i = 0; i < PANEL; i += W)
                            st(mine + i, sums_to_floats(mine + i, matrix.offset + at + i) * unit * ld(matrix.scale + at + i));
                    }
                    if (matrix.bias)
                        for (int i = 0; i < PANEL; i += W) st(mine + i, ld(mine + i) + ld(matrix.bias + at + i));
                    finish(slice.from + row, p + j, mine);
                }
        }
    }
    if (tiles) end_tiles();
}

// How many panels a thread takes in one turn of a long product. Turns let other threads go on if one loses its
// processor. 0: the product is short, and each thread takes its whole part at once.
inline int panels_a_turn(const Call* call, const Matrix& matrix, Room room, int rows) {
    const long work = matrix.panel_bytes * matrix.panels * (rows < 4 ? 1 : rows / 4);
    if (call->threads == 1 || work < LONG_BYTES) return 0;
    const int least = panels_at_once(room, rows), share = matrix.panels / (call->threads * TURNS);
    return share >= least ? share / least * least : share > 0 ? share : 1;
}

// Multiplies all panels on all threads. Each thread takes its part, or turn after turn. There must be a barrier between
// two products. ``next`` is the matrix that will probably be multiplied after this one.
template <class Wt, class Finish>
inline void product(Call* call, int thread, const Inputs<Wt>& x, const Matrix& matrix, const Matrix& next, Finish finish) {
    const Room room = x.beside.a ? ALL_BESIDE : by_tiles<Wt>(call, x.rows) ? TILES : Wt::MAX_BLOCK;
    const int size = panels_a_turn(call, matrix, room, x.rows), after = panels_a_turn(call, next, room, x.rows);
    const int first = after ? after * thread : part(next.panels, thread, call->threads).from;
    const Place then = {next.data + first * next.panel_bytes, next.panel_bytes};
    const auto multiply = [&](Range range, Place after_it) {
        if constexpr (Wt::TYPE == GROUPED)
            product_of_groups(x, matrix, range, after_it, finish);
        else
            product_of(call, x, matrix, range, after_it, finish);
    };
    if (!size) return multiply(part(matrix.panels, thread, call->threads), then);
    for (int at; (at = __atomic_fetch_add(&call->taken, size, __ATOMIC_RELAXED)) < matrix.panels;) {
        const int upcoming = at + size * call->threads;  // if all threads are equally fast
        multiply({at, min_of(at + size, matrix.panels)},
                 upcoming < matrix.panels ? Place{matrix.data + upcoming * matrix.panel_bytes, matrix.panel_bytes} : then);
    }
}

