// What the sources share: a packed model, a call over it, and the variants that run one.
//
// Shapes: T packed tokens, C hidden width, N outputs and K inputs of a matrix, H query heads, G key/value heads,
// D head width, S stored tokens of a row, Z tokens a page, V vocabulary.
//
// Plain C++17 without exceptions and without the standard library: the variants are compiled for processors that may
// not be the one at hand, and a template of the library instantiated in one of them could be linked in for all.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#define UNROLL _Pragma("GCC unroll 16")
#define ALWAYS_INLINE inline __attribute__((always_inline))  // what would be called by way of memory
#define NOINLINE __attribute__((noinline))  // what needs all registers to itself

namespace fly {

constexpr int PANEL = 32;       // outputs of a matrix that lie together
constexpr int MAX_TILE = 256;   // packed tokens that go through all layers at once
constexpr int MAX_COPIES = 256; // tokens of a drafter's forward that a lookup copied
constexpr int MAX_THREADS = 64;

// W8A8 is int8 whose products are of whole numbers: what it is multiplied with is rounded to 8 bits as well, row by row.
enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, W8A8 = 3 };

struct Shape {
    int32_t width, intermediate, layers, heads, kv_heads, head_dim, vocab, positions;
    int32_t weights;  // Type of the matrices
    int32_t hidden;   // Type of the hidden states that go in and out, and of an embedding of its own
    float eps;
};

// W of x·Wᵀ, in panels of 32 outputs; within a panel, all outputs of one input lie together. Narrower types than float32
// take two inputs at once: bfloat16 output by output, int8 both of 16 outputs, then those of the other 16. W8A8 takes four,
// output by output.
struct Matrix {
    char* data;
    long panel_bytes;
    int n, k, panels;
    float* bias;   // [panels · 32] or null
    float* scale;  // [panels · 32], int8 and W8A8: the weight is scale · data
    int32_t* offset;  // [panels · 32], W8A8: 128 · the sum of an output's data
};

struct Layer {
    float *input_norm, *post_norm;  // [C padded]
    Matrix qkv, o, gate_up, down;   // the panels of gate_up hold 16 gates and their 16 ups
};

// Buffers of one tile. Everything is padded to 32 values with zeros, which stay zeros.
struct Workspace {
    int tile;            // tokens they are for
    float* x;            // [T, C] the residual stream
    float* part;         // [T, C] what this process adds to it, where others add theirs
    float* qkv;          // [T, (H + 2G)·D]
    void* normed;        // [T, C], in the type of activations
    void* attended;      // [T, H·D]
    void* gated;         // [T, intermediate]
    uint8_t* narrow;     // [T, the most inputs of a matrix] of W8A8, 128 above what it stands for; padded to 64
    float* steps;        // [T] of W8A8: what is 1 there
    int last_rows;       // rows that the following are for
    void* last;          // [rows, C], what the logits of a drafter's step are made from
    float* logits;       // [rows, V]
    float* spread;       // [2, V padded], of one row
    int longest;         // stored tokens that the following are for
    long scratch_bytes;  // of each thread's own
    char* scratch[MAX_THREADS];
};

struct Variant;

struct Model {
    Shape shape;
    const Variant* variant;
    Layer* layers;
    float* norm;
    Matrix head;
    const void* embedding;  // [V, C], its owner's; null where the head's panels serve as well
    // Where several processes share a model, each holds a part of every matrix and ``shape.vocab`` of all ``tokens``,
    // from ``first_token`` on; ``sum`` adds up ``count`` values over the processes, in place. Null is one process.
    void (*sum)(float* values, int64_t count);
    int32_t tokens, first_token;
    float *cos, *sin;       // [positions, D/2]
    Workspace work;
    pthread_mutex_t lock;  // of the workspace
};

// One sequence of a call: ``count`` new tokens behind ``start`` stored ones.
struct Row {
    const int32_t* table;  // its pages
    const uint8_t* mask;   // [count, start + count], what each new token sees; null is causal
    int32_t start, count;
};

