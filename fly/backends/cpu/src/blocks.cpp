// Matrices in the blocks of a GGUF file: the layout of each type's blocks, and how they are packed into strips (fly.h:
// Strip).
//
// While a model is packed (fly/backends/cpu/packed.py), ``fly_set_stored`` is called once for each matrix; several
// threads may pack different matrices at once. It checks all parts, takes memory, and packs strip by strip. Packing
// moves numbers and scales but changes none. If it fails, the matrix that was set before stays in place. Nothing
// interrupts it. While the model runs, only ``read_row`` is called, for embeddings (layers.h: embed). Knows nothing of
// the arithmetic.
//
// Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c (dequantize_row_*). All numbers have
// the lowest byte first.
#include "library.h"

using namespace fly;

namespace {

// One row's weights of a superblock, as read from its blocks.
struct Numbers {
    uint8_t number[SUPER];
    // Formats without ``parts``: scales and minima, float16.
    uint16_t scale[SUPER / GROUP], least[SUPER / GROUP];
    // Formats with ``parts``: scales [0] and minima [1] are ``factor`` (float16) times ``part``.
    uint16_t factor[2];
    int8_t part[2][SUPER / 16];
};

uint16_t half_at(const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return half;
}

uint32_t word_at(const uint8_t* at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

// Blocks of 32 numbers: a scale; a minimum if the format has one; fifth bits if the numbers have 5; and 16 bytes, each with the
// lower four bits of number i and of number i + 16.
template <bool LEAST, bool FIFTH>
void read_32(const uint8_t* block, int group, Numbers* to) {
    to->scale[group] = half_at(block), block += 2;
    if (LEAST) to->least[group] = half_at(block), block += 2;
    const uint32_t fifth = FIFTH ? word_at(block) : 0;
    block += FIFTH ? 4 : 0;
    uint8_t* number = to->number + group * GROUP;
    for (int i = 0; i < 16; i++) {
        number[i] = (uint8_t)((block[i] & 15) | (fifth >> i & 1) << 4);
        number[i + 16] = (uint8_t)(block[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
    }
}

// Blocks of 32: a scale and 32 signed numbers.
void read_q8_0(const uint8_t* block, int group, Numbers* to) {
    to->scale[group] = half_at(block);
    for (int i = 0; i < GROUP; i++) to->number[group * GROUP + i] = (uint8_t)(block[2 + i] ^ 128);  // 128 more
}

// Blocks of 256: two factors; 8 scales and 8 minima of 6 bits, in 12 bytes; fifth bits if the numbers have 5; and the
// lower four bits of numbers, two groups of 32 in each 32 bytes. This format subtracts minima, so the sign of their
// factor is flipped.
template <bool FIFTH>
void read_k(const uint8_t* block, int, Numbers* to) {
    to->factor[0] = half_at(block), to->factor[1] = half_at(block + 2) ^ 0x8000;
    const uint8_t *six = block + 4, *fifth = block + 16, *lower = block + (FIFTH ? 48 : 16);
    for (int g = 0; g < 8; g++) {
        const int high = g - 4;  // the upper two bits of the last four are stored with the first four
        to->part[0][g] = (int8_t)(g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[high] >> 6 << 4);
        to->part[1][g] = (int8_t)(g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4);
    }
    for (int i = 0; i < SUPER; i++) {
        const int g = i / 32, four = lower[g / 2 * 32 + i % 32] >> g % 2 * 4 & 15;
        to->number[i] = (uint8_t)(FIFTH ? four | (fifth[i % 32] >> g & 1) << 4 : four);
    }
}

// Blocks of 256: the lower four bits of all numbers, their upper two bits, 16 signed scales, and a factor.
void read_q6_k(const uint8_t* block, int, Numbers* to) {
    const uint8_t *lower = block, *upper = block + 128;
    memcpy(to->part[0], block + 192, 16);
    to->factor[0] = half_at(block + 208);
    for (int i = 0; i < SUPER; i++) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const int four = lower[half * 64 + quarter % 2 * 32 + at] >> quarter / 2 * 4 & 15;
        to->number[i] = (uint8_t)(four | (upper[half * 32 + at] >> quarter * 2 & 3) << 4);
    }
}

struct Kind {
    int number;          // in the file format
    int inputs, bytes;   // of a block
    Format format;
    void (*read)(const uint8_t* block, int group, Numbers* to);
};

constexpr Kind KINDS[] = {
    {2, 32, 18, {4, 32, 8, false}, read_32<false, false>},   // Q4_0
    {3, 32, 20, {4, 32, 0, false}, read_32<true, false>},    // Q4_1
    {6, 32, 22, {8, 32, 16, false}, read_32<false, true>},   // Q5_0
    {7, 32, 24, {8, 32, 0, false}, read_32<true, true>},     // Q5_1
    {8, 32, 34, {8, 32, 128, false}, read_q8_0},             // Q8_0
    {12, 256, 144, {4, 32, 0, true}, read_k<false>},         // Q4_K
    {13, 256, 176, {8, 32, 0, true}, read_k<true>},          // Q5_K
    {14, 256, 210, {8, 16, 32, true}, read_q6_k},            // Q6_K
};

constexpr int LAST_KIND = 14;

const Kind* kind_of(int number) {
    for (const Kind& kind : KINDS)
        if (kind.number == number) return &kind;
    return nullptr;
}

int64_t row_bytes(const Kind& kind, int inputs) { return (inputs + kind.inputs - 1) / kind.inputs * (int64_t)kind.bytes; }

// Reads the superblock of a row that begins at input ``from``.
void read(const Kind& kind, const char* row, int from, int inputs, Numbers* to) {
    for (int i = 0; i < min_of(SUPER, inputs - from); i += kind.inputs)
        kind.read((const uint8_t*)row + (from + i) / kind.inputs * (int64_t)kind.bytes, i / GROUP, to);
}

long strip_bytes(Format format, int inputs) {
    long bytes = 0;
    for (int from = 0; from < inputs; from += SUPER) {
        const int groups = groups_of(format, min_of(inputs - from, SUPER));
        bytes += head_bytes(format, groups) + (long)groups * format.group * STRIP * format.bits / 8;
    }
    return bytes;
}

// Packs up to 16 rows (null: zeros) into a strip at ``to``.
void pack_strip(const Kind& kind, const char* const* rows, int inputs, char* to) {
    const Format format = kind.format;
    Numbers read_of[STRIP];
    memset(read_of, 0, sizeof(read_of));
    for (int from = 0; from < inputs; from += SUPER) {
        const int groups = groups_of(format, min_of(inputs - from, SUPER));
        for (int lane = 0; lane < STRIP; lane++)
            if (rows[lane]) read(kind, rows[lane], from, inputs, read_of + lane);
        // The head.
        char* const numbers = to + head_bytes(format, groups);
        memset(to, 0, numbers - to);
        const auto put = [&](auto value) { memcpy(to, &value, sizeof(value)), to += sizeof(value); };
        const int kinds = format.centre ? 1 : 2;
        for (int which = 0; format.parts && which < kinds; which++)
            for (const Numbers& row : read_of) put(row.factor[which]);
        for (int which = 0; which < kinds; which++)
            for (int g = 0; g < groups; g++)
                for (const Numbers& row : read_of) {
                    if (format.parts)
                        put(row.part[which][g]);
                    else
                        put(which ? row.least[g] : row.scale[g]);
                }
        // The numbers; with 4 bits, a byte holds numbers of two steps.
        to = numbers;
        for (int i = 0; i < groups * format.group; i += format.bits == 4 ? 8 : 4)
            for (const Numbers& row : read_of) {
                uint32_t four = word_at(row.number + i);
                if (format.bits == 4) four |= word_at(row.number + i + 4) << 4;
                put(four);
            }
    }
}

}  // namespace

void fly::read_row(int number, const char* blocks, int width, float* to) {
    const Kind& kind = *kind_of(number);
    const Format format = kind.format;
    Numbers row;
    for (int from = 0; from < width; from += SUPER) {
        read(kind, blocks, from, width, &row);
        for (int at = 0, g = 0; at < min_of(SUPER, width - from); at += format.group, g++) {
            float scale, least;
            if (format.parts) {
                scale = from_half(row.factor[0]) * row.part[0][g];
                least = format.centre ? -(float)format.centre * scale : from_half(row.factor[1]) * row.part[1][g];
            } else {
                scale = from_half(row.scale[g]);
                least = format.centre ? -(float)format.centre * scale : from_half(row.least[g]);
            }
            const int end = min_of(at + format.group, width - from);
            for (int i = at; i < end; i++) to[from + i] = scale * row.number[i] + least;
        }
    }
}

namespace {

// Makes a sketch (fly.h: Sketch) of the head, whose rows are ``parts``: a weight becomes its sign, and a row's scale is the mean
// size of its weights. False if memory runs out.
bool make_sketch(Model* model, Span<const Stored> parts) {
    const int vocab = model->shape.vocab, width = model->shape.width;
    Sketch made = {nullptr, nullptr, padded(vocab, SKETCHED) / SKETCHED, padded(width, 8) / 8};
    const int64_t block = made.eighths * (int64_t)SKETCHED;
    made.bits = (uint8_t*)allocate(made.blocks * block);
    made.scale = (float*)allocate(made.blocks * (int64_t)SKETCHED * (int64_t)sizeof(float));
    float* weight = (float*)allocate(padded(width, 8) * (int64_t)sizeof(float));  // zeros after the last
    const bool ready = made.bits && made.scale && weight;
    int64_t row = 0;
    for (const Stored& part : parts)
        for (int at = 0; ready && at < part.rows; at++, row++) {
            fly::read_row(part.kind, part.data + at * row_bytes(*kind_of(part.kind), width), width, weight);
            const int lane = (int)(row % SKETCHED), place = lane < SKETCHED / 2 ? 2 * lane : 2 * lane - SKETCHED + 1;
            uint8_t* bits = made.bits + row / SKETCHED * block + place;
            float size[8] = {}, whole = 0;
            for (int i = 0; i < made.eighths; i++) {
                int byte = 0;
                for (int j = 0; j < 8; j++) {
                    size[j] += __builtin_fabsf(weight[8 * i + j]);
                    byte |= (weight[8 * i + j] > 0) << j;
                }
                bits[i * (long)SKETCHED] = (uint8_t)byte;
            }
            for (const float each : size) whole += each;
            made.scale[row] = whole / width;
        }
    free(weight);
    Sketch& old = model->sketch;
    free(ready ? old.bits : made.bits), free(ready ? old.scale : made.scale);
    if (!ready) return false;
    old = made;
    model->work.tile = 0;  // its workspace has no room for a sketch yet
    return true;
}

}  // namespace

// Sets matrix ``which`` (models.cpp: fly_set_matrix) of a model of GROUPED weights. ``parts``
// are its rows in order, each part in blocks of one kind. Each part begins at a multiple of 16 rows, and in gate_up one
// begins at the first up. ``sketched``: the head, without a bias, gets a sketch.
EXPORT int fly_set_stored(Model* model, int number, int which, Span<const Stored> parts, Span<const float> bias, int sketched) {
    MatrixPlace place;
    if (const int error = place_of(model, number, which, &place) ?:
                          within("weights of this model", model->shape.weights, GROUPED, GROUPED) ?:
                          holds_or_none("bias", bias, place.n) ?:
                          within("the matrix of a sketch", sketched ? which : 4, 4, 4) ?:
                          within("a bias beside a sketch", sketched && bias.there(), 0, 0))
        return error;
    // Check the parts: their kinds, their sizes, and where each begins.
    const bool pairs = which == 2;
    int64_t rows = 0;
    for (const Stored& part : parts) {
        const Kind* kind = kind_of(part.kind);
        const int64_t from = pairs && rows >= place.n / 2 ? rows - place.n / 2 : rows;
        if (const int error = (kind ? OK : refuse(REFUSED, "a kind of blocks", part.kind, KINDS[0].number, LAST_KIND)) ?:
                              within("rows of a part", part.rows, 1, MAX_COUNT) ?:
                              holds("a part of a matrix", part.data, part.rows, row_bytes(*kind, place.k)) ?:
                              within("the rest of a part's first row by 16", from % STRIP, 0, 0) ?:
                              within("a part's end after the first up",
                                     pairs && rows < place.n / 2 && rows + part.rows > place.n / 2, 0, 0))
            return error;
        rows += part.rows;
    }
    if (const int error = within("rows of all parts", rows, place.n, place.n)) return error;
    // Take memory for the strips, which lie in the order of panels.
    Matrix made = {};
    made.n = place.n, made.k = place.k, made.panels = panels_of(place.n, pairs);
    if (!(made.strips = (Strip*)allocate(2 * made.panels * (int64_t)sizeof(Strip)))) return refuse(NO_MEMORY, "a matrix", 0, 0);
    const auto part_of = [&](int64_t row, int64_t* first) {
        int at = 0;
        for (*first = 0; row >= *first + parts[at].rows; at++) *first += parts[at].rows;
        return &parts[at];
    };
    const auto first_row = [&](int strip) { return source_row(strip / 2, strip % 2 * STRIP, place.n, pairs); };
    int64_t bytes = 0, first;
    for (int strip = 0; strip < 2 * made.panels; strip++) {
        const int row = first_row(strip);  // -1: all padding
        const Stored* part = part_of(row < 0 ? 0 : row, &first);
        made.strips[strip].format = kind_of(part->kind)->format;
        bytes += strip_bytes(made.strips[strip].format, place.k);
    }
    made.panel_bytes = bytes / made.panels;
    made.data = (char*)allocate(bytes, false);
    if (!made.data || (bias.there() && !bias_of(&made, bias, pairs))) {
        drop(made);
        return refuse(NO_MEMORY, "a matrix", 0, bytes);
    }
    // Pack strip by strip, and put the matrix in place.
    char* to = made.data;
    for (int strip = 0; strip < 2 * made.panels; strip++) {
        const int row = first_row(strip);
        const Stored* part = part_of(row < 0 ? 0 : row, &first);
        const Kind& kind = *kind_of(part->kind);
        const char* from[STRIP];
        for (int lane = 0; lane < STRIP; lane++) {
            const int at = source_row(strip / 2, strip % 2 * STRIP + lane, place.n, pairs);
            from[lane] = at < 0 ? nullptr : part->data + (at - first) * row_bytes(kind, place.k);
        }
        pack_strip(kind, from, place.k, to);
        made.strips[strip].data = to;
        to += strip_bytes(kind.format, place.k);
    }
    drop(*place.matrix);
    *place.matrix = made;
    return !sketched || make_sketch(model, parts) ? OK : refuse(NO_MEMORY, "a sketch", 0, place.n * (int64_t)place.k / 8);
}

// Sets the embedding [V, C] in blocks of a kind, instead of plain numbers. Its memory must outlive the model.
EXPORT int fly_set_embedding(Model* model, int number, Span<const char> blocks) {
    const Kind* kind = kind_of(number);
    const int64_t bytes = kind ? row_bytes(*kind, model->shape.width) : 0;
    if (const int error = (kind ? OK : refuse(REFUSED, "a kind of blocks", number, KINDS[0].number, LAST_KIND)) ?:
                          within("embeddings of a shared model", model->tokens, model->shape.vocab, model->shape.vocab) ?:
                          holds("embedding", blocks, model->tokens, bytes))
        return error;
    model->embedding = {blocks.at, model->tokens * bytes}, model->embedding_kind = number;
    return OK;
}
