// Products with GROUPED matrices (fly.h: Strip), whose groups along the input have a scale and a minimum each. Each variant
// defines ``Dots``, the products of whole numbers within a group. Knows nothing of layers, nor of where matrices come from.
//
// A group's weights are w = s·n + m with numbers n, and its inputs x = t·a with whole numbers a. It adds to a sum Σ w·x
// = s · t · Σ n·a + m · t · Σ a, so the minimum costs one product a group: ``t · Σ a`` is computed once, when the
// inputs are rounded. Σ n·a is a sum of whole numbers, and exact. (The same split as in ggml's dot products of Q4_1 and
// Q8_1.)

// A row of inputs, rounded in groups of 32 to whole numbers from -127 to 127 times the group's step.
struct GroupedRow {
    int8_t* numbers;  // [K padded to 32]
    float *step, *sum, *halves;  // [groups] t; [groups] t · Σ a; [2 · groups] the same for each half of a group

    GroupedRow(int8_t* row, float* steps, int inputs) : numbers(row), step(steps) {
        const int groups = padded(inputs, GROUP) / GROUP;
        sum = step + groups, halves = sum + groups;
    }
};

// Rounds ``count`` inputs, which are padded to 16 with zeros.
template <class Act>
inline void round_to_8_bits(const Act* from, int count, GroupedRow to) {
    for (int i = 0; i < count; i += GROUP) {
        Vec x[GROUP / W], most = zero();
        for (int j = 0; j < GROUP / W; j++) {
            x[j] = i + j * W < padded(count, 16) ? ld(from + i + j * W) : zero();
            most = larger(most, abs_of(x[j]));
        }
        const float peak = largest(most), step = peak / 127.0f;
        const Vec inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
        float half[2] = {0, 0};
        for (int j = 0; j < GROUP / W; j++) {
            const Vec number = nearest(x[j] * inverse);
            st(to.numbers + i + j * W, number);
            half[j * W / 16] += sum(number);
        }
        const int group = i / GROUP;
        to.step[group] = step, to.sum[group] = (half[0] + half[1]) * step;
        to.halves[2 * group] = half[0] * step, to.halves[2 * group + 1] = half[1] * step;
    }
}

// Writes the scales and minima of a superblock's groups as float32 [groups, 16] each. Returns where its numbers begin.
inline const char* unpack_head(const char* at, Format format, int groups, float* scale, float* least) {
    const char* numbers = at + head_bytes(format, groups);
    const bool own = !format.centre;
    for (int lane = 0; lane < STRIP; lane += W) {
        const char* from = at;
        Vec factor[2];
        for (int kind = 0; format.parts && kind < (own ? 2 : 1); kind++, from += 2 * STRIP)
            factor[kind] = ld_half((const uint16_t*)from + lane);
        for (int kind = 0; kind < (own ? 2 : 1); kind++) {
            float* to = kind ? least : scale;
            for (int g = 0; g < groups; g++, from += format.parts ? STRIP : 2 * STRIP)
                st(to + g * STRIP + lane, format.parts ? factor[kind] * ld_int8((const int8_t*)from + lane)
                                                       : ld_half((const uint16_t*)from + lane));
        }
        for (int g = 0; !own && g < groups; g++)
            st(least + g * STRIP + lane, ld(scale + g * STRIP + lane) * set1(-(float)format.centre));
    }
    return numbers;
}