// Part of a row in a tile: its new tokens ``from`` to ``to``, packed from ``at`` on.
struct Piece {
    int32_t row, from, to, at;
};

struct Cache {
    void *keys, *values;   // [layers, slots, G, D]
    int64_t layer_stride;  // in elements
    int32_t type, page;
};

// How a row draws (fly/sampling.py: Distribution). At temperature 0 it takes the most likely.
struct Sampling {
    float temperature, top_p, floor;  // floor: temperature · ln min_p, -inf where that is off
    int32_t top_k;                    // 0 is off
};

// Where a drafter stops: before a token if none has at least this probability there, or if the entropy there is higher,
// in nats (fly/drafts/model.py: SingleDraft). 0 and infinity never stop it.
struct Sure {
    float confidence, entropy;
};

// Prompt lookup for a drafter (fly/drafts/ngram.py), which says itself what follows, copied or not: a copy only lets it
// say several tokens in one forward. How much is copied goes by what was seen so far.
constexpr int MATCHES = 16, TIMES = 64;

struct Lookup {
    int32_t longest, shortest, most;  // tokens to find again, and to copy
    uint32_t forwards;
    float share[MATCHES];  // of the tokens copied behind a match of 1, 2, ... tokens (or more), how many it said as well
    float time[TIMES];     // nanoseconds of a forward of 1, 2, ... tokens; 0 was not seen
};

struct Barrier {
    alignas(64) int32_t arrived;
    alignas(64) int32_t phase;
};

struct Call {
    Model* model;
    Cache cache;
    int32_t rows, tokens;
    const Row* row;
    const int64_t *token, *position;  // [T]
    const int32_t* layer;             // numbers of the layers to go through
    int32_t layers;
    void* hidden;  // [T, C] in or out
    float* logits;  // [T, V] out, of all tokens or of those that are kept
    const int32_t* kept;  // [N] their numbers; null is all
    int32_t kept_count;
    int32_t* choice;      // [N] out: the most likely token of each; or null
    // a drafter's loop
    int32_t most;           // columns of ``drafted``
    const int32_t* limit;   // [B] tokens to draft at most
    const int64_t* stop;    // ids that end a row, those of row b from stop_at[b] to stop_at[b + 1]
    const int32_t* stop_at;
    int64_t* drafted;       // [B, most] out
    int32_t* drafted_count; // [B] out
    const Sampling* sampling;  // [B]; null where every row takes the most likely
    const float* uniform;      // [B, most] in [0, 1)
    float* distributions;               // [B, most, V] out: what each token was drawn from
    Lookup* lookup;            // null looks up nothing
    Sure sure;
    // shared by the threads
    Piece* pieces;   // [B]
    int32_t piece_count, tile_tokens, tile_at;
    Row* live;           // rows of the current step, [B]
    int32_t* live_row;   // [B] their numbers
    int64_t *live_token, *live_position;  // [T]
    int32_t live_rows;
    int32_t** text;      // [B] all tokens of each row (those stored only for a lookup), with room for what is drafted
    int32_t* matched;    // [B] of the live rows: tokens found again; copies of what followed lie behind the text
    int32_t* kept_at;    // [B + 1] where the logits of each live row begin: of its last token, and of each copy fed
    int32_t threads;
    alignas(64) int32_t taken;  // panels of the product under way that somebody works on
    alignas(64) int64_t stalled;  // nanoseconds of waiting for somebody unduly long
    Barrier barrier;
};

// The code for one kind of processor.
struct Variant {
    const char* name;
    int (*activation_bytes)(int weights);  // of one value that goes into a product
    long (*scratch_bytes)(const Shape*, int longest);
    void (*forward)(Call*, int thread);
    void (*logits)(Call*, int thread);
    void (*draft)(Call*, int thread);
    void (*score)(Call*, int thread);  // forward and logits
    void (*top)(const float* logits, int vocab, int n, float* found);
    void (*kept)(const float* logits, int rows, int each, int vocab, const Sampling* how, float* spread, float* peak,
                 float* least, float* total);
    int (*accepts)(const float* logits, int vocab, const Sampling* how, const int64_t* drafted, int count,
                   const float* distributions, const float* coins, bool all, float* spread, uint8_t* keeps);
    int64_t (*follow)(const float* logits, int vocab, const Sampling* how, int64_t rejected, const float* distribution,
                      float uniform, float* spread);
    int (*look_up)(const Lookup& lookup, int32_t* text, int length, int most);
};

