// Products in 8 bits of 5 to 32 rows that lie side by side, in one pass over the weights: for processors whose cores load as
// fast as they multiply, and so need no inputs in registers (fly.h: intel). Weights in a register, plus 128, are multiplied
// with one row's inputs from memory. The type of weights defines ``lay_beside`` and ``multiply_half``.

// Up to 16 rows of a block lie together: step after step, four signed inputs of each row. So one register addresses all of
// them. A block has 64 bytes for each step of the padded matrix.
struct Beside {
    int8_t* a;        // null: the rows lie one after another
    int32_t* excess;  // [rows] 128 · the sum of a row's inputs: what the 128 adds to each of its sums
};
constexpr int BESIDE = 16, BLOCKS_BESIDE = 2, STEP_BYTES = 4 * PANEL;
// Weights are fetched so many bytes ahead: for few rows, which wait for memory, further and to the second level of caches.
constexpr int FEW_BESIDE = 8, FAR = 8192, NEAR = 4096;

template <class Wt>
constexpr bool MAY_LIE_BESIDE = Wt::TYPE == W8A8 && W == 16;

// Whether rows are laid side by side. Up to FEW keep up with memory anyway; beyond two blocks arithmetic is the limit, which
// stays the same.
inline bool lies_beside(const Call* call, int rows) {
    constexpr int FEW = 4;
    return intel && !call->model->variant->tiles && rows > FEW && rows <= BESIDE * BLOCKS_BESIDE;
}

template <class Wt, int M = BESIDE>
inline void multiply_some(int rows, const int8_t* a, const char* w, int steps, const char* fetched, int each, int32_t* sums) {
    if constexpr (M > 5)
        if (rows < M) return multiply_some<Wt, M - 1>(rows, a, w, steps, fetched, each, sums);
    Wt::template multiply_half<M>(a, w, steps, fetched, each, sums);
}

// Writes the sums [rows, 32] of rows with a panel. ``offset`` is the matrix's: the sums get it, as those of other products do.
// Some steps are multiplied with all rows, first for 16 outputs and then for the other 16. Meanwhile the bytes of the steps
// after them are fetched, in order; after the last ones those at ``next``.
template <class Wt>
inline void product_beside(const Beside& x, int rows, const char* w, long panel, const int32_t* offset, const char* next, int32_t* sums) {
    const int all = (int)(panel / STEP_BYTES), blocks = (rows + BESIDE - 1) / BESIDE, each = STEP_BYTES / 2 / blocks;
    const int most = (rows <= FEW_BESIDE ? FAR : NEAR) / STEP_BYTES;
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < PANEL; i += W)
            st((float*)sums + row * PANEL + i, (Vec)((Ints)ld((const float*)offset + i) - x.excess[row]));
    for (int k = 0, steps; k < all; k += steps) {
        steps = min_of(most, all - k);
        const char *mine = w + k * (long)STEP_BYTES, *fetched = k + steps < all ? mine + steps * STEP_BYTES : next;
        for (int block = 0; block < blocks; block++) {
            const Range slice = part(rows, block, blocks);
            for (int half = 0; half < 2; half++, fetched += steps * each)
                multiply_some<Wt>(slice.to - slice.from, x.a + (block * (long)all + k) * (4 * BESIDE), mine + half * (STEP_BYTES / 2),
                                  steps, fetched, each, sums + slice.from * PANEL + half * STRIP);
        }
    }
}