// Products of M rows with a strip: writes its 16 outputs of [M, PANEL]. A group's numbers are unpacked once for all
// rows. Meanwhile it fetches the bytes at ``fetch_from`` (or null), which the thread needs after this strip.
template <int BITS, int EACH, int M>
NOINLINE void multiply_strip(const int8_t* a, long lda, const float* steps, long lds, const Strip& strip, int inputs,
                             const char* fetch_from, float* out) {
    typedef Dots<BITS> D;
    constexpr int VECTORS = STRIP / W, BYTES = EACH * STRIP * BITS / 8, PER = 32 / BITS;  // PER: inputs of 64 bytes
    constexpr int LINES = BYTES / 64;
    const int all = padded(inputs, GROUP) / GROUP;  // groups of the rows' numbers
    const float* sums = steps + (EACH == GROUP ? all : 2 * all);
    alignas(64) float scale[SUPER / EACH * STRIP], least[SUPER / EACH * STRIP];
    Vec acc[M][VECTORS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++) acc[m][v] = zero();
    const char* w = strip.data;
    for (int from = 0; from < inputs; from += SUPER) {
        const int groups = groups_of(strip.format, min_of(inputs - from, SUPER));
        const char* numbers = unpack_head(w, strip.format, groups, scale, least);
        if (fetch_from)
            for (const char* line = w; line < numbers; line += 64) fetch_close(fetch_from + (line - strip.data));
        w = numbers;
        for (int g = 0; g < groups; g++, w += BYTES) {
            const int at = from + g * EACH;
            if (fetch_from)
                UNROLL for (int i = 0; i < LINES; i++) fetch_close(fetch_from + (w - strip.data) + 64 * i);
            for (int v = 0; v < VECTORS; v++) {
                typename D::Sums dots[M];
                UNROLL for (int m = 0; m < M; m++) dots[m] = typename D::Sums{};
                UNROLL for (int i = 0; i < LINES; i++) {
                    const auto b = D::numbers(w + 64 * i + v * (64 / VECTORS));
                    UNROLL for (int m = 0; m < M; m++) D::add(dots[m], a + m * lda + at + PER * i, b);
                }
                const Vec s = ld(scale + g * STRIP + v * W), l = ld(least + g * STRIP + v * W);
                UNROLL for (int m = 0; m < M; m++) {
                    acc[m][v] = fma(set1(sums[m * lds + at / EACH]), l, acc[m][v]);
                    acc[m][v] = fma(D::total(dots[m]) * set1(steps[m * lds + at / GROUP]), s, acc[m][v]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++) st(out + m * PANEL + v * W, acc[m][v]);
}

// The same for any number of rows up to M.
template <int M, class... Rest>
inline void multiply_rows(int rows, const int8_t* a, long lda, const float* steps, long lds, const Strip& strip, Rest... rest) {
    if constexpr (M > 1)
        if (rows < M) return multiply_rows<M - 1>(rows, a, lda, steps, lds, strip, rest...);
    const Format format = strip.format;
    if (format.bits == 4) return multiply_strip<4, 32, M>(a, lda, steps, lds, strip, rest...);
    if (format.group == 32) return multiply_strip<8, 32, M>(a, lda, steps, lds, strip, rest...);
    return multiply_strip<8, 16, M>(a, lda, steps, lds, strip, rest...);
}

// Computes x·Wᵀ for rows of rounded inputs and the panels of ``range``, one block of rows after another. ``finish(row, panel,
// sums)`` gets 32 sums at a time.
template <class Wt, class Finish>
inline void product_of_groups(const Inputs<Wt>& x, const Matrix& matrix, Range range, Place then, Finish finish) {
    alignas(64) float sums[Wt::MAX_BLOCK.rows * PANEL];
    const int blocks = blocks_of(Wt::MAX_BLOCK, x.rows);
    const Strip* strips = matrix.strips;
    if (range.from == range.to) return;
    const char* end = strips[2 * range.to - 1].data + matrix.panel_bytes / 2;  // about
    for (int p = range.from; p < range.to; p++)
        for (int block = 0; block < blocks; block++) {
            const Range slice = part(x.rows, block, blocks);
            for (int half = 0; half < 2; half++) {
                // Only the first block fetches ahead: the blocks after it find the strip in the caches.
                const Strip& strip = strips[2 * p + half];
                const char* ahead_at = strip.data + AHEAD;
                const char* fetch_from = block ? nullptr : ahead_at < end ? ahead_at : then.at + (ahead_at - end);
                multiply_rows<Wt::MAX_BLOCK.rows>(slice.to - slice.from, (const int8_t*)x.a + slice.from * x.lda, x.lda,
                                              x.steps + slice.from * x.lds, x.lds, strip, matrix.k, fetch_from,
                                              sums + half * STRIP);
            }
            for (int row = 0; row < slice.to - slice.from; row++) {
                float* mine = sums + row * PANEL;
                if (matrix.bias)
                    for (int i = 0; i < PANEL; i += W) st(mine + i, ld(mine + i) + ld(matrix.bias + p * PANEL + i));
                finish(slice.from + row, p, mine);
            }
        }
}

// Row ``row`` of the matrix that the strips hold, as float32. Each weight is rounded once.
inline void embed_groups(const Matrix& matrix, int64_t row, int width, float* x) {
    const Strip& strip = matrix.strips[row / STRIP];
    const Format format = strip.format;
    const int lane = (int)(row % STRIP);
    alignas(64) float scale[SUPER / 16 * STRIP], least[SUPER / 16 * STRIP];
    const char* at = strip.data;
    for (int from = 0; from < width; from += SUPER) {
        const int groups = groups_of(format, min_of(width - from, SUPER));
        const uint8_t* numbers = (const uint8_t*)unpack_head(at, format, groups, scale, least);
        for (int i = 0; i < min_of(width - from, SUPER); i++) {
            const int step = i / 4, place = (i / format.group) * STRIP + lane;
            const uint8_t byte = numbers[(format.bits == 4 ? step / 2 : step) * 64 + lane * 4 + i % 4];
            const int number = format.bits == 8 ? byte : step % 2 ? byte >> 4 : byte & 15;
            x[from + i] = scale[place] * (float)number + least[place];
        }
        at = (const char*)numbers + groups * (long)format.group * STRIP * format.bits / 8;
    }
}