extern const Variant avx512bf16, avx512, avx2;

static inline int padded(int n, int to = PANEL) { return (n + to - 1) / to * to; }

// Inputs of the widest matrix.
static inline int most_inputs(const Shape& shape) {
    const int heads = shape.heads * shape.head_dim, most = shape.width > heads ? shape.width : heads;
    return most > shape.intermediate ? most : shape.intermediate;
}

static inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Bring a line of memory into the second level of the caches, or into the first. Not by the builtin: GCC takes what only
// calls that for free of effects, and drops it.
static inline void fetch(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 (%0)" ::"r"(at));
#endif
}

static inline void fetch_close(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 (%0)" ::"r"(at));
#endif
}

// What a product has registers for: so many rows, and up to ``four`` of them with four panels at once, ``two`` with two.
struct Room {
    int rows, four, two;

    constexpr int panels(int count) const { return count <= four ? 4 : count <= two ? 2 : 1; }
};

// Panels to come: the first of them, and how far apart they lie.
struct Place {
    const char* at;
    long panel;
};

// Weights that a product asks for while it multiplies others, as a core left to itself waits for too few lines at once:
// those ``from`` bytes on in each of its panels, and behind their end those at ``then``. FEW of them, which the processor
// keeps in its caches, go into the first level; MANY into the second, which waits for more lines at once, and from there
// into the first shortly before their turn; HALF of a step's in each step into the second; and NONE.
enum class Asked { NONE, FEW, MANY, HALF };

template <Asked ASKED>
struct Ahead {
    long from;
    Place then;

    template <int P, int BYTES>  // panels, and bytes of a step in each
    ALWAYS_INLINE void ask(const char* w, long panel, int k) const {
        constexpr int SHORTLY = 2048 / P, EACH = ASKED == Asked::HALF ? BYTES / 2 : BYTES;
        const auto lines = [&](long at, auto bring) {
            const bool here = at < panel;
            const char* line = here ? w + at : then.at + (at - panel);
            UNROLL for (int j = 0; j < P; j++)
                for (int i = 0; i < EACH; i += 64) bring(line + j * (here ? panel : then.panel) + i);
        };
        if (ASKED == Asked::NONE || (EACH < 64 && k % 2)) return;
        if (ASKED != Asked::FEW) lines(from + k * (long)EACH, fetch);
        if (ASKED == Asked::FEW) lines(from + k * (long)EACH, fetch_close);
        if (ASKED == Asked::MANY && P > 1) lines(SHORTLY + k * (long)EACH, fetch_close);
        if (ASKED == Asked::MANY && P == 1)  // the next panel lies behind it, mostly, and steps are short
            for (int i = 0; i < BYTES; i += 64) fetch_close((const char*)((uintptr_t)w + k * (long)BYTES + SHORTLY + i));
    }
};

// The next tile: as many new tokens as fit, of as many rows as they are of.
static inline void next_tile(Call* call) {
    int row = 0, from = 0;
    if (call->piece_count) {
        const Piece& last = call->pieces[call->piece_count - 1];
        row = last.row, from = last.to;
        if (from == call->row[row].count) row++, from = 0;
    }
    call->tile_at += call->tile_tokens;
    call->tile_tokens = call->piece_count = 0;
    while (row < call->rows && call->tile_tokens < MAX_TILE) {
        const int left = call->row[row].count - from, room = MAX_TILE - call->tile_tokens;
        const int count = left < room ? left : room;
        call->pieces[call->piece_count++] = {row, from, from + count, call->tile_tokens};
        call->tile_tokens += count;
        row++, from = 0;
    }
}

static inline void first_tile(Call* call) {
    call->tile_at = call->tile_tokens = call->piece_count = 0;
    next_tile(call);
}

}  // namespace fly
