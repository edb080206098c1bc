// Rounding of weights to blocks of 8 and of 4 bits, in the layout of GGUF files (blocks.cpp packs them into strips).
//
// ``fly_round`` is called for some rows of a matrix while a model is packed (fly/backends/cpu/blocks.py); several
// threads may round different rows at once. It checks all sizes first. Nothing interrupts it. The same weights give the
// same blocks on every processor, because this source is compiled without a variant's flags. Knows nothing of models.
#include "library.h"

using namespace fly;

namespace {

typedef float Four __attribute__((vector_size(16)));
constexpr int FOURS = GROUP / 4, GROUPS = SUPER / GROUP;
constexpr int Q8_0 = 8, Q4_K = 12;  // numbers of the file format
constexpr int BLOCK_OF_8 = 2 + GROUP, BLOCK_OF_4 = 4 + 12 + SUPER / 2;

// A group's weights; zeros after the last input of a row.
struct Group {
    Four w[FOURS];
};

// How many steps of a line are tried between the smallest and the largest weight of a group (tests/test_blocks.py has them too).
constexpr float STEPS[] = {14.2f, 14.6f, 15.0f, 15.4f};

ALWAYS_INLINE Four all(float x) { return Four{x, x, x, x}; }
ALWAYS_INLINE Four larger(Four a, Four b) { return a > b ? a : b; }
ALWAYS_INLINE Four smaller(Four a, Four b) { return a < b ? a : b; }
ALWAYS_INLINE float sum(Four x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// The larger of two numbers, NaN if one is.
ALWAYS_INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }

// To the nearest whole number, ties to even, for sizes below 2^22: float32 has no digits after the point from 2^23 on.
ALWAYS_INLINE Four nearest(Four x) { return (x + all(12582912.0f)) - all(12582912.0f); }

// A float32 of at least 0 as float16, to nearest, ties to even.
uint16_t half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0x7fffffff;  // of -0 and of NaN
    if (bits >= 0x7f800000) return bits > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN, infinity
    if (bits >= 0x477ff000) return 0x7c00;                               // rounds beyond the largest float16
    if (bits < 0x38800000) {                                             // below 2^-14: a multiple of 2^-24
        x += 0.5f;
        memcpy(&bits, &x, 4);
        return (uint16_t)(bits - 0x3f000000);
    }
    return (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

void put_half(uint8_t* to, float x, float* stands_for) {
    const uint16_t half = half_of(x);
    memcpy(to, &half, 2);
    *stands_for = from_half(half);
}

// Reads up to 32 weights.
Group read(const char* from, int type, int count) {
    alignas(16) float plain[GROUP] = {};
    for (int i = 0; i < count && type == FLOAT32; i++) memcpy(plain + i, from + 4L * i, 4);
    for (int i = 0; i < count && type == BFLOAT16; i++) {
        uint16_t upper;
        memcpy(&upper, from + 2L * i, 2);
        const uint32_t bits = (uint32_t)upper << 16;
        memcpy(plain + i, &bits, 4);
    }
    Group group;
    memcpy(group.w, plain, sizeof(plain));
    return group;
}

// Each weight is the nearest multiple, up to 127, of the group's scale, which is its largest absolute value divided by 127.
void round_to_8(const Group& group, uint8_t* to) {
    Four most = {}, poison = {};
    UNROLL for (const Four& w : group.w) most = larger(most, larger(w, -w)), poison += w * 0;
    float peak = sum(poison), scale;  // NaN if a weight is NaN or infinite
    for (int i = 0; i < 4; i++) peak = larger(peak, most[i]);
    put_half(to, peak / 127, &scale);
    const Four inverse = all(scale > 0 ? 1 / scale : 0), end = all(127);
    for (int i = 0; i < FOURS; i++) {
        const Four number = smaller(larger(nearest(group.w[i] * inverse), -end), end);
        for (int j = 0; j < 4; j++) to[2 + 4 * i + j] = (uint8_t)(int8_t)number[j];
    }
}

// A group's weights are about scale · number + least, with numbers from 0 to 15. The format has no ``least`` above 0.
struct Line {
    float scale, least;
};

// Finds the line with the least squared error. For given numbers a linear regression of the weights on them gives it in
// closed form; the numbers are tried for several steps between the smallest and the largest weight.
Line line_of(const Group& group) {
    Four low = {}, high = group.w[0], total = {};
    UNROLL for (const Four& w : group.w) low = smaller(w, low), high = larger(w, high), total += w;
    const float least = smaller(smaller(all(low[0]), all(low[1])), smaller(all(low[2]), all(low[3])))[0];
    const float most = larger(larger(all(high[0]), all(high[1])), larger(all(high[2]), all(high[3])))[0];
    const float centre = sum(total) / GROUP, span = most - least;
    Line best = {0, least};
    float best_gain = -__builtin_inff();
    if (!(span > 0)) return {0 * centre, least};  // all the same; or NaN
    for (const float steps : STEPS) {
        const Four inverse = all(steps / span), end = all(15);
        Four numbers = {}, squares = {}, products = {};
        UNROLL for (const Four& w : group.w) {
            const Four number = smaller(nearest((w - all(least)) * inverse), end);
            numbers += number, squares += number * number, products += number * (w - all(centre));
        }
        // The error falls by scale · Σ number · (weight - centre). If the line's least value would be above 0, the line goes
        // through 0 instead.
        const float mean = sum(numbers) / GROUP, square = sum(squares), product = sum(products);
        const float spread = square - GROUP * mean * mean;
        Line line = {0, centre};  // where all weights have the same number
        if (spread > 0) line.scale = product / spread, line.least = centre - line.scale * mean;
        float gain = line.scale * product;
        if (line.least > 0) {
            const float whole = product + GROUP * mean * centre;  // Σ number · weight
            line = {whole / square, 0};
            gain = line.scale * whole - GROUP * centre * centre;
        }
        if (gain > best_gain || gain != gain) best = line, best_gain = gain;
    }
    return best;
}

// Finds each group's line. Rounds its scale and its minimum to multiples (from 0 to 63) of the superblock's two factors.
// Gives each weight the number, from 0 to 15, at which this rounded line comes nearest to it.
void round_to_4(const Group* groups, uint8_t* to) {
    float line[2][GROUPS], peak[2] = {0, 0}, factor[2];
    for (int g = 0; g < GROUPS; g++) {
        const Line own = line_of(groups[g]);
        line[0][g] = own.scale, line[1][g] = -own.least;
        for (int kind = 0; kind < 2; kind++) peak[kind] = larger(line[kind][g], peak[kind]);
    }
    uint8_t part[2][GROUPS], *six = to + 4, *lower = to + 16;
    for (int kind = 0; kind < 2; kind++) {
        put_half(to + 2 * kind, peak[kind] / 63, &factor[kind]);
        for (int g = 0; g < GROUPS; g++) {
            const float number = factor[kind] > 0 ? nearest(all(line[kind][g] / factor[kind]))[0] : 0;
            part[kind][g] = (uint8_t)(number > 63 ? 63 : number > 0 ? number : 0);
            line[kind][g] = factor[kind] * part[kind][g];
        }
    }
    for (int g = 0; g < 4; g++) {
        for (int kind = 0; kind < 2; kind++) six[4 * kind + g] = (uint8_t)(part[kind][g] | part[kind][g + 4] >> 4 << 6);
        six[8 + g] = (uint8_t)((part[0][g + 4] & 15) | part[1][g + 4] << 4);
    }
    memset(lower, 0, SUPER / 2);
    for (int g = 0; g < GROUPS; g++) {
        const Four inverse = all(line[0][g] > 0 ? 1 / line[0][g] : 0), minus = all(line[1][g]), end = all(15);
        for (int i = 0; i < FOURS; i++) {
            const Four number = smaller(larger(nearest((groups[g].w[i] + minus) * inverse), Four{}), end);
            for (int j = 0; j < 4; j++) lower[g / 2 * GROUP + 4 * i + j] |= (uint8_t)((int)number[j] << g % 2 * 4);
        }
    }
}

}  // namespace

// Rounds ``weights`` [rows, inputs], of a type, to blocks of a kind, each row from a new block on.
EXPORT int fly_round(int kind, int type, Span<const char> weights, int rows, int inputs, Span<uint8_t> blocks) {
    const int wide = kind == Q4_K ? SUPER : GROUP, bytes = kind == Q4_K ? BLOCK_OF_4 : BLOCK_OF_8;
    const int64_t each = bytes_of_type(type);
    if (const int error = within("a kind of blocks to round to", kind == Q8_0 || kind == Q4_K, 1, 1) ?:
                          within("type of weights", type, FLOAT32, BFLOAT16) ?: within("rows", rows, 0, MAX_COUNT) ?:
                          within("inputs", inputs, 1, MAX_COUNT) ?: holds("weights", weights, rows, inputs, each) ?:
                          holds("blocks", blocks, rows, (inputs + wide - 1) / wide, bytes))
        return error;
    uint8_t* to = blocks;
    for (int row = 0; row < rows; row++)
        for (int from = 0; from < inputs; from += wide, to += bytes) {
            Group groups[GROUPS];
            for (int g = 0; g < wide / GROUP; g++) {
                const int at = from + g * GROUP, count = min_of(inputs - at, GROUP);
                groups[g] = count > 0 ? read(weights.at + (row * (int64_t)inputs + at) * each, type, count) : Group{};
            }
            if (kind == Q4_K)
                round_to_4(groups, to);
            else
                round_to_8(groups[0], to);
        }
    return OK;
}
